"""Scripted models on a clock of their own: what two devices would take, at once and without noise.

Model calls move the clock. A lane keeps the draft's clock beside the target's, so that drafting
ahead goes on while the target verifies, as in two processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import scripts
import torch

from saguaro_runtime.lanes import InlineLane
from saguaro_runtime.metrics import timeline
from saguaro_runtime.models import scripted
from saguaro_runtime.models.scripted import ScriptedModel
from saguaro_runtime.round import Reply, Turn


class Clock:
    """Seconds that pass only in model calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timeline, "time", self)
        monkeypatch.setattr(scripted, "_wait", self.advance)

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RowModel(ScriptedModel):
    """A tree step takes `row_s` more for every branch."""

    row_s = 0.0

    def decode_tree(self, rows: torch.Tensor, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        scripted._wait(self.row_s * tokens.numel())
        return super().decode_tree(rows, tokens, *rest)


class VirtualLane(InlineLane):
    """Runs the drafter at once, on its own clock."""

    clock: Clock
    free = 0.0

    def next_chain(self, turn: Turn) -> Reply | None:
        self.clock.now = max(self.clock.now, self.free)
        reply = self._try(lambda: self.speculator.next_chain(turn))
        answered = self.clock.now
        self._try(self.speculator.look_ahead)
        self.free, self.clock.now = self.clock.now, answered
        return reply


def engine(clock: Clock, target: Any, draft: Any, **options: Any):
    """An engine whose draft has a device of its own."""
    made = scripts.engine(target, draft, lane="inline", **({"reproducible": False} | options))
    if made.lane is not None:
        made.lane.__class__ = VirtualLane
        made.lane.clock = clock
    return made


def speed(clock: Clock, running: Any, rows: int, tokens: int, **params: Any) -> float:
    """Tokens per second and row while all rows run."""
    for seed in range(rows):
        running.add([1, 2], scripts.sampled(seed, 3500, **params))
    start, rounds = clock.now, running.stats()["tokens"]
    while running.stats()["tokens"] < rounds + tokens * rows:
        for _ in range(8):
            running.step()
    return (running.stats()["tokens"] - rounds) / rows / (clock.now - start)
