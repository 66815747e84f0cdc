"""The same cases for those who expect pytest-benchmark: `pytest bench --benchmark-only`.

On a GPU every provider is timed, host launches included (`python -m bench` replays graphs instead).
Without one only the torch references are: the interpreter's time would mean nothing.
"""

from __future__ import annotations

import pytest
import torch

from .cases import V  # noqa: F401  the import registers the cases
from .registry import CASES, shape_id

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = [
    pytest.param(case, provider, id=f"{case.name}-{shape_id(case.shapes[0])}-{provider}")
    for case in CASES.values()
    for provider in case.providers
    if DEVICE == "cuda" or provider == "torch"
]


@pytest.mark.parametrize(("case", "provider"), RUNS)
def test_op(benchmark, case, provider) -> None:
    inputs = case.inputs(case.shapes[0], case.dtype, DEVICE)

    def run() -> None:
        case.providers[provider](inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=20 if DEVICE == "cuda" else 2, warmup_rounds=1)
