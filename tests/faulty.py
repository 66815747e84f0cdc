"""Draft processes that fail at any message, without being processes."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from saguaro_runtime.lanes import process
from saguaro_runtime.lanes.child import Lost
from saguaro_runtime.lanes.memory import Arena
from saguaro_runtime.lanes.worker import Setup, allocate_beat, answer_to, build

Trouble = Callable[[Any, Any], Any]
"""(message, answer) -> what the lane gets to hear, None for nothing; may raise Lost."""


class LocalChild:
    """Does in this process what a draft process would, so that hundreds of deaths cost nothing."""

    pid = 0

    def __init__(self, setup: Setup, trouble: Trouble, patience: int) -> None:
        """`patience`: how often it is asked before it says that it is ready."""
        arena = Arena(setup.arena_bytes, os.dup(setup.arena_fd))
        self._fd, self._beat = arena.fd, allocate_beat(arena)
        self._speculator, self._trouble, self._patience = build(setup, arena), trouble, patience
        self._answers: list[Any] = [("ready",)]
        self.stalled = False

    def send(self, message: Any) -> None:
        message = pickle.loads(pickle.dumps(message))  # nothing is shared but the arena
        try:
            answer = self._trouble(message, answer_to(self._speculator, message))
            if answer is not None:
                self._answers.append(answer)
            if message[0] == "turn":
                self._speculator.look_ahead()
        except Lost:
            raise
        except Exception as error:
            self._answers.append(Lost(f"the draft process failed:\n{error}"))

    def receive(self, timeout_s: float) -> Any:
        if self.stalled:
            return None
        self._beat.fill_(time.monotonic())
        self._patience -= 1
        answer = self._answers.pop(0) if self._patience < 0 and self._answers else None
        if isinstance(answer, Lost):
            raise answer
        return answer

    def end(self, *, patience_s: float = 1.0) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def local_children(
    monkeypatch: pytest.MonkeyPatch,
    trouble: Trouble = lambda message, answer: answer,
    patience: int = 3,
) -> list[LocalChild]:
    """Give ProcessLanes a LocalChild each time they start a process; the list of them."""
    started: list[LocalChild] = []

    def start(setup: Setup, **_: Any) -> LocalChild:
        started.append(LocalChild(setup, trouble, patience if started else 0))
        return started[-1]

    monkeypatch.setattr(process, "Child", start)
    return started
