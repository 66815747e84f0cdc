"""`bench gpu` on a machine without one, and the parts of it that need none."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_cuda
import pretend_flash
import pytest
import tiny_models
import torch

import bench.cases  # noqa: F401  registers them
from bench import __main__ as command
from bench import gpu, gpu_engine, measure, timing, tune
from bench.registry import CASES
from saguaro_kernels import _launch
from saguaro_runtime.models import flash


def test_without_a_gpu_it_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["gpu"]) == 3
    assert "nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize("visible, there", [(None, True), ("0", True), ("", False)])
def test_a_hidden_gpu_is_none(visible: str | None, there: bool, monkeypatch) -> None:
    monkeypatch.setattr(command.Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command._has_gpu() == there


def test_inputs_are_copied_to_the_last_tensor() -> None:
    shape = {"B": 2, "M": 4, "K": 2}
    inputs = CASES["cache_lookup"].inputs(shape, torch.float32, "cpu")
    copy = measure.moved(inputs, "cpu")
    assert torch.equal(copy.cache.buckets, inputs.cache.buckets)
    copy.cache.buckets.zero_()
    copy.uid.zero_()
    assert inputs.cache.buckets.any() and inputs.uid.any()
    verify = CASES["verify.token"]
    shape = {"B": 1, "K": 2, "V": 64, "T": 1.0, "rule": "token"}
    inputs = verify.inputs(shape, torch.float32, "cpu")
    copy = measure.moved(inputs, "meta")
    assert copy.draft.sampling.temperature.device.type == "meta"
    assert copy.draft.logits.shape == inputs.draft.logits.shape
    inputs = CASES["promote_pages"].inputs({"B": 2, "M": 4, "K": 2}, torch.float32, "cpu")
    assert measure.moved(inputs, "meta").hits["branch"].device.type == "meta"


def test_differences_are_found() -> None:
    ids, numbers = torch.arange(200), torch.randn(200, 3)
    assert gpu.difference([ids, numbers], [ids, numbers]) == ("ok", False)
    near = ids.clone()
    near[3] = -1
    assert gpu.difference([near], [ids]) == ("ok, near ties: 1", False)
    far = ids.clone()
    far[:3] = -1
    assert gpu.difference([far], [ids])[1]
    assert gpu.difference([ids[:1]], [ids[1:2]])[1]
    assert gpu.difference([numbers + 0.1], [numbers])[1]
    assert gpu.difference([1.1e-4 * numbers], [1e-4 * numbers])[1]
    assert gpu.difference([numbers.half()], [numbers])[1]
    infinite = torch.tensor([torch.inf, -torch.inf, 1.0])
    assert gpu.difference([infinite], [infinite.clone()]) == ("ok", False)


def test_what_a_call_produced() -> None:
    @dataclasses.dataclass
    class Result:
        tokens: torch.Tensor
        name: str

    tokens = torch.ones(2)
    assert measure.outputs(None, Result(tokens, "x"))[0] is tokens
    assert measure.outputs(None, tokens)[0] is tokens
    case = CASES["promote_branch"]
    shape = {"B": 1, "M": 4, "K": 2, "layers": 1, "Hkv": 1, "D": 8}
    inputs = case.inputs(shape, torch.float32, "cpu")
    assert measure.outputs(inputs, case.providers["torch"](inputs))[0] is inputs.pages


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")])
def test_the_engine_s_part_runs(devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that are not there; and a text that differs is found."""

    def pair(dtype: torch.dtype, where: tuple[str, str], **_: int) -> Any:
        target = tiny_models.llama(scale=1.5)
        draft = tiny_models.llama(1, near=target, scale=1.5)
        return machine.place(target, where[0]), machine.place(draft, where[1])

    monkeypatch.setattr(gpu_engine, "pair", pair)
    small = {"NEW_TOKENS": 4, "WARM_UP_TOKENS": 1, "PROMPTS": 2, "K": 2, "BRANCHES": 4}
    for name, value in small.items():
        monkeypatch.setattr(gpu_engine, name, value)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, where: machine.place(model, where))
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        run, stats = gpu_engine.run, {}
        monkeypatch.setattr(
            gpu_engine, "run", lambda *a, lane, **o: stats.setdefault(lane, run(*a, lane=lane, **o))
        )
        words, failed = gpu_engine.lanes_agree(devices)
        assert words.startswith("ok, ") and not failed
        monkeypatch.setattr(gpu_engine, "run", lambda *_, lane, **__: ([[lane]], stats[lane][1]))
        words, failed = gpu_engine.lanes_agree(devices)
        assert words.startswith("1 of 1 texts differ") and failed
        found: dict[bool, Any] = {}
        monkeypatch.setattr(
            gpu_engine, "run", lambda *a, **o: found.setdefault(o["cuda_graphs"], run(*a, **o))
        )
        words, failed = gpu_engine.graphs_agree(devices)
        assert words.startswith("ok, a round ") and not failed
        monkeypatch.setattr(
            gpu_engine, "run",
            lambda *_, cuda_graphs, **__: ([[cuda_graphs]], found[cuda_graphs][1]),
        )  # fmt: skip
        words, failed = gpu_engine.graphs_agree(devices)
        assert words.startswith("1 of 1 texts differ") and failed
    assert not machine.races


