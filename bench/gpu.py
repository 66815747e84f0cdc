"""`python -m bench gpu`: one script for a machine with a GPU. Checks every kernel, then times it.

Each case runs compiled on the GPU and by its torch reference on the CPU, on equal inputs: ids must
be the same, numbers close. No host sync is allowed meanwhile, and a captured graph must repeat the
eager result. Then times against the measured roof, beside the torch reference on the same GPU.
The engine's part comes first: its lanes against each other, a round as a graph, speed and overlap.
Last, every op's launch sizes are tuned one at a time on its first shape, see `bench tune`.

Needs no network. Each part has a share of the time budget and what the parts before it left over;
what is not reached then is named. The first shape of every case comes before the second of any.

Exit code: 0 all right, 1 a check failed, 3 no GPU here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import files, report
from .measure import moved, outputs
from .registry import CASES, Case, Shape, shape_id

if TYPE_CHECKING:
    from . import tune

SHARES = {"engine": 90.0, "kernels": 120.0, "tuning": 105.0, "end": 15.0}
"""Seconds of each part, in their order; "end" is what the last thing begun may run over."""
SHARES_TWO = {"engine": 140.0, "kernels": 95.0, "tuning": 80.0, "end": 15.0}
"""The same for two devices: more of it for the engine."""
BUDGET_S = sum(SHARES.values())
"""330 seconds; with half a minute for imports and for what runs over, under 6 minutes."""
OUT_OF_TIME = "not reached: out of time"

NEAR_TIES = 0.01
"""Share of rows whose id may differ: the last bit of log differs between CPU and GPU."""


class Budget:
    """Seconds shared among parts that come one after another."""

    def __init__(self, seconds: float, shares: Mapping[str, float]) -> None:
        self.began, whole = time.monotonic(), sum(shares.values())
        ends = itertools.accumulate(shares.values())
        self.ends = {part: seconds * end / whole for part, end in zip(shares, ends, strict=True)}

    def left(self, part: str) -> float:
        """Seconds until `part` must be over: its share and what those before it did not use."""
        return self.ends[part] - (time.monotonic() - self.began)


@dataclasses.dataclass
class Check:
    """What one case did on one shape."""

    case: str
    shape: str
    verdict: str = ""
    failed: bool = False
    graph: str = "-"
    p50_us: float | None = None
    percent_of_roof: float | None = None
    torch_us: float | None = None
    launches: int | None = None


def difference(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> tuple[str, bool]:
    """How the outputs compare, and whether that is a failure."""
    ties = 0
    for index, (a, b) in enumerate(zip(ours, reference, strict=True)):
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index}: {a.dtype} {list(a.shape)} for {list(b.shape)}", True
        if a.dtype.is_floating_point:
            size = 2e-3 if a.dtype == torch.float32 else 2e-2
            same = torch.isclose(a.float(), b.float(), rtol=size, atol=size, equal_nan=True)
        else:
            same = a == b
        rows = same.reshape(len(same), -1).all(1) if same.dim() else same.reshape(1)
        wrong = int((~rows).sum())
        # One row in a small batch may be a near tie; more are not.
        if wrong > max(1, NEAR_TIES * len(rows)):
            return f"output {index}: {wrong} of {len(rows)} rows differ", True
        ties = max(ties, wrong)
    return (f"ok, near ties: {ties}" if ties else "ok"), False


@contextlib.contextmanager
def syncs_forbidden() -> Any:
    """Raise at any host sync."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(case: Case, shape: Shape) -> Check:
    """Compare with the reference, without syncs, eager and from a graph."""
    row = Check(case.name, shape_id(shape))
    ours = case.providers["ours"]
    start = case.inputs(shape, case.dtype, "cuda")
    on_cpu, eager, replayed = (moved(start, device) for device in ("cpu", "cuda", "cuda"))
    expected = outputs(on_cpu, case.providers["torch"](on_cpu))
    ours(moved(start, "cuda"))  # compiles
    torch.cuda.synchronize()
    with syncs_forbidden():
        result = ours(eager)
    found = outputs(eager, result)
    row.verdict, row.failed = difference(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours(replayed)
    graph.replay()
    torch.cuda.synchronize()
    again = outputs(replayed, result)
    same = all(
        torch.equal(a.float().nan_to_num(), b.float().nan_to_num())
        for a, b in zip(again, found, strict=True)
    )
    row.graph = "equal" if same else "DIFFERS"
    row.failed |= not same
    return row


def far_offsets() -> Check:
    """Rows beyond 2^31 elements: the last rows of a buffer of 2.2e9 logits."""
    from saguaro_kernels import Sampling, saguaro_sample

    from .inputs import keys

    vocab, rows, tail = 128256, 17200, 4
    row = Check("int64 offsets", f"R{rows}-V{vocab}")
    if torch.cuda.mem_get_info()[0] < 12e9:
        row.verdict = "skipped: under 12 GB free"
        return row
    logits = torch.zeros((rows, vocab), dtype=torch.bfloat16, device="cuda")
    logits[-tail:] = torch.randn((tail, vocab), device="cuda").to(logits.dtype)
    sampling = Sampling(torch.ones(rows, device="cuda"))
    all_keys = keys(rows, "cuda")
    found = saguaro_sample(logits, sampling, all_keys, offset=0).tokens[-tail:]
    last = dataclasses.replace(all_keys, seed=all_keys.seed[-tail:], base=all_keys.base[-tail:])
    expected = saguaro_sample(
        logits[-tail:].clone(), Sampling(sampling.temperature[-tail:]), last, offset=0
    ).tokens
    row.failed = not torch.equal(found, expected)
    row.verdict = "the last rows differ" if row.failed else "ok"
    return row


def engine_checks(two_devices: bool, left: Callable[[], float]) -> list[Check]:
    """What the engine does on this machine; one part that fails does not end the others."""
    from . import gpu_engine

    rows: list[Check] = []
    for name, shape, part in gpu_engine.parts(two_devices):
        row = Check(name, shape)
        rows.append(row)
        if left() < 20:
            row.verdict = OUT_OF_TIME
            continue
        print(f"{left():5.0f} s left  {name}", file=sys.stderr)
        try:
            row.verdict, row.failed = part()
        except Exception as error:  # noqa: BLE001
            row.verdict, row.failed = f"{type(error).__name__}: {error}".split("\n")[0], True
    return rows


def tuning_checks(rows: Sequence[tune.Row]) -> list[Check]:
    """Rows of `bench tune` as rows of this table: the time of what is used, and what is faster."""
    checks = []
    for its in rows:
        check = Check(f"tune: {its.case}", its.shape, p50_us=its.in_use_us)
        if not its.in_use:
            check.verdict, check.failed = its.left_out[0], its.left_out[0] != OUT_OF_TIME
        elif its.fastest == its.in_use:
            check.verdict = "fastest as in use"
        else:
            check.verdict = f"{its.fastest_us:.1f} us by {its.fastest}"
        checks.append(check)
    return checks


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds (%(default)s)")
    parser.add_argument("--two-devices", action="store_true", help="also draft on a second GPU")
    parser.add_argument(
        "--json",
        type=files.output,
        metavar="FILE",
        help="checks, times and rows of tuning, with the machine",
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench gpu: no GPU here (torch.cuda.is_available() is False); nothing was checked.")
        print("Without one: python -m bench all (traffic) and python -m bench compile (binaries).")
        return 3
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("bench gpu: TRITON_INTERPRET is set; unset it to run compiled kernels.")
        return 3
    if options.two_devices and torch.cuda.device_count() < 2:
        print("bench gpu: --two-devices, and there is one GPU; nothing was checked.")
        return 3
    return _run(options)


def _run(options: argparse.Namespace, device: str = "cuda") -> int:
    from . import cases, measure, timing, tune  # noqa: F401  cases registers them

    began = time.monotonic()
    budget = Budget(options.budget, SHARES_TWO if options.two_devices else SHARES)
    machine = report.machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    roof, floor = timing.measured_roof(), timing.launch_floor_us()
    print(f"roof {roof / 1e9:.0f} GB/s (copy), empty launch {floor:.2f} us", flush=True)
    chosen = [case for case in CASES.values() if not options.names or case.name in options.names]
    # The first shape of every case before the second of any.
    work = [
        (case, case.shapes[index])
        for index in range(max((len(case.shapes) for case in chosen), default=0))
        for case in chosen
        if index < len(case.shapes)
    ]
    engine_left = functools.partial(budget.left, "engine")
    rows = [] if options.names else engine_checks(options.two_devices, engine_left)
    results, lost = [], False
    for case, shape in work:
        row = Check(case.name, shape_id(shape))
        rows.append(row)
        if budget.left("kernels") < 5:
            row.verdict = OUT_OF_TIME
            continue
        print(f"{budget.left('kernels'):5.0f} s left  {row.case} {row.shape}", file=sys.stderr)
        try:
            rows[-1] = row = check(case, shape)
            timed = measure.measure_times(case, shape, case.dtype, ["ours", "torch"], roof)
        except Exception as error:  # noqa: BLE001  one broken kernel must not end the table
            row.verdict, row.failed = f"{type(error).__name__}: {error}".split("\n")[0], True
            if isinstance(error, torch.AcceleratorError):
                print("the CUDA context is lost: stopping here")
                lost = True
                break
            continue
        results += timed
        for result in timed:
            if result.provider == "ours":
                row.p50_us, row.launches = result.p50_us, result.launches
                row.percent_of_roof = result.percent_of_roof
            else:
                row.torch_us = result.p50_us
    if not options.names and not lost and budget.left("tuning") > 20:
        try:
            rows.append(far_offsets())
        except Exception as error:  # noqa: BLE001
            rows.append(Check("int64 offsets", "-", f"{type(error).__name__}: {error}", True))
    ops = [op for op in tune.first_shapes() if op[0] in chosen and not lost]
    tuned = tune.tune_all(ops, timing.time_us, device, functools.partial(budget.left, "tuning"))
    rows += tuning_checks(tuned)
    failed = sum(row.failed for row in rows)
    headers = ("case", "shape", "check", "graph", "launches", "p50 us", "% of roof", "torch us")
    print(
        report.table(
            headers,
            [
                (r.case, r.shape, r.verdict[:150], r.graph, r.launches, r.p50_us)
                + (r.percent_of_roof, r.torch_us)
                for r in rows
            ],
        )
    )
    for its in tuned:
        for reason in its.left_out if its.in_use else ():
            print(f"left out, tune: {its.case}: {reason}")
    missed = [row.case for row in rows if row.verdict == OUT_OF_TIME]
    print(f"{len(rows)} rows, {failed} failed, {time.monotonic() - began:.0f} s", end="")
    print(f"; out of time: {', '.join(dict.fromkeys(missed))}" if missed else "")
    if options.json:
        parts: dict[str, list[Any]] = {"results": results, "checks": rows, "tuning": tuned}
        data = {name: [dataclasses.asdict(row) for row in part] for name, part in parts.items()}
        files.write_json(options.json, {"machine": machine} | data)
    return int(failed > 0)
