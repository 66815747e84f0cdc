"""`python -m bench tune [OP]`: rows of the launch-config table, one for each shape of a case.

Kernels take their launch sizes from a frozen config and a named heuristic, never from tuning while
they run. Without OP this prints what the heuristics choose for every case. With OP it times, on a
GPU, every combination of the sizes below in turn with the heuristic's own, and prints the fastest
as the expression to write into the heuristic. A combination that fails to launch, or that gives
other results than the heuristic's, is left out and named.

Exit code: 0 printed, 2 no such op, 3 OP without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from . import files, report, timing
from .gpu import OUT_OF_TIME, difference
from .measure import copies, moved, outputs
from .registry import CASES, Case, Shape, select, shape_id

_LEAST_S = 1.0
"""Seconds of an op below which it is not begun."""

Timer = Callable[[Mapping[str, Sequence[timing.Run]]], dict[str, list[float]]]
"""`timing.time_us`: sorted microseconds of each provider."""


@dataclass(frozen=True)
class Tunable:
    """A heuristic of `saguaro_kernels`, and what to try in the place of its choice."""

    heuristic: str
    """module:name, a function (or a dataclass of defaults) that returns a frozen config."""
    choices: Mapping[str, tuple[int, ...]]


_SCAN = Tunable(
    "distribution.launch:scan_config",
    {"block": (2048, 4096, 8192), "max_splits": (8, 16, 32), "num_warps": (4, 8, 16)},
)
_CUTOFF = Tunable(
    "distribution.launch:CutoffConfig", {"block": (1024, 2048, 4096, 8192), "num_warps": (8, 16)}
)
_VERIFY = Tunable(
    "verification.launch:VerifyConfig",
    {
        "block_v": (2048, 4096, 8192),
        "max_splits": (8, 16, 32),
        "num_warps": (4, 8),
        "noise_warps": (8, 16),
    },
)
_LAYOUT = Tunable("tree:layout_config", {"block_m": (32, 64, 128, 256), "num_warps": (1, 2, 4)})

TUNABLES: dict[str, Tunable] = {
    "row_stats": _SCAN,
    "row_stats, filtered": _CUTOFF,
    "saguaro_sample": _SCAN,
    "saguaro_sample, filtered": _CUTOFF,
    "sample_geometric": Tunable(
        "sampling.geometric:geometric_config", {"block": (2048, 4096, 8192), "num_warps": (4, 8)}
    ),
    "verify": _VERIFY,
    "residual": dataclasses.replace(_VERIFY, heuristic="residual:VerifyConfig"),
    "predict_outcomes": Tunable(
        "outcomes.launch:outcomes_config",
        {
            "block_v": (1024, 2048, 4096),
            "splits": (4, 8, 16, 32),
            "num_warps": (4, 8),
            "select_warps": (8, 16),
        },
    ),
    "tree_attention": Tunable(
        "tree_attention.launch:tree_attention_config",
        {
            "block_rows": (16, 32, 64, 128, 256),
            "block_keys": (16, 32, 64),
            "splits": (1, 4, 8, 16, 32),
            "num_warps": (4, 8),
        },
    ),
    "promote_branch": Tunable(
        "promotion:promotion_config", {"block_e": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)}
    ),
    "tree_layout": _LAYOUT,
    "chain_layout": _LAYOUT,
    "ngram_propose": Tunable(
        "ngram:ngram_config", {"block": (512, 1024, 2048, 4096), "num_warps": (4, 8)}
    ),
}
"""By case; "verify" is every case of that name. The cache's ops and the fan-out are one warp per
key or row whose width is that of the data: they have no sizes to choose."""


@dataclass(frozen=True)
class Row:
    """The table's row of one shape; times are None where nothing was timed."""

    case: str
    shape: str
    dtype: str
    in_use: str
    in_use_us: float | None = None
    fastest: str = ""
    fastest_us: float | None = None
    left_out: tuple[str, ...] = ()


