"""The end-to-end table, on runs whose rates are known."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import pytest

from bench import end_to_end
from saguaro_runtime import EngineConfig, SamplingParams
from saguaro_runtime.demo.report import Variant

STATS = {
    "tokens_per_round": 2.0,
    "hit_rate": 0.5,
    "overlap": 0.9,
    "t_verify_ms": 60.0,
    "t_draft_step_ms": 15.0,
    "t_redraft_step_ms": 15.0,
    "t_look_ahead_ms": 45.0,
    "tokens_per_round_after": {"hit": 2.5, "miss": 1.5},
    "speculation": "on",
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
    compared = end_to_end.variants(quick=True, k=2, branches=12)
    paces = {"AR": 0.1, "AR, 2 threads": 0.05, "SD": 0.1, "SD, 2 threads": 0.08, "SSD": 0.04}
    runs = {name: FakeRun(clock, pace) for name, pace in paces.items()}
    runs["SSD"].last = 8
    batches = end_to_end.batches_of([[1], [2], [3]], size=2, count=3)
    assert batches == [[[1], [2]], [[3], [1]], [[2], [3]]]
    rows = {r.variant: r for r in end_to_end.cell(runs, compared, batches, SamplingParams(10))}
    assert rows["SSD"].vs_ar == pytest.approx((2.5, 2.5, 2.5))
    assert rows["AR, 2 threads"].vs_sd == pytest.approx((2.0, 2.0, 2.0))
    per_core = {name: round(rows[name].per_core, 3) for name in paces}
    assert per_core == {"AR": 10, "AR, 2 threads": 10, "SD": 5, "SD, 2 threads": 6.25, "SSD": 12.5}
    # SD: 2 tokens in 60 + 2 * 15 ms. SSD: half the rounds hit and take 60 ms, half redraft a token.
    assert rows["SSD"].theorem_7 == pytest.approx((2.0 / 67.5) / (2.0 / 90))
    assert rows["SD"].theorem_7 is None
    assert (rows["SD"].same_texts, rows["SSD"].same_texts) == ("6/6", "0/6")


def test_spread_is_that_of_the_batches() -> None:
    ratio = end_to_end.ratio({"rates": [2.0, 9.0, 4.0]}, {"rates": [1.0, 3.0, 4.0]})
    assert ratio == (2.0, 1.0, 3.0)


def test_full_run_changes_one_thing_at_a_time() -> None:
    full = end_to_end.variants(quick=False, k=2, branches=12)
    default = next(v.config for v in full if v.name == "SSD")
    for variant in full:
        if variant.name.startswith("SSD, "):
            changed = {
                name
                for name, value in vars(variant.config).items()
                if value != getattr(default, name)
            }
            assert len(changed) == 1 and changed.pop() in variant.name


def test_cells_and_table(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def opened(_: Any, compared: list[Variant]) -> Any:
        yield {variant.name: FakeRun(clock, 0.1) for variant in compared}

    monkeypatch.setattr(end_to_end, "opened", opened)
    monkeypatch.setattr(end_to_end, "AssistedRun", lambda *_, **__: FakeRun(clock, 0.2))
    options = argparse.Namespace(quick=False, k=2, branches=12, tokens=4, batches=4)
    pair = end_to_end.Pair(None, None, None)
    rows = list(end_to_end.run(pair, [[1], [2]], options))
    cells = {(row.temperature, row.batch) for row in rows}
    assert cells == {(t, b) for t in (0.0, 0.6, 1.0) for b in (1, 4, 8)}
    lines = end_to_end.render(rows).splitlines()
    assert len(lines) == len(rows) + 1
    lookup = [line for line in lines if "prompt lookup" in line]
    assert len(lookup) == 3 and all("0.50 (0.50-0.50)" in line for line in lookup)
    assert {row.same_texts for row in rows if row.temperature} == {"-"}


def test_cores_a_variant_keeps() -> None:
    assert end_to_end.cores(EngineConfig(method="ar", threads=2)) == 2
    assert end_to_end.cores(EngineConfig(method="sd", threads=1)) == 2
    assert end_to_end.cores(EngineConfig(method="sd", threads=2, lane="inline")) == 2
