"""The registry: what is measured, on which inputs, against which bound, gated by which test.

Adding an op is one `Case` in `cases.py`; whole runs are in `systems.py`. A provider is a function
of the inputs that runs the op once; "ours" is the op itself. `bound` is the least number of bytes
that any implementation moves, `limit` the ratio to it that ours may reach, `launches` the launches
it may take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = Mapping[str, Any]
Provider = Callable[[Any], Any]

CASES: dict[str, Case] = {}
"""Kernel cases by name, in the order of registration."""


@dataclass(frozen=True)
class Case:
    """One op under measurement. See the module's docstring."""

    name: str
    summary: str
    gate: str
    """Node id of the test that must pass before a ratio of this case is printed."""
    shapes: tuple[Shape, ...]
    """The first `quick` of them are the --quick set."""
    inputs: Callable[[Shape, torch.dtype, str], Any]
    providers: Mapping[str, Provider]
    bound: Callable[[Shape, int], float]
    """Bytes, from the shape and the size of a logit (or key) in bytes."""
    flops: Callable[[Shape], float] = field(default=lambda shape: 0.0)
    binaries: str = ""
    """Its kernels among the names of `bench compile`, as a regular expression."""
    limit: float = 1.15
    launches: int = 2
    quick: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if "ours" not in self.providers:
            raise ValueError(f"case {self.name}: got no provider 'ours'")


def register(case: Case) -> Case:
    """Add a case; its name must be new."""
    if case.name in CASES:
        raise ValueError(f"case {case.name}: registered twice")
    CASES[case.name] = case
    return case


def shape_id(shape: Shape) -> str:
    """A shape in one word: B1-K7-V128256-T0.7-block."""
    return "-".join(v if isinstance(v, str) else f"{key}{v}" for key, v in shape.items())


def select(name: str) -> list[Case]:
    """Cases of this name, or whose name starts with it and a dot; of several, between commas.

    "all" is every case.
    """
    if name == "all":
        return list(CASES.values())
    names = name.split(",")
    return [c for c in CASES.values() if any(f"{c.name}.".startswith(f"{n}.") for n in names)]
