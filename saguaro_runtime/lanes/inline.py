"""The reference order: draft, then draft ahead, then let the target verify, all in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..chains import ChainStore
from ..metrics import Span
from ..ngram import NgramDrafter
from ..round import Admission, Reply, Turn
from ..speculator import Speculator
from .base import note_broken_rows

_T = TypeVar("_T")


class InlineLane:
    """Runs the drafter in the caller's thread; every other lane must give the same tokens."""

    def __init__(self, speculator: Speculator | NgramDrafter) -> None:
        self.speculator = speculator
        self.off: str | None = None
        self.faults: list[str] = []

    @property
    def chain(self) -> ChainStore:
        """Chains of all rows: tokens [rows, K], logits [rows, K + 1, V], lengths [rows]."""
        return self.speculator.chain

    @property
    def status(self) -> str:
        """ "on", or why there is no drafting."""
        return self.off or "on"

    @property
    def empty(self) -> bool:
        """Never: what fails here ends drafting for good."""
        return False

    def admit(self, admissions: list[Admission]) -> None:
        """Prefill these rows now."""
        self._try(lambda: self.speculator.admit(admissions))

    def release(self, rows: list[int]) -> None:
        """Free the slots of rows whose requests have ended."""
        self._try(lambda: self.speculator.release(rows))

    def next_chain(self, turn: Turn) -> Reply | None:
        """Answer the turn's B rows, then draft ahead for them; None once the draft has failed."""
        reply = self._try(lambda: self.speculator.next_chain(turn))
        self._try(self.speculator.look_ahead)
        return reply

    def meanwhile(self) -> None:
        """Nothing: the draft has drafted ahead before the target's turn."""

    def spans(self, *, wait: bool = True) -> list[Span]:
        """Work since the last call; nothing is ever waited for."""
        spans = self.speculator.spans()
        note_broken_rows(self.faults, spans)
        return spans

    def _try(self, work: Callable[[], _T]) -> _T | None:
        """Run a part of the draft's work; if it fails, drafting ends and the target goes on."""
        if self.off:
            return None
        try:
            return work()
        except Exception as error:
            self.off = f"the draft failed: {type(error).__name__}: {error}"
            self.faults.append(self.off)
            return None

    def close(self) -> None:
        """No more drafting; the model is the caller's."""
        self.off = self.off or "closed"
