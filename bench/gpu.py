"""`python -m bench gpu`: one script for a machine with a GPU. Checks every kernel, then times it.

Each case runs compiled on the GPU and by its torch reference on the CPU, on equal inputs: ids must
be the same, numbers close. No host sync is allowed meanwhile, and a captured graph must repeat the
eager result. Then times against the measured roof, beside the torch reference on the same GPU.
The engine's part comes first: its lanes against each other, a round as a graph, speed and overlap.
Last, every op's launch sizes are tuned one at a time on its first shape, see `bench tune`.

Needs no network. Each part has a share of the time budget and what the parts before it left over;
what is not reached then is named. The first shape of every case comes before the second of any.
The work is done in a second process; where that crashes or hangs, the row says so and another goes
on behind it.

Exit code: 0 all right, 1 a check failed, 3 no GPU here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # python bench/gpu.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.argv.insert(1, "gpu")
    runpy.run_module("bench", run_name="__main__", alter_sys=True)

import torch  # noqa: E402

from . import files, report  # noqa: E402
from .measure import moved, outputs  # noqa: E402
from .registry import CASES, Case, Shape, shape_id  # noqa: E402

if TYPE_CHECKING:
    from . import tune

SHARES = {"engine": 90.0, "kernels": 120.0, "tuning": 105.0, "end": 15.0}
"""Seconds of each part, in their order; "end" is what the last thing begun may run over."""
SHARES_TWO = {"engine": 140.0, "kernels": 95.0, "tuning": 80.0, "end": 15.0}
"""The same for two devices: more of it for the engine."""
BUDGET_S = sum(SHARES.values())
"""330 seconds; with half a minute for imports and for what runs over, under 6 minutes."""
OVERRUN_S = 25.0
"""What the last task may run over the budget, before its process is ended."""
PATIENCE_S = 100.0
"""Seconds after which a task that says nothing is taken to hang: most compile for a while."""
START = "spawn"
"""How a process begins: CUDA does not survive a fork."""
OUT_OF_TIME = "not reached: out of time"

NEAR_TIES = 0.01
"""Share of rows whose id may differ: the last bit of log differs between CPU and GPU."""


class Budget:
    """Seconds shared among parts that come one after another."""

    def __init__(self, seconds: float, shares: Mapping[str, float], began: float) -> None:
        """`began`: by the monotonic clock, which all processes share."""
        self.began, whole = began, sum(shares.values())
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
            size, a, b = 2e-3 if a.dtype == torch.float32 else 2e-2, a.float(), b.float()
            # Probabilities and averages of many are small: what is close depends on how large.
            usual = float(b[b.isfinite()].square().mean().sqrt().nan_to_num())
            same = torch.isclose(a, b, rtol=size, atol=size * min(1.0, usual), equal_nan=True)
        else:
            same = a == b
        rows = same.reshape(len(same), -1).all(1) if same.dim() else same.reshape(1)
        wrong = int((~rows).sum())
        # One of a few rows may be a near tie; more are not, nor is the only one.
        if wrong > max(len(rows) > 1, NEAR_TIES * len(rows)):
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


@dataclasses.dataclass
class Found:
    """What one task found: its row of the table, and the rows of the JSON file."""

    check: Check
    results: list[report.Result] = dataclasses.field(default_factory=list)
    tuning: list[tune.Row] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Task:
    """One row of the table. `run` takes the seconds that are left; the task is not begun where
    these are under `least`."""

    part: str
    name: str
    shape: str
    least: float
    run: Callable[[float], Found]


def tasks(options: argparse.Namespace, device: str = "cuda") -> list[Task]:
    """All there is to do, in its order; nothing is done yet."""
    from . import cases, gpu_engine, tune  # noqa: F401  cases registers them

    chosen = [case for case in CASES.values() if not options.names or case.name in options.names]
    found = []
    if not options.names:
        for name, shape, part in gpu_engine.parts(options.two_devices):
            found.append(
                Task("engine", name, shape, 20, functools.partial(_engine, name, shape, part))
            )
    # The first shape of every case before the second of any.
    for index in range(max((len(case.shapes) for case in chosen), default=0)):
        for case in chosen:
            if index < len(case.shapes):
                its = case.shapes[index]
                run = functools.partial(_kernel, case, its)
                found.append(Task("kernels", case.name, shape_id(its), 5, run))
    if not options.names:
        found.append(Task("tuning", "int64 offsets", "-", 20, lambda left: Found(far_offsets())))
    ops = [op for op in tune.first_shapes() if op[0] in chosen]
    for index, op in enumerate(ops):
        run = functools.partial(_tune, op, len(ops) - index, device)
        found.append(Task("tuning", f"tune: {op[0].name}", shape_id(op[1]), 1, run))
    return found


def _engine(name: str, shape: str, part: Callable[[], tuple[str, bool]], left: float) -> Found:
    return Found(Check(name, shape, *part()))


def _kernel(case: Case, shape: Shape, left: float) -> Found:
    from . import measure

    row = check(case, shape)
    try:
        timed = measure.measure_times(case, shape, case.dtype, ["ours", "torch"], _roof())
    except Exception as error:  # noqa: BLE001  what was found out before stays in the table
        row.verdict, row.failed = f"{row.verdict}; not timed, {_reason(error)}", True
        return Found(row)
    for result in timed:
        if result.provider == "ours":
            if result.note:
                row.verdict, row.failed = f"{row.verdict}; not timed, {result.note}", True
            row.p50_us, row.launches = result.p50_us, result.launches
            row.percent_of_roof = result.percent_of_roof
        else:
            row.torch_us = result.p50_us
    return Found(row, timed)


def _tune(op: tuple[Case, Shape, tune.Tunable], ops_left: int, device: str, left: float) -> Found:
    from . import timing, tune

    stop = time.monotonic() + left / ops_left
    row = tune.tune_op(*op, timing.time_us, device, stop)
    found = Check(f"tune: {row.case}", row.shape, p50_us=row.in_use_us)
    if not row.in_use:
        found.verdict, found.failed = row.left_out[0], row.left_out[0] != OUT_OF_TIME
    elif row.fastest == row.in_use:
        found.verdict = "fastest as in use"
    else:
        found.verdict = f"{row.fastest_us:.1f} us by {row.fastest}"
    return Found(found, tuning=[row])


@functools.cache
def _roof() -> float:
    from . import timing

    roof, floor = timing.measured_roof(), timing.launch_floor_us()
    print(f"roof {roof / 1e9:.0f} GB/s (copy), empty launch {floor:.2f} us", flush=True)
    return roof


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def perform(task: Task, left: float) -> Found:
    """Do it, if there is time; what it raises is the row's verdict."""
    if left < task.least:
        return Found(Check(task.name, task.shape, OUT_OF_TIME))
    try:
        return task.run(left)
    except Exception as error:  # noqa: BLE001  one broken kernel must not end the table
        return Found(Check(task.name, task.shape, _reason(error), True))


