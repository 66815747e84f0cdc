"""The draft in a second process: two threads of one process would share the interpreter lock."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from typing import Any, Literal

import torch

from saguaro_kernels.errors import SaguaroError

from ..chains import ChainStore
from ..metrics import KEPT_SPANS, Span
from ..round import Admission, Reply, Turn
from .base import note_broken_rows
from .child import Child, Lost
from .memory import Arena, file_of
from .worker import Setup, allocate_beat, is_answer, store_bytes

_FURTHEST_BEHIND = 16
"""Turns a draft may leave unanswered. Then it gets no more until it has answered them, and is given
all texts anew. Far fewer than fill the pipe."""
_STILL_S, _DEAD_S = 5.0, 30.0
"""Without a heartbeat for so long, a draft is not waited for; for so long, it is started again."""
_LONGEST_S = 300.0
"""Longest wait for a start, or for an answer while there is a heartbeat."""
_FORGIVEN_AFTER = 16
"""Turns answered for which one earlier restart is forgotten."""

State = Literal["starting", "empty", "on", "behind"]
"""starting: it loads the draft. empty: it must be given all running rows. on: it has them and gets
their turns. behind: it gets no more turns until it has answered those it has; then it is empty."""


class ProcessLane:
    """Runs the drafter in a process of its own; chains come back through shared memory.

    It ends when the engine closes or dies. If it ends first, hangs, or sends an invalid answer, it
    is started again and given all texts; meanwhile rows go on undrafted. One that keeps failing is
    given up: `off` says why.
    """

    _child: Child
    _state: State
    _caught_up: bool
    """It has answered a turn since it was given the rows: worth waiting for the next."""
    _asked: deque[int]
    """Numbers of the turns it was sent and has not answered."""
    _asked_spans: bool
    _left: list[int]
    """Rows whose requests ended while it was behind."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        rows: int,
        tokens: int,
        threads: int,
        timeout_s: float,
        speculator: dict[str, Any],
        restarts: int = 5,
    ) -> None:
        """`model`: a transformers model or a picklable `Model`; `speculator`: options of
        Speculator; `restarts`: most of them in a short time.

        Raises:
            ConfigError: the model cannot be sent to another process.
        """
        self.off: str | None = None
        self.faults: list[str] = []
        self._timeout_s, self._restarts, self._restarts_left = timeout_s, restarts, restarts
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        sizes = ((rows,), speculator["draft_len"], vocab_size, dtype)
        model_fd = file_of(model)
        arena = Arena(store_bytes(*sizes))
        self._beat = allocate_beat(arena)
        self.chain = ChainStore(*sizes, allocate=arena.allocate)
        # Kept for restarts, and closed with the lane.
        self._files = [weakref.finalize(self, os.close, fd) for fd in (arena.fd, model_fd)]
        self._setup = Setup(model_fd, arena.fd, arena.size, threads, rows, tokens, dict(speculator))
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the drafter."""
        return self._child.pid

    @property
    def status(self) -> str:
        """ "on", or why there is no drafting now."""
        if self.off or self._state != "starting":
            return self.off or "on"
        return f"starting again: {self.faults[-1]}" if self.faults else "starting"

    @property
    def empty(self) -> bool:
        """Loaded, or caught up, and without rows: to be given all that run. Waits for nothing."""
        try:
            if self.off:
                return False
            if self._state == "starting":
                self._await_ready(0.0)
            elif self._state == "behind":
                self._take_answers()
                if not self._asked:
                    self._state = "empty"
                    self._child.send(("release", self._left))
        except Lost as error:
            self._lose(error)
        return self._state == "empty"

    def wait_ready(self) -> None:
        """Wait until the draft is loaded.

        Raises:
            SaguaroError: it could not be; with the reason.
        """
        try:
            if self._state == "starting" and not self._await_ready(_LONGEST_S):
                raise Lost(f"not ready after {_LONGEST_S:.0f} s")
        except Lost as error:
            self.off = str(error)
            self.close()
            raise SaguaroError(f"draft process: {error}") from None

    def admit(self, admissions: list[Admission]) -> None:
        """Have these rows prefilled in the other process."""
        if admissions and self._state in ("empty", "on"):
            self._state = "on"
            self._send(("admit", admissions))

    def release(self, rows: list[int]) -> None:
        """Rows whose requests have ended; told later to a draft that is behind."""
        if self._state == "behind":
            self._left += rows
        elif self._state != "starting":
            self._send(("release", rows))

    def next_chain(self, turn: Turn) -> Reply | None:
        """Send the turn of B rows and wait for its answer, at most timeout_s seconds; None where
        none came, or a draft that is starting or behind was not asked."""
        if self.off or self._state != "on":
            return None
        try:
            return self._next_chain(turn)
        except Lost as error:
            self._lose(error)
            return None

    def meanwhile(self) -> None:
        """Nothing: the process drafts ahead by itself."""

    def spans(self, *, wait: bool = True) -> list[Span]:
        """Work in the other process since the last call; with `wait`, up to now."""
        try:
            if wait and not self.off and self._state == "on" and not self._asked:
                if not self._asked_spans:
                    self._child.send(("spans",))
                    self._asked_spans = True
                self._receive(self._timeout_s)
        except Lost as error:
            self._lose(error)
        spans = list(self._spans)
        self._spans.clear()
        note_broken_rows(self.faults, spans)
        return spans

    def close(self) -> None:
        """End the process and give back the shared memory; safe to call twice."""
        self.off = self.off or "closed"
        self._child.end()
        for close in self._files:
            close()

    def _start(self) -> None:
        """Start a process; the one before must have ended, for both write to the same chains."""
        self._state, self._asked_spans = "starting", False
        # The first rows of all have no texts yet that would take long.
        self._caught_up = not self.faults
        self._asked, self._answers = deque(), 0
        self._heard_s = time.monotonic()
        self._beat.fill_(self._heard_s)
        self._child = Child(
            self._setup,
            inherited=(self._setup.arena_fd, self._setup.model_fd),
            threads=self._setup.threads,
            timeout_s=self._timeout_s,
        )

    def _lose(self, error: Lost) -> None:
        """End a failed process and start another one, unless that has happened too often."""
        self._child.end(patience_s=0.0)
        self.faults.append(str(error))
        if not self._restarts_left:
            self.off = str(error)
            return
        self._restarts_left -= 1
        try:
            self._start()
        except (Lost, OSError) as again:
            self.off = f"{error}; it could not be started again: {again}"

    def _await_ready(self, timeout_s: float) -> bool:
        answer = self._child.receive(timeout_s)
        if answer == ("ready",):
            self._state = "empty"
        elif answer is not None:
            raise Lost("the draft process sent an invalid answer")
        elif time.monotonic() > self._heard_s + _LONGEST_S:
            raise Lost(f"the draft process was not ready after {_LONGEST_S:.0f} s")
        return self._state == "empty"

    def _next_chain(self, turn: Turn) -> Reply | None:
        self._take_answers()
        if len(self._asked) > _FURTHEST_BEHIND:
            self._state, self._caught_up, self._left = "behind", False, []
            return None
        # A draft that is still at an earlier turn is not waited for until it has caught up.
        timeout_s = 0.0 if self._asked or not self._caught_up else self._timeout_s
        self._asked.append(turn.number)  # before it is sent: Ctrl-C may come in between
        self._child.send(("turn", turn.number, turn.decision, turn.packed()))
        answer = self._answer(timeout_s)
        if answer is None or answer[1] != turn.number:
            return None
        masks = torch.from_numpy(answer[2])
        if masks.shape != (2, len(turn.rows)):
            raise Lost("the draft process sent an invalid answer")
        reply = Reply(*masks)
        ready = turn.select(reply.ready)
        if not self.chain.is_legal(ready.rows, ready.budget):
            raise Lost("the draft process sent an invalid chain")
        return reply

    def _send(self, message: object) -> None:
        if self.off:
            return
        try:
            self._child.send(message)
        except Lost as error:
            self._lose(error)

    def _still_s(self) -> float:
        """Seconds since the process's last heartbeat."""
        return time.monotonic() - float(self._beat)

    def _take_answers(self) -> None:
        """Take the answers that have come to turns that did not wait for them."""
        while self._asked and self._answer(0.0) is not None:
            pass
        if self._still_s() > _DEAD_S:
            time.sleep(1.0)  # the engine may have been stopped itself, and both have just gone on
            if self._still_s() > _DEAD_S:
                raise Lost(f"the draft process gave no sign of life for {_DEAD_S:.0f} s")
        if self._asked and time.monotonic() > self._heard_s + _LONGEST_S:
            raise Lost(f"the draft process did not answer for {_LONGEST_S:.0f} s")

    def _answer(self, timeout_s: float) -> Any:
        """The answer to the oldest turn that has none, or None; its spans are kept."""
        answer = self._receive(timeout_s)
        while answer is not None and answer[0] == "spans":  # asked for before, and late
            answer = self._receive(timeout_s)
        if answer is not None:
            while self._asked and self._asked[0] <= answer[1]:
                self._asked.popleft()
            self._caught_up = self._state == "on"
            self._spans.extend(answer[3])
            self._answers += 1
            if self._answers % _FORGIVEN_AFTER == 0:
                self._restarts_left = min(self._restarts_left + 1, self._restarts)
        return answer

    def _receive(self, timeout_s: float) -> Any:
        """The next answer, or None: too late, or no heartbeat."""
        deadline = time.monotonic() + timeout_s
        answer = self._child.receive(min(timeout_s, 0.5))
        while answer is None and time.monotonic() < deadline and self._still_s() < _STILL_S:
            answer = self._child.receive(min(0.5, max(deadline - time.monotonic(), 0.0)))
        if answer is None:
            return None
        self._heard_s = time.monotonic()
        if not is_answer(answer):
            raise Lost("the draft process sent an invalid answer")
        if answer[0] == "spans":
            self._asked_spans = False
            self._spans.extend(answer[1])
        return answer
