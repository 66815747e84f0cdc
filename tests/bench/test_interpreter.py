"""The faster interpreter gives what Triton's own does, and leaves triton.language as it was."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from bench import interpreter
from saguaro_kernels import Keys, Sampling, saguaro_sample


def _draw() -> dict[str, torch.Tensor]:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    row = torch.arange(2)
    sampling = Sampling(torch.tensor([0.7, 1.0]), torch.tensor([0, 9], dtype=torch.int32))
    return vars(saguaro_sample(logits, sampling, Keys(row, row), offset=1, top_f=4, impl="triton"))


def test_the_results_are_those_of_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []

    def search(fn: object) -> object:
        searched.append(fn)
        return interpreter._original_patch_lang(fn)

    interpreter.install()
    load = tl.load
    fast = _draw()
    assert tl.load is load
    monkeypatch.setattr(triton_interpreter, "_patch_lang", search)
    monkeypatch.setattr(triton_interpreter, "_get_np_dtype", interpreter._original_np_dtype)
    monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", interpreter._original_launch)
    slow = _draw()
    assert len(searched) > 100  # once per call of a device function
    for name, value in fast.items():
        assert torch.equal(value, slow[name]), name