Message = tuple[int, "Found | None"]
"""The number of a task, and None when it is begun or what it found."""


def work(options: argparse.Namespace, first: int, began: float, device: str) -> Iterator[Message]:
    """Do the tasks from number `first` on, until one leaves the GPU unusable for this process."""
    budget = Budget(options.budget, SHARES_TWO if options.two_devices else SHARES, began)
    for number, task in list(enumerate(tasks(options, device)))[first:]:
        yield number, None
        left = budget.left(task.part)
        if left >= task.least:
            print(f"{left:5.0f} s left  {task.name} {task.shape}", file=sys.stderr, flush=True)
        found = perform(task, left)
        yield number, found
        if (found.check.failed or any(r.note for r in found.results)) and _lost(device):
            return


def _lost(device: str) -> bool:
    """Whether every further call would fail, as after an access of memory that is not ours."""
    try:
        torch.cuda.synchronize() if device == "cuda" else None
    except Exception:  # noqa: BLE001  torch's and triton's differ
        return True
    return False


class Lost(Exception):
    """A process ended in the middle of a task, or said nothing for too long."""


def _in_process(
    options: argparse.Namespace, first: int, began: float, device: str, its_work: Any = work
) -> Iterator[Message]:
    """`work` in a process of its own: a kernel that crashes or hangs ends that, not the table."""
    context: Any = multiprocessing.get_context(START)
    receiver, sender = context.Pipe(duplex=False)
    arguments = sender, its_work, options, first, began, device
    process = context.Process(target=_send_all, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            patience = min(PATIENCE_S, began + options.budget + OVERRUN_S - time.monotonic())
            if not receiver.poll(max(0.0, patience)):
                raise Lost(f"no end after {patience:.0f} s")
            try:
                message = receiver.recv()
            except EOFError:
                process.join(10)
                if process.exitcode:
                    raise Lost(f"its process ended with {process.exitcode}") from None
                return
            yield message
    finally:
        process.kill()
        process.join()


def _send_all(sender: Any, its_work: Callable[..., Iterator[Message]], *arguments: Any) -> None:
    for message in its_work(*arguments):
        sender.send(message)


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


def _run(
    options: argparse.Namespace, device: str = "cuda", source: Callable[..., Any] = _in_process
) -> int:
    began = time.monotonic()
    machine = report.machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    planned = tasks(options, device)
    every: list[Found] = []
    while len(every) < len(planned):
        try:
            for number, found in source(options, len(every), began, device):
                if found is not None:
                    assert number == len(every)
                    every.append(found)
        except Lost as lost:
            task = planned[len(every)]
            every.append(Found(Check(task.name, task.shape, str(lost), True)))
        if time.monotonic() > began + options.budget:  # no time for another process to start
            every += [perform(task, 0.0) for task in planned[len(every) :]]
    rows = [found.check for found in every]
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
    tuned = [row for found in every for row in found.tuning]
    for row in tuned:
        for reason in row.left_out if row.in_use else ():
            print(f"left out, tune: {row.case}: {reason}")
    missed = [row.case for row in rows if row.verdict == OUT_OF_TIME]
    print(f"{len(rows)} rows, {failed} failed, {time.monotonic() - began:.0f} s", end="")
    print(f"; out of time: {', '.join(dict.fromkeys(missed))}" if missed else "")
    if options.json:
        results = [result for found in every for result in found.results]
        parts: dict[str, list[Any]] = {"results": results, "checks": rows, "tuning": tuned}
        data = {name: [dataclasses.asdict(row) for row in part] for name, part in parts.items()}
        files.write_json(options.json, {"machine": machine} | data)
    return int(failed > 0)
