"""System cases: whole runs, each a command of its own that prints its own tables.

Adding one is a module with `main(arguments) -> exit code` and one entry here. Nothing heavy is
imported before a command runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class System:
    """One command; `quick` and `full` are its arguments in `all --quick` and `all`."""

    name: str
    summary: str
    quick: tuple[str, ...] | None = None
    full: tuple[str, ...] | None = None
    gate: str = ""
    """Node id of the test that must pass before its ratios are printed; "" where it compares none,
    or checks them itself. A gated module has `parser()`, too."""
    interpreted: bool = False
    """Needs kernels that run without a GPU."""
    repository: bool = False
    """Is about files that an installed package does not have."""

    def main(self, arguments: Sequence[str]) -> int:
        """Run it; its exit code."""
        return int(self._module().main(arguments))

    def check(self, arguments: Sequence[str]) -> None:
        """End here where the arguments are wrong, or --help: a gate takes its time."""
        self._module().parser().parse_args(arguments)

    def _module(self) -> Any:
        return importlib.import_module(f".{self.name}", __package__)


_SAME_TEXTS = "tests/runtime/test_reproducible.py::test_ssd_equals_sd"

SYSTEM: dict[str, System] = {
    its.name: its
    for its in (
        System(
            "compile",
            "registers, spills and load widths of the kernels' binaries, compiled without a GPU",
            quick=("--first", "--targets", "sm_90"),
            full=(),
        ),
        System("paper", "the paper's rates beside the planner's", quick=(), full=()),
        System(
            "scripted",
            "the engine on models whose times and laws are known, beside what they predict",
            quick=("--quick",),
            full=(),
            gate=_SAME_TEXTS,
        ),
        System(
            "downweight",
            "Saguaro's C: what acceptance pays for hits, on a scripted pair",
            quick=("--quick",),
            full=(),
        ),
        System(
            "policy",
            "the policy auto beside the best of a sweep, on the demo's pair",
            gate=_SAME_TEXTS,
        ),
        System(
            "hit_rates",
            "hit rates on the demo's pair by ranking, allocation and temperature; tree steps",
        ),
        System(
            "equality",
            "every method's text against the target's own, in float32",
            quick=("--prompts", "2", "--tokens", "8"),
            full=(),
        ),
        System(
            "end_to_end",
            "tokens per second of every method on the demo's pair, in one interleaved run",
            quick=("--quick", "--tokens", "12"),
            full=(),
            gate=_SAME_TEXTS,
        ),
        System("readme", "the README's tables, from bench/results", ("--check",), ("--check",),
               repository=True),
        System("plots", "the plots, from bench/results", ("--check",), ("--check",),
               repository=True),
        System("overhead", "what a call costs on the host before its first launch"),
        System("soak", "is anything lost when the draft process dies again and again?"),
        System("tune", "rows of the launch-config table: what is in use, what is fastest",
               interpreted=True),
        System("gpu", "check every kernel on a GPU, and time it"),
    )
}  # fmt: skip