def test_a_part_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, bool]:
        raise RuntimeError("no kernel image\nand more")

    parts = [("a", "-", broken), ("b", "-", lambda: ("ok", False))]
    monkeypatch.setattr(gpu_engine, "parts", lambda two_devices: parts)
    tasks = gpu.tasks(options(), "cpu")[:2]
    rows = [gpu.perform(task, 100.0).check for task in tasks]
    assert [(row.verdict, row.failed) for row in rows] == [
        ("RuntimeError: no kernel image", True),
        ("ok", False),
    ]
    late = [gpu.perform(task, 10.0).check for task in tasks]
    assert {row.verdict for row in late} == {"not reached: out of time"}


def _unlucky(
    options: Any, first: int, began: float, device: str
) -> Iterator[tuple[int, gpu.Found | None]]:
    """Work whose second task crashes and whose fourth hangs."""
    for number in range(first, 6):
        yield number, None
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3:
            time.sleep(600)
        yield number, gpu.Found(gpu.Check(str(number), "-", "ok"))


def test_a_crash_and_a_hang_cost_a_row_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_leaks: None
) -> None:
    planned = [gpu.Task("kernels", str(number), "-", 5, lambda left: None) for number in range(6)]
    monkeypatch.setattr(gpu, "tasks", lambda *_: planned)
    monkeypatch.setattr(gpu, "PATIENCE_S", 8.0)
    monkeypatch.setattr(gpu, "START", "fork")  # at once
    source = functools.partial(gpu._in_process, its_work=_unlucky)
    assert gpu._run(options(), "cpu", source) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: " ".join(line[2:]) for line in lines if line[1:2] == ["-"]}
    ended, hung = rows.pop("1"), rows.pop("3")
    assert ended.startswith(f"its process ended with {-signal.SIGKILL}")
    assert hung.startswith("no end after 8 s")
    assert len(rows) == 4 and all(row.startswith("ok") for row in rows.values())


def test_a_lost_gpu_ends_the_process_and_not_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    def broken(left: float) -> gpu.Found:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    planned = [gpu.Task("kernels", "a", "-", 5, broken)] * 3
    monkeypatch.setattr(gpu, "tasks", lambda *_: planned)
    found = list(gpu.work(options(), 1, time.monotonic(), "cuda"))
    assert [number for number, _ in found] == [1, 1]
    assert gpu._run(options(), "cuda", gpu.work) == 1