@contextlib.contextmanager
def chosen(
    tunable: Tunable, changes: Mapping[str, int], tell: Callable[[Any], None] = lambda config: None
) -> Iterator[None]:
    """Inside, the heuristic returns its choice with `changes`, and tells it to `tell`."""
    module_name, _, name = tunable.heuristic.partition(":")
    module = importlib.import_module(f"saguaro_kernels.{module_name}")
    original = getattr(module, name)

    def heuristic(*arguments: Any) -> Any:
        config = dataclasses.replace(original(*arguments), **changes)
        tell(config)
        return config

    with mock.patch.object(module, name, heuristic):
        yield


class _Asked(Exception):
    """Carries a config out of a call that need not go on."""


def in_use(case: Case, shape: Shape, dtype: torch.dtype, tunable: Tunable, device: str) -> Any:
    """The config that the heuristic chooses for this shape; nothing is launched."""

    def stop(config: Any) -> None:
        raise _Asked(config)

    with chosen(tunable, {}, stop):
        try:
            case.providers["ours"](case.inputs(shape, dtype, device))
        except _Asked as asked:
            return asked.args[0]
    raise LookupError(f"{case.name}: {tunable.heuristic} was not asked")


def every(tunable: Tunable) -> list[dict[str, int]]:
    """All combinations of the sizes."""
    combinations = itertools.product(*tunable.choices.values())
    return [dict(zip(tunable.choices, values, strict=True)) for values in combinations]


def one_at_a_time(tunable: Tunable) -> list[dict[str, int]]:
    """Each size in the place of the heuristic's, which keeps the others."""
    return [{name: size} for name, sizes in tunable.choices.items() for size in sizes]


def tune(
    case: Case,
    shape: Shape,
    dtype: torch.dtype,
    tunable: Tunable,
    timer: Timer,
    device: str,
    *,
    changes: Callable[[Tunable], list[dict[str, int]]] = every,
    left: Callable[[], float] = lambda: float("inf"),
) -> Row:
    """Time every combination that launches and agrees with the heuristic's results.

    left: seconds; once there are none, what has not been tried is left out, and named.
    """
    default = in_use(case, shape, dtype, tunable, device)
    ours = case.providers["ours"]
    # All combinations share the copies: a second set for each would not fit.
    count = copies(int(case.bound(shape, dtype.itemsize))) if device == "cuda" else 1
    rotated = [case.inputs(shape, dtype, device)]
    rotated += [moved(rotated[0], device) for _ in range(count - 1)]

    def run(inputs: Any, its: Mapping[str, int]) -> Any:
        with chosen(tunable, its):
            return ours(inputs)

    # Each config once, and the heuristic's first: it is what the others are compared with.
    tried = {repr(dataclasses.replace(default, **its)): its for its in ({}, *changes(tunable))}
    runs: dict[str, list[timing.Run]] = {}
    expected: list[torch.Tensor] = []
    left_out = []
    for config, its in tried.items():
        if runs and left() <= 0:
            left_out.append(f"{config}: out of time")
            continue
        inputs = case.inputs(shape, dtype, device)
        try:
            results = outputs(inputs, run(inputs, its))
        except Exception as error:  # noqa: BLE001  too large for this machine, or not allowed
            left_out.append(f"{config}: {type(error).__name__}: {error}".split("\n")[0])
            continue
        expected = expected or results
        verdict, wrong = difference(results, expected)
        if wrong:
            left_out.append(f"{config}: {verdict}")
        else:
            runs[config] = [functools.partial(run, inputs, its) for inputs in rotated]
    medians = {name: timing.percentile(times, 0.5) for name, times in timer(runs).items()}
    fastest = min(medians, key=lambda config: medians[config])
    return Row(
        case.name, shape_id(shape), str(dtype).removeprefix("torch."), repr(default),
        medians[repr(default)], fastest, medians[fastest], tuple(left_out),
    )  # fmt: skip


