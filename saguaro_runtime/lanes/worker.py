"""The draft process: builds a Speculator, answers turns, drafts ahead while nobody waits.

The engine sends ("admit", admissions), ("release", rows), ("turn", number, arrays), ("spans",) and
("close",). It answers ("ready",), ("chain", number, hit, spans), ("spans", spans), ("error", text).
"""

from __future__ import annotations

import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..metrics import Timeline
from ..round import Turn
from ..speculator import Speculator
from .memory import Arena


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
    speculator = build(setup)
    connection.send(("ready",))
    while True:
        kind, *payload = connection.recv()
        if kind == "turn":
            number, arrays = payload
            turn = Turn(number, *(torch.from_numpy(array) for array in arrays))
            hit = speculator.next_chain(turn)
            connection.send(("chain", turn.number, hit.numpy(), speculator.timeline.drain()))
            speculator.look_ahead(late=connection.poll())
        elif kind == "admit":
            speculator.admit(payload[0])
        elif kind == "release":
            speculator.release(payload[0])
        elif kind == "spans":
            connection.send(("spans", speculator.timeline.drain()))
        else:
            return


def build(setup: Setup) -> Speculator:
    """The Speculator over the model and the arena that the engine prepared."""
    from ..models import as_model

    model = torch.load(f"/proc/self/fd/{setup.model_fd}", mmap=True, weights_only=False)
    impl = setup.speculator["impl"]
    return Speculator(
        as_model(model, rows=setup.rows, tokens=setup.tokens, impl=impl),
        rows=setup.rows,
        allocate=Arena(setup.arena_bytes, setup.arena_fd).allocate,
        timeline=Timeline("draft"),
        **setup.speculator,
    )
