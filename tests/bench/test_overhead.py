"""The meter of call overhead: it times every op, and puts the implementations back."""

from __future__ import annotations

import pytest
import torch

from bench import overhead
from saguaro_kernels import allocate_fan_out


def test_every_op_is_timed_without_its_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--calls", "2"]) == 0
    text = capsys.readouterr().out
    names = torch._C._dispatch_get_all_op_names()
    # These two are measured with the op that they are a part of, or as its twin.
    of_others = {"saguaro::geometric_row", "saguaro::chain_layout"}
    for name in {name for name in names if name.startswith("saguaro::")} - of_others:
        assert name in text
    fan_out = allocate_fan_out(torch.tensor([8, 4, 2]), 6, 0.0, impl="reference")
    assert int(fan_out.sum()) == 6
