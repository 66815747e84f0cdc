"""Two CUDA streams, on one GPU or on two: the draft's work overlaps the target's.

One thread of the host queues everything and waits once a round, for the outcome:

    host      turn n           |verify n|   look ahead n      wait    turn n + 1
    draft       promote, hand over ..........  branches n ....
    target              wait for the chains, verify n ........ outcome

Chains cross through buffers of their own with a pair of events each, see `transfer.Crossing`; the
outcome crosses through the host, which needs it to choose what comes next. No other memory is used
on both streams, so torch's allocator never gives one stream what the other still reads.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .. import transfer
from ..chains import ChainStore, allocate_on
from ..metrics import Span, Timeline
from ..round import Reply, Turn
from ..speculator import Speculator
from ..transfer import Crossing, Seat
from .inline import InlineLane

_T = TypeVar("_T")


class StreamLane(InlineLane):
    """Queues the drafter's work on a stream of its own.

    Args:
        speculator: made in `seat`, whose device its model lies on.
        seat, target: where the two sides work.
    """

    speculator: Speculator

    def __init__(self, speculator: Speculator, seat: Seat, target: Seat) -> None:
        super().__init__(speculator)
        self.seat = seat
        self._own = own = speculator.chain
        rows, draft_len = own.tokens.shape
        seat.wait()  # for the map of the vocabulary, which crosses on the devices' default streams
        with target.working():
            sizes = (rows,), draft_len, own.logits.shape[-1], own.logits.dtype
            self._landed = [ChainStore(*sizes, allocate_on(target.device)) for _ in range(2)]
            if own.vocab_map is not None:
                columns = own.vocab_map.to(target.device)
                self._landed[0].vocab_map = self._landed[1].vocab_map = columns
        self._crossing = Crossing(seat, target)
        self._handed = False
        """The target reads chains of this turn."""

    def warm_up(self) -> None:
        """Capture and compile what drafting needs, before the first request."""

        def draft() -> None:
            self.speculator.warm_up()
            self.seat.wait()
            self.speculator.timeline.drain()

        self._try(draft)

    @property
    def chain(self) -> ChainStore:
        """The chains handed over last, on the target's device."""
        return self._landed[self._crossing.side]

    def next_chain(self, turn: Turn) -> Reply | None:
        """In the target's seat, which then waits for the chains; the host does not."""
        reply = self._try(lambda: self._answer(turn))
        self._handed = reply is not None
        if self._handed:
            self._crossing.receive()
        return reply

    def meanwhile(self) -> None:
        if self._handed:
            self._crossing.done()
            self._try(self.speculator.look_ahead)

    def _answer(self, turn: Turn) -> Reply:
        reply = self.speculator.next_chain(turn)
        landed = self._landed[self._crossing.begin()]
        # Rows are given out lowest first: up to the highest of the turn there are few others.
        rows = turn.rows.tolist()
        used = max(rows) + 1
        names = [*ChainStore.SCALARS, *ChainStore.IDS, *ChainStore.WHOLE]
        if self.speculator.drafter.table.draws(rows):
            names.append("logits")
        self._crossing.send(
            [(getattr(self._own, name)[:used], getattr(landed, name)[:used]) for name in names]
        )
        return reply

    def _try(self, work: Callable[[], _T]) -> _T | None:
        def queue() -> _T:
            with self.seat.working():
                return work()

        return super()._try(queue)


class StreamTimeline(Timeline):
    """Spans by the device's clock: events around the work of each, read once they have passed."""

    def __init__(self, lane: str, device: torch.device) -> None:
        super().__init__(lane)
        self.device = device
        self._queued: deque[tuple[str, int, Any, Any]] = deque()
        self._spare: list[Any] = []
        self._mark = self._record()
        transfer.backend.synchronize(self._mark)
        self._mark_s = time.monotonic()

    @contextlib.contextmanager
    def span(self, name: str, rows: int = 0) -> Iterator[None]:
        start = self._record()
        yield
        self._queued.append((name, rows, start, self._record()))

    def drain(self) -> list[Span]:
        backend = transfer.backend
        while self._queued and backend.passed(self._queued[0][3]):
            name, rows, start, end = self._queued.popleft()
            begun = self._mark_s + backend.elapsed_ms(self._mark, start) / 1e3
            ended = begun + backend.elapsed_ms(start, end) / 1e3
            self.spans.append(Span(self.lane, name, begun, ended, rows))
            # Times are float32 milliseconds: those from a mark long ago would be coarse.
            self._spare += [self._mark, start]
            self._mark, self._mark_s = end, ended
        return super().drain()

    def _record(self) -> Any:
        backend = transfer.backend
        event = self._spare.pop() if self._spare else backend.event(timed=True)
        backend.record(event, backend.current_stream(self.device))
        return event