def table_of(rows: Sequence[Row], device: str) -> str:
    """The rows as text, and below them what was left out."""
    headers: tuple[str, ...] = ("case", "shape", "dtype", "device", "in use")
    timed = any(row.fastest for row in rows)
    if timed:
        headers += ("us", "fastest", "us ", "in use / fastest")
    lines = []
    for row in rows:
        line: tuple[Any, ...] = (row.case, row.shape, row.dtype, device, row.in_use)
        if timed:
            gain = row.in_use_us / row.fastest_us if row.fastest_us and row.in_use_us else None
            fastest = "as in use" if row.fastest == row.in_use else row.fastest
            line += (row.in_use_us, fastest, row.fastest_us, gain)
        lines.append(line)
    notes = sorted({f"left out, {row.case}: {reason}" for row in rows for reason in row.left_out})
    return "\n".join([report.table(headers, lines), *notes])


def work(name: str) -> list[tuple[Case, Shape, Tunable]]:
    """Every shape of the cases called `name` ("all": of every case) with the heuristic it uses."""
    found = []
    for label, tunable in TUNABLES.items():
        case_name, _, filtered = label.partition(", ")
        if name not in ("all", case_name) and not name.startswith(f"{case_name}."):
            continue
        for case in select(case_name if name in ("all", case_name) else name):
            for shape in case.shapes:
                if bool(filtered) <= ("top_k" in shape or "top_p" in shape):
                    found.append((case, shape, tunable))
    return found


def first_shapes() -> list[tuple[Case, Shape, Tunable]]:
    """One shape of every heuristic: the first of its first case."""
    firsts = []
    for label, tunable in TUNABLES.items():
        found = [its for its in work(label.partition(", ")[0]) if its[2] is tunable]
        firsts += found[:1]
    return firsts


def _until(moment: float) -> float:
    return moment - time.monotonic()


def tune_op(
    case: Case, shape: Shape, tunable: Tunable, timer: Timer, device: str, stop: float
) -> Row:
    """The row of an op, one size varied at a time until `stop` of the monotonic clock. Where
    nothing could be timed, `in_use` is "" and `left_out` says why."""
    reason = OUT_OF_TIME
    if _until(stop) >= _LEAST_S:
        try:
            return tune(
                case, shape, case.dtype, tunable, timer, device,
                changes=one_at_a_time, left=functools.partial(_until, stop),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  one broken kernel must not end the table
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
    name = str(case.dtype).removeprefix("torch.")
    return Row(case.name, shape_id(shape), name, "", left_out=(reason,))


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    from . import cases  # noqa: F401  registers them

    parser = argparse.ArgumentParser(
        prog="python -m bench tune", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("op", nargs="?", help="a case or a group of cases (verify)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--json", type=files.output, metavar="FILE", help="the rows, with the machine"
    )
    options = parser.parse_args(arguments)
    chosen_work = work(options.op or "all")
    if not chosen_work:
        print(f"no sizes to choose for {options.op!r}; want one of {', '.join(CASES)}")
        return 2
    on_gpu = torch.cuda.is_available()
    if options.op and not on_gpu:
        print(f"bench tune {options.op}: no GPU here, and a time of the interpreter means nothing.")
        print("Without OP it prints what the heuristics choose.")
        return 3
    device = torch.cuda.get_device_name() if on_gpu else "not timed"
    rows = []
    for case, shape, tunable in chosen_work:
        dtype = getattr(torch, options.dtype) if options.dtype else case.dtype
        print(f"{case.name} {shape}", file=sys.stderr, flush=True)
        if options.op:
            rows.append(tune(case, shape, dtype, tunable, timing.time_us, "cuda"))
        else:
            config = in_use(case, shape, dtype, tunable, "cuda" if on_gpu else "cpu")
            name = str(dtype).removeprefix("torch.")
            rows.append(Row(case.name, shape_id(shape), name, repr(config)))
    print(table_of(rows, device))
    if options.json:
        data = {"machine": report.machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        files.write_json(options.json, data)
    return 0
