"""Times on a GPU: graph replays, rotated inputs, interleaved providers, a measured roof.

A kernel that takes microseconds is timed inside a CUDA graph, so that the host's launches are not
in the number; inputs rotate over copies larger than the L2 cache, so that a re-run does not find
them there; providers take turns, so that a clock that drifts drifts for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Run = Callable[[], object]


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


def capture(runs: Sequence[Run]) -> Callable[[], None]:
    """One graph of all `runs` in turn; where they sync with the host, a plain loop."""

    def loop() -> None:
        for run in runs:
            run()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop()
    torch.cuda.synchronize()
    if any(syncs(run) for run in runs):
        return loop
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def time_us(providers: Mapping[str, Sequence[Run]], rounds: int = 40) -> dict[str, list[float]]:
    """Microseconds per run of each provider, sorted; each provider's runs are one graph."""
    replays = {name: capture(runs) for name, runs in providers.items()}
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for replay in replays.values():
        for _ in range(3):
            replay()
    for _ in range(rounds):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / len(providers[name]))
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


def kernels_launched(run: Run) -> int:
    """Kernels and memory operations that the device ran for one call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(
        1 for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    )
