"""Times on a GPU: graph replays, rotated inputs, interleaved providers, a measured roof.

A kernel that takes microseconds is timed inside a CUDA graph, so that the host's launches are not
in the number; inputs rotate over copies larger than the L2 cache, so that a re-run does not find
them there; providers take turns, so that a clock that drifts drifts for all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Run = Callable[[], object]

MOST_S = 3.0
"""Seconds of rounds after which a comparison has enough of them: a reference may take long."""


def syncs(run: Run) -> bool:
    """True when `run` makes the host wait: it can then not be captured."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def capture(runs: Sequence[Run]) -> tuple[Run, int]:
    """One graph of all `runs` in turn, and how many they are; where they sync with the host or
    cannot be captured, one of them at a time."""
    turns = itertools.cycle(runs)  # none is read again from a cache
    one = lambda: next(turns)()  # noqa: E731
    if syncs(runs[0]):
        return one, 1

    def loop() -> None:
        for run in runs:
            run()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # A capture that fails leaves its own stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            loop()
    except RuntimeError:
        torch.cuda.synchronize()
        return one, 1
    return graph.replay, len(runs)


def time_us(providers: Mapping[str, Sequence[Run]], rounds: int = 40) -> dict[str, list[float]]:
    """Microseconds per run of each provider, sorted; each provider's runs are one graph."""
    replays = {name: capture(runs) for name, runs in providers.items()}
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for replay, _ in replays.values():
        for _ in range(3):
            replay()
    stop = time.monotonic() + MOST_S
    for done in range(rounds):
        if done >= 3 and time.monotonic() > stop:
            break
        for name, (replay, count) in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: sorted(values) for name, values in samples.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the one at `share` (0 .. 1)."""
    return values[min(len(values) - 1, int(share * len(values)))]


def measured_roof() -> float:
    """Bytes per second of a device copy of 1 GiB: what memory gives, not what the sheet says."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = time_us({"copy": [lambda: target.copy_(source)]}, rounds=10)["copy"]
    return 2 * source.numel() * 4 / (percentile(times, 0.5) * 1e-6)


def launch_floor_us() -> float:
    """Microseconds of a launch that does next to nothing, inside a graph."""
    one = torch.zeros(1, device="cuda")
    return percentile(time_us({"empty": [lambda: one.add_(1)] * 20})["empty"], 0.5)


def kernels_launched(run: Run) -> int | None:
    """Kernels and memory operations that the device ran for one call; None: it does not tell."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
    except RuntimeError:  # no CUPTI, or not for this user
        return None
    events = profiler.events() or ()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events) or None
