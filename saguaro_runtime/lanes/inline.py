"""The reference order: draft, then draft ahead, then let the target verify, all in one thread."""

from __future__ import annotations

from ..metrics import Span
from ..round import Admission, Turn
from ..speculator import Speculator
from .base import Reply


class InlineLane:
    """Runs the drafter in the caller's thread; every other lane must give the same tokens."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.chain = speculator.chain
        self.off: str | None = None

    def admit(self, admissions: list[Admission]) -> None:
        self.speculator.admit(admissions)

    def release(self, rows: list[int]) -> None:
        self.speculator.release(rows)

    def next_chain(self, turn: Turn) -> Reply | None:
        hit = self.speculator.next_chain(turn)
        self.speculator.look_ahead()
        return Reply(hit)

    def spans(self) -> list[Span]:
        return self.speculator.timeline.drain()

    def close(self) -> None:
        self.off = self.off or "closed"
