"""`python -m bench overhead`: what a call costs on the host before its first launch, in us.

    direct        an empty function, called with the op's arguments
    op            the same function as a public function calls it: what registration costs
    dispatched    the same behind torch.ops.saguaro, as compilers, modes and profilers call it
    call          the public function: checks, allocations, the op; without its launches

The op's implementation is replaced by the empty function, so the figures are of the host alone and
hold for tensors on any device. The dispatcher tells devices apart by a table, not by a search.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro_kernels._call import IMPLEMENTATIONS
from saguaro_kernels._call import call as call_op

from .registry import CASES
from .report import table

SMALL = {"B": 2, "R": 4, "V": 64, "M": 6, "K": 3, "N": 32, "L": 32, "layers": 2}
LIMIT_US = 5.0
"""What an op may cost over a direct call."""


class _Arguments(TorchDispatchMode):
    """Keeps the arguments of each registered op that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "saguaro":
            self.ops[func._schema.name] = (func, args)
        return func(*args, **(kwargs or {}))


def _nothing(*_: Any) -> None:
    """Stands in for every op's implementation."""


def microseconds(run: Callable[[], Any], calls: int, repeats: int = 200) -> float:
    """Least over `repeats` of the mean time of `calls` calls: other load only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return min(times)


def measure(calls: int = 50) -> list[tuple[str, float, float, float, float]]:
    """(case, direct, op, dispatched, call) in us, for one case of each registered op."""
    from . import cases  # noqa: F401  registers them

    rows, done = [], set()
    firsts = {case.name.partition(".")[0]: case for case in reversed(CASES.values())}
    for case in reversed(firsts.values()):
        shape = {key: SMALL.get(key, value) for key, value in case.shapes[0].items()}
        inputs = case.inputs(shape, torch.float32, "cpu")
        call = case.providers["torch"]
        with _Arguments() as seen:
            call(inputs)
        for name, (_, arguments) in seen.ops.items():
            if name in done:
                continue
            done.add(name)
            short = name.removeprefix("saguaro::")
            stub = torch.library.Library("saguaro", "IMPL")
            stub.impl(short, _nothing, "CPU")
            packet = getattr(torch.ops.saguaro, short)
            timed = (
                lambda its=arguments: _nothing(*its),
                lambda short=short, its=arguments: call_op(short, *its),
                lambda packet=packet, its=arguments: packet(*its),
                lambda call=call, inputs=inputs: call(inputs),
            )
            with patch.dict(IMPLEMENTATIONS, {short: _nothing}):
                rows.append((name, *(microseconds(its, calls) for its in timed)))
            stub._destroy()
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the table, and the ops that cost more than the limit over a direct call."""
    parser = argparse.ArgumentParser(
        prog="python -m bench overhead", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--calls", type=int, default=50, help="per time (%(default)s)")
    rows = measure(parser.parse_args(arguments).calls)
    shown = [
        (name, f"{direct:.2f}", f"{op - direct:.2f}", f"{dispatched - direct:.2f}", f"{call:.1f}")
        for name, direct, op, dispatched, call in rows
    ]
    print(table(("op", "direct, us", "registration", "dispatched", "call"), shown))
    over = [name for name, direct, op, *_ in rows if op - direct > LIMIT_US]
    print(f"\nRegistration over {LIMIT_US:g} us: {', '.join(over) or 'none'}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
