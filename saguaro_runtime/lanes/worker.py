"""The draft process: builds a Speculator, answers turns, and drafts ahead in between.

The engine sends ("admit", admissions), ("release", rows), ("turn", number, decision, packed),
("spans",) and ("close",). It answers ("ready",), ("chain", number, [hit, ready], spans),
("spans", spans), ("error", text).
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from ..chains import ChainStore
from ..metrics import Span, Timeline
from ..round import Turn
from ..speculator import Speculator
from .memory import Arena, padded_bytes

_BEAT_S = 0.1


@dataclass(frozen=True)
class Setup:
    """What the process needs to start; the descriptors are inherited."""

    model_fd: int
    arena_fd: int
    arena_bytes: int
    threads: int
    rows: int
    tokens: int
    speculator: dict[str, Any]


def main(fd: int) -> None:
    """Serve the engine at the other end of `fd` until it closes or dies."""
    # The terminal sends Ctrl-C to every process of the group; the engine decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        with torch.no_grad():
            _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception:
        connection.send(("error", traceback.format_exc()))
        sys.exit(1)


def _serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    torch.set_num_threads(setup.threads)
    arena = Arena(setup.arena_bytes, setup.arena_fd)
    with showing_life(allocate_beat(arena)):
        speculator = build(setup, arena)
        connection.send(("ready",))
        while (message := connection.recv())[0] != "close":
            if (answer := answer_to(speculator, message)) is not None:
                connection.send_bytes(pickle.dumps(answer))
            if message[0] == "turn":
                speculator.look_ahead(late=connection.poll())


def answer_to(speculator: Speculator, message: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Do what the engine asks; what it is told, if anything."""
    kind, *payload = message
    if kind == "turn":
        turn = Turn.unpacked(*payload)
        reply = torch.stack(speculator.next_chain(turn)).numpy()
        return "chain", turn.number, reply, speculator.spans()
    if kind == "spans":
        return "spans", speculator.spans()
    if kind == "admit":
        speculator.admit(payload[0])
    else:
        speculator.release(payload[0])
    return None


def build(setup: Setup, arena: Arena) -> Speculator:
    """The Speculator over the model and the memory that the engine prepared."""
    from ..models import as_model

    model = torch.load(f"/proc/self/fd/{setup.model_fd}", mmap=True, weights_only=False)
    impl = setup.speculator["impl"]
    return Speculator(
        as_model(model, rows=setup.rows, tokens=setup.tokens, impl=impl),
        rows=setup.rows,
        allocate=arena.allocate,
        timeline=Timeline("draft"),
        **setup.speculator,
    )


def allocate_beat(arena: Arena) -> torch.Tensor:
    """[1] float64: when the process last showed that it runs; the first tensor of the arena."""
    return arena.allocate((1,), torch.float64)


def store_bytes(
    leading: tuple[int, ...], draft_len: int, vocab_size: int, dtype: torch.dtype
) -> int:
    """Bytes of an arena for the beat and the chains."""
    total = padded_bytes((1,), torch.float64)

    def measure(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal total
        total += padded_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    ChainStore(leading, draft_len, vocab_size, dtype, measure)
    return total


@contextlib.contextmanager
def showing_life(beat: torch.Tensor) -> Iterator[None]:
    """Keep the time in `beat` [1], by a thread that ends with the block: one that is inside torch
    when the interpreter ends takes the process down with SIGABRT."""
    ended = threading.Event()

    def show() -> None:
        beat.fill_(time.monotonic())
        while not ended.wait(_BEAT_S):
            beat.fill_(time.monotonic())

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def is_answer(answer: Any) -> bool:
    """("spans", spans) or ("chain", number, hit and ready [2, B] bool, spans)."""
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[-1], list):
        return False
    if not all(isinstance(span, Span) for span in answer[-1]):
        return False
    if answer[0] != "chain":
        return answer[0] == "spans" and len(answer) == 2
    _, number, hit = answer[:-1] if len(answer) == 4 else (None, None, None)
    return isinstance(number, int) and isinstance(hit, np.ndarray) and hit.dtype == np.bool_
