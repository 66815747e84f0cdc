"""What a long command shows while it works, and how it handles an interruption."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_LINE_S = 60.0


class Progress:
    """A bar over an estimate of seconds where stderr is a terminal, else a line now and then."""

    def __init__(self, total_s: float, done_s: float = 0.0) -> None:
        from tqdm import tqdm

        self._terminal = sys.stderr.isatty()
        shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"
        self._bar: Any = tqdm(
            total=total_s,
            initial=done_s,
            bar_format=shape,
            file=sys.stderr,
            disable=not self._terminal,
        )
        self._phase, self._said_s = "", 0.0

    def show(self, phase: str, done_s: float, note: str = "") -> None:
        """Now at `done_s` of the estimate, in `phase`."""
        left_s = max(self._bar.total - done_s, 0.0)
        if not self._terminal:
            now = time.monotonic()
            if phase != self._phase or now - self._said_s > _LINE_S:
                say(f"{phase}{note}, about {left_s / 60:.1f} min left")
                self._said_s = now
        elif phase != self._phase:
            self._bar.set_description_str(phase, refresh=False)
        self._phase = phase
        self._bar.set_postfix_str(note.removeprefix(", "), refresh=False)
        self._bar.update(self._bar.total - left_s - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


class Interruptions:
    """Inside, Ctrl-C and SIGTERM are only noted, so that no step is interrupted half-way.

    `raise_noted` does what the signal would have done; a second signal does it at once.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def raise_noted(self) -> None:
        """Raise what the noted signal raises outside, if there was one."""
        if self.noted is not None:
            self._act(self.noted, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            self._act(number, frame)
        self.noted = number

    def _act(self, number: int, frame: FrameType | None) -> None:
        handler = self._before.get(number)
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
