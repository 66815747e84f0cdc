"""Devices, streams and copies: all that the runtime asks of CUDA is in this file.

A side of the round works in a `Seat`: a device and, on a GPU, a stream of its own. Three things
pass between seats and the host, none of which makes the host wait for work that is still queued:

    send        host -> device      the turn; from pinned memory, in the seat's own order
    Mailbox     device -> host      the outcome; the host waits for that copy and nothing behind it
    Crossing    device -> device    the chains; two buffers, each with a pair of events of its own

On a CPU all three hand back what they were given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")
_UNIT = 16
"""Bytes: tensors that share one copy start at multiples of it."""


class Cuda:
    """What the runtime uses of torch.cuda; `backend` is one, or a test's stand-in."""

    def stream(self, device: torch.device) -> Any:
        """A new stream, ordered after all work queued on the device so far."""
        torch.cuda.synchronize(device)
        return torch.cuda.Stream(device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a stream and its device current."""
        return torch.cuda.stream(stream)

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def event(self, *, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Order work queued on `stream` from now on after `event`."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """The host waits for `event`."""
        event.synchronize()

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def pinned(self, size: int) -> torch.Tensor:
        """[size] uint8 of page-locked memory; torch does not reuse it while a copy reads it."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
        return pinned.to(device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def are_peers(self, first: torch.device, second: torch.device) -> bool:
        """Whether one can access the other's memory directly."""
        return first == second or torch.cuda.can_device_access_peer(first, second)

    @contextlib.contextmanager
    def never_waiting(self) -> Iterator[None]:
        """Inside, an operation that makes the host wait raises, in any thread."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def graph_pool(self) -> Any:
        """Memory that graphs of one stream share."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self, work: Callable[[], torch.Tensor], pool: Any, stream: Any
    ) -> tuple[Any, torch.Tensor]:
        """The graph of what `work` queues on `stream`, and what it returns: written by replays."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using their own streams.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            made = work()
        return graph, made

    def replay(self, graph: Any) -> None:
        """Queue a graph on the current stream, which is the one it was captured on."""
        graph.replay()


backend: Any = Cuda()


class Seat:
    """Where a side works: a device and, on a GPU and if `own_stream`, a stream of its own."""

    def __init__(self, device: torch.device, *, own_stream: bool = False) -> None:
        self.device = device
        self._own = backend.stream(device) if own_stream else None

    @property
    def stream(self) -> Any:
        """The stream that this seat's work is queued on."""
        return self._own if self._own is not None else backend.current_stream(self.device)

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """Queue what is done inside on this seat's stream."""
        return contextlib.nullcontext() if self._own is None else backend.use(self._own)

    def wait(self) -> None:
        """The host waits for all that has been queued here."""
        event = backend.event()
        backend.record(event, self.stream)
        backend.synchronize(event)


def send(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Host tensors on `device`: one copy on its current stream, before what is queued next."""
    if device.type == "cpu":
        return tensors
    flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    sizes = [-(-len(part) // _UNIT) * _UNIT for part in flat]
    packed = backend.pinned(sum(sizes))
    for piece, part in zip(packed.split(sizes), flat, strict=True):
        piece[: len(part)] = part
    pieces = backend.upload(packed, device).split(sizes)
    return tuple(
        piece[: len(part)].view(tensor.dtype).view(tensor.shape)
        for piece, part, tensor in zip(pieces, flat, tensors, strict=True)
    )


class Mailbox:
    """A few device tensors on their way to the host. There are two buffers: what `take` returned
    stays valid until the second `post` after it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: tuple[list[torch.Tensor], ...] = ([], [])
        self._events: list[Any] = [None, None]
        self._side = 0
        self._posted: list[torch.Tensor] = []

    def post(self, *tensors: torch.Tensor) -> None:
        """Queue copies to the host, after the work that writes the tensors."""
        if self.device.type == "cpu":
            self._posted = list(tensors)
            return
        self._side = 1 - self._side
        buffers = self._buffers[self._side]
        self._posted = []
        for index, tensor in enumerate(tensors):
            size = tensor.numel() * tensor.element_size()
            if index == len(buffers):
                buffers.append(backend.pinned(size))
            elif len(buffers[index]) < size:
                buffers[index] = backend.pinned(size)
            on_host = buffers[index][:size].view(tensor.dtype).view(tensor.shape)
            backend.copy(on_host, tensor)
            self._posted.append(on_host)
        if self._events[self._side] is None:
            self._events[self._side] = backend.event()
        backend.record(self._events[self._side], backend.current_stream(self.device))

    def take(self) -> list[torch.Tensor]:
        """The tensors posted last; waits until they have arrived."""
        if self.device.type != "cpu":
            backend.synchronize(self._events[self._side])
        return self._posted


class Crossing:
    """Tensors handed from one seat to another through buffers that both keep.

    There are two of each, used in turn. A pair of events belongs to each: `sent`, which the reader
    waits for before it reads, and `read`, which the writer waits for before it writes again. Where
    the devices cannot reach each other the copy goes through pinned memory.
    """

    def __init__(self, source: Seat, target: Seat) -> None:
        """Make the buffers first, in the target's seat."""
        self.source, self.target = source, target
        self.direct = backend.are_peers(source.device, target.device)
        self.side = 0
        self._sent = [backend.event(), backend.event()]
        self._read = [backend.event(), backend.event()]
        for event in self._read:  # who made the buffers is done with them
            backend.record(event, target.stream)
        self._pinned: tuple[dict[int, torch.Tensor], ...] = ({}, {})
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> int:
        """In the source's seat: switch to the other buffer, and wait for its last reader."""
        self.side = 1 - self.side
        backend.wait(self.source.stream, self._read[self.side])
        return self.side

    def send(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In the source's seat: queue copies of (its own, the target's buffer), equal in shape."""
        self._parts = []
        for index, (here, there) in enumerate(pairs):
            if self.direct:
                backend.copy(there, here)
            else:
                halfway = self._halfway(index, here)
                backend.copy(halfway, here)
                self._parts.append((halfway, there))
        backend.record(self._sent[self.side], self.source.stream)

    def receive(self) -> None:
        """In the target's seat: work queued after this finds the buffers filled."""
        backend.wait(self.target.stream, self._sent[self.side])
        for halfway, there in self._parts:
            backend.copy(there, halfway)

    def done(self) -> None:
        """In the target's seat, once all work that reads the buffers has been queued."""
        backend.record(self._read[self.side], self.target.stream)

    def _halfway(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        size, kept = tensor.numel() * tensor.element_size(), self._pinned[self.side]
        if index not in kept or len(kept[index]) < size:
            kept[index] = backend.pinned(size)
        return kept[index][:size].view(tensor.dtype).view(tensor.shape)
