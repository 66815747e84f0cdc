"""What the engine asks of a lane. Calls come in order; only `next_chain` waits for an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..chains import ChainStore
from ..metrics import Span
from ..round import BROKEN, Admission, Reply, Turn

_BROKEN_FAULT = "the draft's logits are NaN or all -inf at times"


def note_broken_rows(faults: list[str], spans: Iterable[Span]) -> None:
    """Add a fault, once, if spans report logits that no token can be drawn from."""
    if _BROKEN_FAULT not in faults and any(span.name == BROKEN for span in spans):
        faults.append(_BROKEN_FAULT)


class Lane(Protocol):
    """Runs a Speculator. After `next_chain` returns, drafting ahead goes on by itself.

    Attributes:
        chain: chains of all rows, on the target's device. Those of rows that are ready are written
            only while a turn is being answered, so they may be read from the answer to a turn until
            the next is given.
        off: why there is no more drafting, or None.
        faults: what has failed on the draft's side so far, whether or not it went on.
    """

    off: str | None
    faults: list[str]

    @property
    def chain(self) -> ChainStore: ...

    @property
    def status(self) -> str:
        """ "on", or why there is no drafting now."""

    @property
    def empty(self) -> bool:
        """Whether the draft holds no rows and must be given all that are running: at the start, or
        after a failure."""

    def admit(self, admissions: list[Admission]) -> None:
        """Start prefilling these rows on the draft."""

    def release(self, rows: list[int]) -> None:
        """Rows whose requests have ended."""

    def next_chain(self, turn: Turn) -> Reply | None:
        """The chains that follow an outcome; None where the draft is late or off: go undrafted."""

    def meanwhile(self) -> None:
        """Called when the target's work has been queued, before its outcome is waited for: here
        lanes whose draft is queued by the same thread let it draft ahead."""

    def spans(self, *, wait: bool = True) -> list[Span]:
        """Work of the draft's side since the last call; with wait=False, what is known of it."""

    def close(self) -> None:
        """End the drafter and free what it held; safe to call twice."""
