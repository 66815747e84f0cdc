"""`bench gpu` on a machine without one, and the parts of it that need none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pretend_cuda
import pytest
import tiny_models
import torch

import bench.cases  # noqa: F401  registers them
from bench import __main__ as command
from bench import gpu, gpu_engine, measure
from bench.registry import CASES


def test_without_a_gpu_it_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["gpu"]) == 3
    assert "nothing was checked" in capsys.readouterr().out


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
    assert gpu.difference([numbers + 0.1], [numbers])[1]
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
    monkeypatch.setattr(gpu_engine, "NEW_TOKENS", 4)
    monkeypatch.setattr(gpu_engine, "PROMPTS", 2)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, where: machine.place(model, where))
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        words, failed = gpu_engine.lanes_agree(devices)
        assert words.startswith("ok, ") and not failed
        run = gpu_engine.run
        monkeypatch.setattr(
            gpu_engine, "run", lambda *a, lane, **o: ([[lane]], run(*a, lane=lane, **o)[1])
        )
        words, failed = gpu_engine.lanes_agree(devices)
        assert words.startswith("1 of 1 texts differ") and failed
    assert not machine.races


def test_a_part_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, bool]:
        raise RuntimeError("no kernel image\nand more")

    parts = [("a", "-", broken), ("b", "-", lambda: ("ok", False))]
    monkeypatch.setattr(gpu_engine, "parts", lambda two_devices: parts)
    rows = gpu.engine_checks(False, lambda: 100.0)
    assert [(row.verdict, row.failed) for row in rows] == [
        ("RuntimeError: no kernel image", True),
        ("ok", False),
    ]
    late = gpu.engine_checks(False, lambda: 10.0)
    assert {row.verdict for row in late} == {"not reached: out of time"}
