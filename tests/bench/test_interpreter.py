"""The faster interpreter gives what Triton's own does, and leaves triton.language as it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

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


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def _add_kernel(out_ptr, x):
    tl.store(out_ptr, x + 1)
"""


def _module(path: Path) -> Any:
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text(KERNEL.replace("_add", "_other") + KERNEL)
    return module


def test_a_file_edited_before_the_first_launch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is what was imported; Triton's own would look for it in the new file."""
    interpreter.install()
    out = torch.zeros(1)
    _module(tmp_path / "kept.py")._add_kernel[(1,)](out, 1.0)
    assert out.item() == 2.0
    function = triton_interpreter.InterpretedFunction
    monkeypatch.setattr(function, "__init__", interpreter._original_define)
    with pytest.raises(KeyError, match="_add_kernel"):
        _module(tmp_path / "late.py")._add_kernel[(1,)](out, 1.0)
