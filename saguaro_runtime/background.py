"""Rounds in a background thread, for callers that must not block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """Runs one round at a time; callers that wait at the same time share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._round: Future[Any] | None = None

    async def round(self, step: Callable[[], Any]) -> None:
        """Wait until a round has ended: the one that runs, or a new one.

        Raises:
            Whatever the round raised.
        """
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="saguaro")
            if self._round is None or self._round.done():
                self._round = self._executor.submit(step)
            running = self._round
        # A caller that is cancelled must not cancel the round of the others.
        await asyncio.shield(asyncio.wrap_future(running))

    def close(self) -> None:
        """Let the thread end. Safe to call twice."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            self._executor = None
