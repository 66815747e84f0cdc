"""The end-to-end table, on runs whose rates are known."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import engine_stats
import pytest

from bench import end_to_end
from saguaro_runtime import EngineConfig, SamplingParams
from saguaro_runtime.demo.report import Variant

STATS = engine_stats.STATS | {
    "t_redraft_step_ms": 15.0,
    "policy": {"method": "ssd", "k": 2, "branches": 12, "retry": 1, "why": "as configured"},
}


class FakeRun:
    """Decodes at a fixed pace on the test's clock; the last token is `last`."""

    def __init__(self, clock: list[float], seconds_per_token: float, last: int = 7) -> None:
        self.clock, self.pace, self.last = clock, seconds_per_token, last

    def decode(self, batch: Any, params: SamplingParams) -> list[list[int]]:
        self.clock[0] += self.pace * params.max_new_tokens * len(batch)
        return [[*[1] * (params.max_new_tokens - 1), self.last] for _ in batch]

    def reset(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return dict(STATS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("saguaro_runtime.demo.measure.time.perf_counter", lambda: now[0])
    return now


def test_ratios_spread_cores_and_texts(clock: list[float]) -> None:
    compared = end_to_end.methods(k=2, branches=12)
    paces = {"AR": 0.1, "AR, 2 threads": 0.05, "SD": 0.1, "SD, 2 threads": 0.08, "SSD": 0.04}
    paces[end_to_end.AUTO] = 0.1
    runs = {name: FakeRun(clock, pace) for name, pace in paces.items()}
    runs["SSD"].last = 8
    batches = end_to_end.batches_of([[1], [2], [3]], size=1, count=3)
    assert end_to_end.batches_of([[1], [2], [3]], size=2, count=3) == [
        [[1], [2]], [[3], [1]], [[2], [3]]
    ]  # fmt: skip
    rows = {r.variant: r for r in end_to_end.cell(runs, compared, batches, SamplingParams(10))}
    assert rows["SSD"].vs_ar == pytest.approx((2.5, 2.5, 2.5))
    assert rows["AR, 2 threads"].vs_sd == pytest.approx((2.0, 2.0, 2.0))
    per_core = {name: round(rows[name].per_core, 3) for name in list(paces)[:5]}
    assert per_core == {"AR": 10, "AR, 2 threads": 10, "SD": 5, "SD, 2 threads": 6.25, "SSD": 12.5}
    # SD: 2 tokens in 60 + 2 * 15 ms. SSD: half the rounds hit and take 60 ms, half redraft a token.
    assert rows["SSD"].theorem_7 == pytest.approx((2.0 / 67.5) / (2.0 / 90))
    assert rows["SD"].theorem_7 is None and rows["SD"].in_full is None
    # All pay 5 ms more a round and half a second for prompts; see the planner's tests.
    assert rows["SSD"].in_full == pytest.approx((10 * 92 + 500) / (10 * (60 + 5 + 3 + 9.5) + 500))
    assert (rows["SD"].same_texts, rows["SSD"].same_texts) == ("3/3", "0/3")
    assert rows[end_to_end.AUTO].note.startswith("ssd, k 2, 12 branches, retry 1")


def test_theorem_7_of_batches_and_of_what_the_policy_does() -> None:
    ssd = end_to_end.methods(k=2, branches=12)[-1].config

    def predicted(batch: int, **policy: Any) -> float | None:
        found = STATS | {"policy": STATS["policy"] | policy}
        return end_to_end.theorem_7(STATS, found, ssd, batch)

    # Of four rows one nearly always misses, and all wait; where missed rows go on, nobody does.
    assert predicted(4) == pytest.approx(90 / (60 + (1 - 0.5**4) * 15))
    assert predicted(4, retry=0) == pytest.approx(90 / 60)
    assert predicted(4, method="sd") == 1.0
    assert predicted(1, method="ar") == pytest.approx((1 / 60) / (2 / 90))
    sits_out = replace(ssd, fallback="independent")
    assert end_to_end.theorem_7(STATS, STATS, sits_out, 8) is None


def test_spread_is_that_of_the_batches() -> None:
    ratio = end_to_end.ratio({"rates": [2.0, 9.0, 4.0]}, {"rates": [1.0, 3.0, 4.0]})
    assert ratio == (2.0, 1.0, 3.0)


def test_options_change_one_thing_and_join_where_it_differs() -> None:
    ssd = end_to_end.methods(k=2, branches=12)[-2].config
    for variant in end_to_end.options(ssd):
        changed = {name for name, value in vars(variant.config).items() if value != vars(ssd)[name]}
        assert len(changed) == 1 and changed.pop() in variant.name

    def joining(temperature: float, batch: int) -> list[str]:
        return [
            its.name.removeprefix("SSD, ")
            for its in end_to_end.options(ssd)
            if end_to_end.joins(its, ssd, temperature, batch)
        ]

    rest = ["fallback batched_retry", "fallback partial_accept", "fallback independent"]
    assert joining(0.0, 1) == ["rule token", "rule coupled", *rest]
    assert joining(0.6, 1) == []
    assert joining(1.0, 1) == ["rule token", "rule coupled", "ranking probability", *rest]
    assert joining(1.0, 4) == []
    assert joining(1.0, 8) == [
        "fallback immediate_retry", "fallback batched_retry", "fallback independent"
    ]  # fmt: skip


@pytest.fixture
def fakes(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds per token, by variant; 1/8 where it is not named. Binary: their sums are exact."""
    paces: dict[str, float] = {}

    @contextlib.contextmanager
    def opened(_: Any, compared: list[Variant]) -> Any:
        yield {its.name: FakeRun(clock, paces.get(its.name, 0.125)) for its in compared}

    monkeypatch.setattr(end_to_end, "opened", opened)
    monkeypatch.setattr(end_to_end, "AssistedRun", lambda *_, **__: FakeRun(clock, 0.25))
    return paces


SETTINGS = argparse.Namespace(
    quick=False, k=2, branches=12, tokens=4, batches=2, temperatures=None, sizes=None
)


def test_cells_and_table(fakes: dict[str, float]) -> None:
    pair = end_to_end.Pair(None, None, None)
    cells = list(end_to_end.run(pair, [[1], [2]], SETTINGS))
    found = [(rows[0].temperature, rows[0].batch) for rows in cells]
    assert found == [(t, b) for t in (0.0, 0.6, 1.0) for b in (1, 4, 8)]
    rows = [row for rows in cells for row in rows]
    lines = end_to_end.render(rows).splitlines()
    assert len(lines) == 1 + len(rows) + 2 + 9 + 1  # header, legend, what "auto" did, verdict
    assert lines[-1] == "SSD, auto is at least as fast as SD in 9 of 9 cells"
    lookup = [line for line in lines if "prompt lookup" in line]
    assert len(lookup) == 3 and all("0.50 (0.50-0.50)" in line for line in lookup)
    assert {row.same_texts for row in rows if row.temperature} == {"-"}
    rest = list(end_to_end.run(pair, [[1], [2]], SETTINGS, set(found[:7])))
    assert [(its[0].temperature, its[0].batch) for its in rest] == found[7:]
    few = argparse.Namespace(**{**vars(SETTINGS), "temperatures": [0.3], "sizes": [2, 1]})
    cells = list(end_to_end.run(pair, [[1], [2]], few))
    assert [(cell[0].temperature, cell[0].batch) for cell in cells] == [(0.3, 2), (0.3, 1)]


def test_a_loss_against_sd_is_named_and_fails(fakes: dict[str, float]) -> None:
    fakes[end_to_end.AUTO] = 0.15625
    quick = argparse.Namespace(**{**vars(SETTINGS), "quick": True})
    cells = end_to_end.run(end_to_end.Pair(None, None, None), [[1]], quick)
    rows = [row for rows in cells for row in rows]
    assert {row.variant for row in rows if row.variant.startswith("SSD")} == {"SSD", "SSD, auto"}
    assert end_to_end.loses(rows)
    assert end_to_end.verdict(rows).endswith(
        "0 of 2 cells; not at T = 0, batch 1: 0.80 (0.80-0.80), T = 1, batch 1: 0.80 (0.80-0.80)"
    )
    better = [replace(row, vs_sd=(0.99, 0.9, 1.1)) for row in rows]
    assert not end_to_end.loses(better) and "0 of 2" in end_to_end.verdict(better)


def test_runs_are_compared_with_their_spread(fakes: dict[str, float], tmp_path: Path) -> None:
    quick = argparse.Namespace(**{**vars(SETTINGS), "quick": True})
    rows = next(end_to_end.run(end_to_end.Pair(None, None, None), [[1]], quick))[:1]
    now = [replace(rows[0], vs_ar=(1.0, 0.9, 1.1), vs_sd=(1.2, 1.1, 1.3))]
    file = tmp_path / "run.json"
    then = [replace(now[0], vs_ar=(1.1, 1.0, 1.2), vs_sd=(1.5, 1.4, 1.6))]
    file.write_text(json.dumps({"rows": [asdict(row) for row in then]}))
    lines = end_to_end.repeated(now, end_to_end.read(file)[1]).splitlines()
    assert [line.split()[2:] for line in lines[1:3]] == [
        ["AR", "vs", "AR", "1.10", "(1.00-1.20)", "1.00", "(0.90-1.10)", "-9.1%", "yes"],
        ["AR", "vs", "SD", "1.50", "(1.40-1.60)", "1.20", "(1.10-1.30)", "-20.0%", "NO"],
    ]
    assert lines[3].startswith("1 of 2 ratios differ by no more than the spread printed now")
    assert "no cell" in end_to_end.repeated(now, [replace(now[0], batch=7)])


def test_runs_of_other_settings_say_so() -> None:
    now = {"machine": {"commit": "a"}, "versions": {"torch": "2"}, "settings": {"k": 2}}
    assert end_to_end.changed(now, now) == "of the same commit"
    lines = end_to_end.changed(now, now | {"settings": {"k": 4}}).splitlines()
    assert lines == ["the other run differs in", "k: 4 then, 2 now"]


def test_cores_a_variant_keeps() -> None:
    assert end_to_end.cores(EngineConfig(method="ar", threads=2)) == 2
    assert end_to_end.cores(EngineConfig(method="sd", threads=1)) == 2
    assert end_to_end.cores(EngineConfig(method="sd", threads=2, lane="inline")) == 2
