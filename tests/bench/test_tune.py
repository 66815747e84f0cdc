"""`bench tune` with a timer whose times are known, in the interpreter."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench.cases  # noqa: F401  registers them
from bench import tune
from bench.registry import CASES
from saguaro_kernels import verification
from saguaro_kernels.distribution.launch import ScanConfig  # noqa: F401  rows name it
from saguaro_kernels.ngram import NgramConfig  # noqa: F401
from saguaro_kernels.promotion import PromotionConfig  # noqa: F401
from saguaro_kernels.verification.launch import VerifyConfig  # noqa: F401

SMALL = {
    "verify.block": {"B": 1, "K": 1, "V": 256, "T": 1.0, "rule": "block"},
    "residual": {"R": 1, "V": 256, "T": 1.0},
    "row_stats": {"R": 1, "V": 256, "T": 1.0},
    "promote_branch": {"B": 1, "M": 4, "K": 2, "layers": 1, "Hkv": 2, "D": 64},
    "ngram_propose": {"B": 1, "N": 64, "K": 3},
}
FASTEST = {
    "verify.block": {"block_v": 128, "noise_warps": 8},
    "residual": {"block_v": 128, "noise_warps": 8},
    "row_stats": {"block": 128, "max_splits": 4},
    "promote_branch": {"block_e": 64},
    "ngram_propose": {"block": 32},
}


class FakeTimer:
    """Runs everything once, and times a config by whether it has the sizes of `fastest`."""

    def __init__(self, fastest: dict[str, int]) -> None:
        self.fastest, self.timed = fastest, []

    def __call__(self, providers: Any) -> dict[str, list[float]]:
        for runs in providers.values():
            for run in runs:
                run()
        self.timed = list(providers)
        wanted = [f"{name}={value}" for name, value in self.fastest.items()]
        return {config: [8.0 - sum(its in config for its in wanted)] * 3 for config in providers}


def _tunable(name: str, choices: dict[str, tuple[int, ...]]) -> tune.Tunable:
    return tune.Tunable(tune.TUNABLES[name.partition(".")[0]].heuristic, choices)


@pytest.mark.parametrize("name", SMALL)
def test_a_row_names_the_fastest_config_as_it_is_written(name: str) -> None:
    case, timer = CASES[name], FakeTimer(FASTEST[name])
    tunable = _tunable(name, {field: (value, 2 * value) for field, value in FASTEST[name].items()})
    row = tune.tune(case, SMALL[name], torch.float32, tunable, timer, "cpu")
    default = tune.in_use(case, SMALL[name], torch.float32, tunable, "cpu")
    assert row.in_use == repr(default) != row.fastest
    config = eval(row.fastest)  # noqa: S307  the row is the expression to paste
    assert {field: getattr(config, field) for field in FASTEST[name]} == FASTEST[name]
    assert (row.in_use_us, row.fastest_us) == (8.0, 8.0 - len(FASTEST[name]))
    assert row.left_out == ()
    assert {row.in_use, row.fastest} <= set(timer.timed)
    assert len(timer.timed) in (2 ** len(FASTEST[name]), 2 ** len(FASTEST[name]) + 1)
    # The heuristic is as it was.
    assert repr(tune.in_use(case, SMALL[name], torch.float32, tunable, "cpu")) == row.in_use


def test_what_fails_or_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is no power of two does not launch; one is made to give another result."""
    case, tunable = CASES["row_stats"], _tunable("row_stats", {"block": (100, 128, 64)})
    chosen, asked = tune.chosen, [0]

    def watched(its: Any, changes: Any, *tell: Any) -> Any:
        asked[0] = changes.get("block", 0)
        return chosen(its, changes, *tell)

    def wrong_at_64(inputs: SimpleNamespace) -> Any:
        result = CASES["row_stats"].providers["ours"](inputs)
        result.lse.add_(asked[0] == 64)
        return result

    monkeypatch.setattr(tune, "chosen", watched)
    case = dataclasses.replace(case, providers={"ours": wrong_at_64})
    shape = {**SMALL["row_stats"], "R": 3}
    row = tune.tune(case, shape, torch.float32, tunable, FakeTimer({}), "cpu")
    assert [reason.partition(": ")[0].partition("block=")[2][:3] for reason in row.left_out] == [
        "100", "64,",
    ]  # fmt: skip
    assert "differ" in row.left_out[1]
    assert "left out, row_stats" in tune.table_of([row], "a machine")


def test_every_heuristic_is_asked_by_the_launch_that_it_is_for() -> None:
    """What the table says is in use is what a launch asks for."""
    shapes = SMALL | {
        "saguaro_sample": {"R": 1, "V": 256, "T": 0.7, "F": 4, "top_p": 0.9},
        "sample_geometric": {"R": 1, "V": 256, "T": 0.7},
        "predict_outcomes": {"B": 1, "K": 2, "V": 256, "M": 6, "T": 1.0},
        "tree_attention": {"B": 1, "M": 4, "K": 2, "L": 64, "Hq": 4, "Hkv": 2, "D": 32},
        "tree_layout": {"B": 1, "M": 4, "K": 2},
        "chain_layout": {"B": 1, "K": 2},
        "verify": SMALL["verify.block"],
    }
    shapes["row_stats"] = {**SMALL["row_stats"], "top_k": 5}
    for label, tunable in tune.TUNABLES.items():
        name = label.partition(",")[0]
        case = CASES["verify.block" if name == "verify" else name]
        config = tune.in_use(case, shapes[name], torch.float32, tunable, "cpu")
        assert set(tunable.choices) <= set(vars(config)), label


def test_a_wrong_launch_size_is_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["cache_lookup"]) == 2
    assert "no sizes to choose" in capsys.readouterr().out


def test_without_a_gpu_the_table_is_of_what_is_in_use(
    tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["verify"]) == 3
    assert "no GPU" in capsys.readouterr().out
    its = [(CASES[name], SMALL[name], tune.TUNABLES[name.partition(".")[0]]) for name in SMALL]
    monkeypatch.setattr(tune, "work", lambda name: its)
    assert tune.main(["--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert "VerifyConfig(block_v=4096, max_splits=16, num_warps=8, noise_warps=16)" in printed
    assert "us" not in printed.splitlines()[0].split()[-1:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"commit", "date", "triton"} <= set(rows["machine"])
    assert [row["case"] for row in rows["rows"]] == list(SMALL)


def test_the_work_of_a_name() -> None:
    def names(name: str) -> set[str]:
        return {case.name for case, _, _ in tune.work(name)}

    assert names("verify.token") == {"verify.token"}
    assert {"verify.token", "verify.hsd"} <= names("verify")
    assert names("nothing") == names("cache_insert") == set()
    assert {"row_stats", "verify.block", "tree_attention.chain"} <= names("all")
    filtered = [shape for _, shape, tunable in tune.work("row_stats") if tunable is tune._CUTOFF]
    assert filtered and all("top_k" in shape or "top_p" in shape for shape in filtered)
    assert verification.launch.VerifyConfig().block_v == 4096