def test_shares_of_the_budget() -> None:
    """A part has what those before it left over, and all end half a minute before 6 minutes."""
    now = [100.0]
    for shares in (gpu.SHARES, gpu.SHARES_TWO):
        assert sum(shares.values()) == gpu.BUDGET_S == 330
    clock = SimpleNamespace(monotonic=lambda: now[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "time", clock)
        budget = gpu.Budget(gpu.BUDGET_S, gpu.SHARES, now[0])
        assert budget.left("engine") == 90 and budget.left("kernels") == 210
        now[0] += 50
        assert budget.left("engine") == 40 and budget.left("kernels") == 160
        now[0] += 265
        assert budget.left("tuning") == 0 and budget.left("end") == 15
        assert gpu.Budget(33, gpu.SHARES, now[0]).left("engine") == 9


SMALL = [
    ("verify.block", {"B": 1, "K": 1, "V": 256, "T": 1.0, "rule": "block"}, {"block_v": (128,)}),
    ("residual", {"R": 1, "V": 256, "T": 1.0}, {"block_v": (128, 256)}),
    ("row_stats", {"R": 1, "V": 256, "T": 1.0}, {"block": (100, 128), "num_warps": (4, 8)}),
]
"""Cases, shapes and sizes to try that the interpreter runs at once; 100 does not launch."""


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`bench gpu` without what needs a GPU, by a clock that stands still: returns [now]."""
    now = [0.0]

    def part(seconds: float, result: Any) -> Any:
        now[0] += seconds
        return result

    def check(case: Any, shape: Any) -> gpu.Check:
        return part(30.0, gpu.Check(case.name, gpu.shape_id(shape), "ok", graph="equal"))

    def time_us(providers: Any) -> dict[str, list[float]]:
        return {config: [9.0 - ("=128" in config)] for config in part(2.0, providers)}

    def parts(two_devices: bool) -> list[Any]:
        return [(f"engine: {n}", "-", lambda: part(41.0, ("ok", False))) for n in range(4)]

    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (gpu, tune):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(gpu, "_roof", lambda: 4e12)
    monkeypatch.setattr(timing, "time_us", time_us)
    monkeypatch.setattr(gpu_engine, "parts", parts)
    monkeypatch.setattr(gpu, "check", check)
    monkeypatch.setattr(gpu, "far_offsets", lambda: gpu.Check("int64 offsets", "-", "ok"))
    monkeypatch.setattr(measure, "measure_times", lambda *_: [])
    small = [
        (CASES[name], shape, tune.Tunable(tune.TUNABLES[name.partition(".")[0]].heuristic, sizes))
        for name, shape, sizes in SMALL
    ]
    monkeypatch.setattr(tune, "first_shapes", lambda: small)
    return now


def options(**given: Any) -> SimpleNamespace:
    usual = {"names": [], "budget": gpu.BUDGET_S, "two_devices": False, "json": None}
    return SimpleNamespace(**(usual | given))


def test_a_whole_run_ends_in_time(dry: list[float], tmp_path: Path, capsys: Any) -> None:
    """Parts that take longer than their shares lose the last of their rows, not of the next's."""
    file = tmp_path / "out" / "gpu.json"
    assert gpu._run(options(json=file), "cpu", gpu.work) == 0
    assert dry[0] <= gpu.BUDGET_S
    data = json.loads(file.read_text())
    verdicts = {(row["case"], row["shape"]): row["verdict"] for row in data["checks"]}
    engine = [verdicts[f"engine: {n}", "-"] for n in range(4)]
    assert engine == ["ok", "ok", gpu.OUT_OF_TIME, gpu.OUT_OF_TIME]
    kernels = [row["verdict"] for row in data["checks"] if row["graph"] == "equal"]
    assert len(kernels) == 5  # 82 to 210 seconds, 30 each
    tuned = {row["case"]: row for row in data["tuning"]}
    assert list(tuned) == [name for name, _, _ in SMALL]
    assert all("=128" in row["fastest"] and row["fastest_us"] == 8.0 for row in tuned.values())
    assert len(tuned["row_stats"]["left_out"]) == 1 and "100" in tuned["row_stats"]["left_out"][0]
    printed = capsys.readouterr().out
    assert "tune: residual" in printed and "8.0 us by VerifyConfig(block_v=128" in printed
    assert "left out, tune: row_stats: ScanConfig(block=100" in printed
    assert "0 failed, 238 s; out of time: engine: 2, engine: 3, " in printed


def test_two_devices_have_more_time_for_the_engine(dry: list[float], capsys: Any) -> None:
    assert gpu._run(options(two_devices=True), "cpu", gpu.work) == 0
    assert dry[0] == 249  # 3 parts of the engine and 4 checks, each begun in its time
    assert "out of time: engine: 3, " in capsys.readouterr().out


def test_tuning_stops_when_its_time_is_spent(
    dry: list[float], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op has its part of what is left, and what is not tried is named."""
    outputs, ops = tune.outputs, tune.first_shapes()

    def slow(*arguments: Any) -> Any:  # called once for each combination that is tried
        dry[0] += 20.0
        return outputs(*arguments)

    monkeypatch.setattr(tune, "outputs", slow)
    found = [gpu._tune(op, 3 - n, "cpu", 63.0 - dry[0]) for n, op in enumerate(ops)]
    rows = [row for its in found for row in its.tuning]
    assert [bool(row.in_use) for row in rows] == [True, True, False]
    assert dry[0] <= 63 + 22 and rows[0].left_out == ()
    assert [reason.partition(": ")[2] for reason in rows[1].left_out] == ["out of time"] * 2
    assert rows[2].left_out == (gpu.OUT_OF_TIME,)
    assert [its.check.failed for its in found] == [False] * 3
    assert found[2].check.verdict == gpu.OUT_OF_TIME


def test_an_op_that_cannot_be_tuned_fails_alone(
    dry: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(inputs: Any) -> None:
        raise RuntimeError("no kernel image\nand more")

    case, shape, tunable = tune.first_shapes()[1]
    ops = [(dataclasses.replace(case, providers={"ours": broken}), shape, tunable)]
    ops.append(tune.first_shapes()[0])
    first, second = (gpu._tune(op, 1, "cpu", 60.0).check for op in ops)
    assert first.failed and first.verdict == "RuntimeError: no kernel image"
    assert not second.failed and second.p50_us == 9.0


def test_every_heuristic_is_tuned_once() -> None:
    firsts = tune.first_shapes()
    assert len(firsts) == len(tune.TUNABLES)
    assert {id(its) for _, _, its in firsts} == {id(its) for its in tune.TUNABLES.values()}
    for _, _, tunable in firsts:
        changes = tune.one_at_a_time(tunable)
        assert len(changes) == sum(map(len, tunable.choices.values()))
        assert all(len(change) == 1 for change in changes)


def test_the_two_attentions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a flash-attn that sees a key less is found."""
    monkeypatch.setattr(gpu_engine, "_time_us", lambda work: 1.0)
    monkeypatch.setattr(gpu_engine, "PROMPTS", 2)
    monkeypatch.setattr(gpu_engine, "CHUNK", 20)
    monkeypatch.setattr(_launch, "INTERPRETED", False)  # ours by its reference
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        words, failed = gpu_engine.flash_agrees("cpu")
        assert words.startswith("not compared") and not failed
    pretend_flash.install(monkeypatch)
    words, failed = gpu_engine.flash_agrees("cpu")
    assert words.startswith("flash-attn 2.8.3, verification 1 us, ours 1 us, prompt") and not failed
    attend = flash.attend
    monkeypatch.setattr(
        flash, "attend", lambda *its, **named: attend(*its[:4], its[4] - 1, **named)
    )
    assert gpu_engine.flash_agrees("cpu")[1]
