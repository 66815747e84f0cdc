"""A second process for the draft: there two models overlap, in two threads they do not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError, SaguaroError

from ..metrics import KEPT_SPANS, Span
from ..round import Admission, ChainStore, Turn
from .base import Reply
from .memory import Arena, padded_bytes
from .worker import Setup

_START_TIMEOUT_S = 300.0
_FURTHEST_BEHIND = 64
"""Turns a draft may leave unanswered; far fewer than fill the pipe, where a send would block."""
_START = "import sys; from saguaro_runtime.lanes.worker import main; main(int(sys.argv[1]))"
_LOST = (EOFError, OSError)


class ProcessLane:
    """Runs the drafter in a process of its own; chains come back through shared memory.

    The process is started by a plain command, so scripts need no `if __name__ == "__main__"`. It
    ends when the engine closes or dies. If it dies first, `off` says so and rows go on undrafted.
    """

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
    ) -> None:
        """`model`: a transformers model or a picklable `Model`; `speculator`: options of
        Speculator.

        Raises:
            ConfigError: the model cannot be sent to another process.
        """
        self.off: str | None = None
        self._timeout_s, self._ready, self._unanswered = timeout_s, False, 0
        self._asked_spans = False
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        sizes = ((rows,), speculator["draft_len"], vocab_size, dtype)
        model_fd = _file_of(model)
        arena = Arena(_store_bytes(*sizes))
        self.chain = ChainStore(*sizes, allocate=arena.allocate)
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), arena.fd, model_fd)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(threads)},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _stop, self._process, self._connection)
        self._send(
            Setup(model_fd, arena.fd, arena.size, threads, rows, tokens, dict(speculator)),
        )
        for fd in (arena.fd, model_fd):
            os.close(fd)

    @property
    def pid(self) -> int:
        """Process id of the drafter."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the draft is loaded.

        Raises:
            SaguaroError: it could not be; with the reason.
        """
        if self._ready or self.off:
            return
        answer = self._receive(_START_TIMEOUT_S)
        if answer is None:
            reason = self.off or f"not ready after {_START_TIMEOUT_S:.0f} s"
            self.close()
            raise SaguaroError(f"draft process: {reason}")
        self._ready = True

    def admit(self, admissions: list[Admission]) -> None:
        self.wait_ready()
        self._send(("admit", admissions))

    def release(self, rows: list[int]) -> None:
        self._send(("release", rows))

    def next_chain(self, turn: Turn) -> Reply | None:
        _, *tensors = (getattr(turn, field.name) for field in dataclasses.fields(turn))
        while self._unanswered and self._answer(0.0) is not None:
            pass
        if self._unanswered > _FURTHEST_BEHIND:
            self._lose(f"the draft process fell {_FURTHEST_BEHIND} rounds behind")
        # A draft that is still at an earlier turn is not waited for again until it has caught up.
        timeout_s = 0.0 if self._unanswered else self._timeout_s
        self._send(("turn", turn.number, [tensor.numpy() for tensor in tensors]))
        self._unanswered += 1
        answer = self._answer(timeout_s)
        if answer is None or answer[1] != turn.number:
            return None
        hit = torch.from_numpy(answer[2])
        if hit.shape != turn.rows.shape or hit.dtype != torch.bool or not self._legal(turn):
            self._lose("the draft process sent a chain that cannot be")
            return None
        return Reply(hit)

    def spans(self) -> list[Span]:
        if not self._unanswered and not self._asked_spans:
            self._send(("spans",))
            self._asked_spans = True
        if self._asked_spans and not self._unanswered:
            self._receive(self._timeout_s)
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def close(self) -> None:
        self.off = self.off or "closed"
        self._end()

    def _legal(self, turn: Turn) -> bool:
        num_draft = self.chain.num_draft[turn.rows]
        tokens = self.chain.tokens[turn.rows]
        used = torch.arange(tokens.shape[1]) < num_draft[:, None]
        vocab_size = self.chain.logits.shape[-1]
        counts = bool(((num_draft >= 0) & (num_draft <= turn.budget)).all())
        return counts and bool(((tokens >= 0) & (tokens < vocab_size))[used].all())

    def _send(self, message: object) -> None:
        if self.off:
            return
        try:
            self._connection.send(message)
        except _LOST:
            # What it said last tells more than that it is gone.
            self._receive(0.0)
            self._lose()

    def _answer(self, timeout_s: float) -> Any:
        """The answer to the oldest turn that has none, or None; its spans are kept."""
        answer = self._receive(timeout_s)
        while answer is not None and answer[0] == "spans":  # asked for before, and late
            answer = self._receive(timeout_s)
        if answer is not None:
            self._unanswered -= 1
            self._spans.extend(answer[3])
        return answer

    def _receive(self, timeout_s: float) -> Any:
        """The next answer, or None: too late, or no more."""
        if self.off:
            return None
        try:
            if not self._connection.poll(timeout_s):
                return None
            answer = self._connection.recv()
            if answer[0] == "spans":
                self._asked_spans = False
                self._spans.extend(answer[1])
        except (*_LOST, pickle.UnpicklingError):
            self._lose()
            return None
        if answer[0] == "error":
            self._lose(f"the draft process failed:\n{answer[1]}")
            return None
        return answer

    def _lose(self, reason: str | None = None) -> None:
        self._end()
        self.off = (
            self.off or reason or f"the draft process ended (exit code {self._process.returncode})"
        )


def _store_bytes(
    leading: tuple[int, ...], draft_len: int, vocab_size: int, dtype: torch.dtype
) -> int:
    total = 0

    def measure(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal total
        total += padded_bytes(shape, dtype)
        return torch.empty(0)

    ChainStore(leading, draft_len, vocab_size, dtype, measure)
    return total


def _file_of(model: Any) -> int:
    """The model in an anonymous file; its descriptor."""
    fd = os.memfd_create("saguaro-draft")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            torch.save(model, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        os.close(fd)
        raise ConfigError(
            f"draft {type(model).__name__}: cannot be sent to another process ({error}); "
            "define its class in a module, or use EngineConfig(lane='inline')"
        ) from error
    return fd


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """End the process: ask, then insist. Its end of the pipe is gone either way."""
    with contextlib.suppress(*_LOST):
        connection.send(("close",))
    connection.close()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
