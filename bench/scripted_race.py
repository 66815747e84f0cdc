"""Engines on scripted models, raced: variants take turns on the same requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saguaro_kernels.errors import SaguaroError
from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.models.scripted import ScriptedModel

from .scripted_pairs import START

WARM_UP, TURN = 2, 10
"""Rounds that nobody times, and rounds until it is another variant's turn."""


@dataclass(frozen=True)
class Delays:
    """Seconds of a target forward, and of a draft step over one row and over all branches."""

    verify_s: float
    step_s: float
    tree_s: float


@dataclass(frozen=True)
class Ran:
    """What so many rounds of an engine came to."""

    tokens_per_s: float
    """Of all requests together."""
    stats: dict[str, Any]
    rounds: list[list[Any]]
    """Of each request."""
    spans: list[Any]


def run(laws: Sequence[Any], delays: Delays, count: int, **options: Any) -> Ran:
    """`count` rounds of one engine, after a warm-up; `options` as for `race`."""
    return race(laws, delays, count, {"": {}}, **options)[""]


def race(
    laws: Sequence[Any],
    delays: Delays,
    count: int,
    variants: Mapping[str, Mapping[str, Any]],
    *,
    temperature: float = 0.0,
    batch: int = 1,
    lane: str = "process",
    **options: Any,
) -> dict[str, Ran]:
    """`count` rounds of `batch` requests by each variant, after a warm-up.

    They take turns of a few rounds, so that a machine that drifts favours none. The first round of
    a turn is not timed: its draft had all the time of the others.
    """
    with contextlib.ExitStack() as stack:
        runners = {
            name: _Runner(
                stack.enter_context(
                    _engine(laws, delays, batch, {"lane": lane, **options, **variant})
                ),
                temperature,
                batch,
            )
            for name, variant in variants.items()
        }
        done = 0
        while done < count:
            turn = min(TURN, count - done)
            for runner in runners.values():
                if len(runners) > 1:
                    runner.engine.step()
                runner.time(turn)
            done += turn
        return {name: runner.ran() for name, runner in runners.items()}


def _engine(laws: Sequence[Any], delays: Delays, batch: int, options: dict[str, Any]) -> Engine:
    sizes: dict[str, Any] = {"rows": batch, "slots": 2048}
    target = ScriptedModel(laws[0], extend_s=delays.verify_s, **sizes)
    draft = ScriptedModel(laws[1], extend_s=delays.step_s, tree_s=delays.tree_s, **sizes)
    common: dict[str, Any] = {
        "max_batch": batch, "threads": 1, "impl": "reference", "max_tokens": 1 << 16
    }  # fmt: skip
    return Engine(target, draft, EngineConfig(**common, **options))


class _Runner:
    """An engine whose requests do not end meanwhile."""

    def __init__(self, engine: Engine, temperature: float, batch: int) -> None:
        self.engine = engine
        self.requests = [
            engine.add(list(START), SamplingParams(1500, temperature, seed=seed, ignore_eos=True))
            for seed in range(batch)
        ]
        self.tokens, self.seconds = 0, 0.0
        for _ in range(WARM_UP):
            engine.step()
        engine.reset_stats()

    def time(self, rounds: int) -> None:
        """Add the tokens and the time of so many rounds."""
        before = self._length()
        start = time.perf_counter()
        for _ in range(rounds):
            self.engine.step()
        self.seconds += time.perf_counter() - start
        self.tokens += self._length() - before

    def _length(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    def ran(self) -> Ran:
        """What it came to.

        Raises:
            SaguaroError: the engine has given up its draft, so that this is not what was asked for.
        """
        stats = self.engine.stats()
        if stats["speculation"] not in ("on", "off"):
            raise SaguaroError(f"speculation: {stats['speculation']}")
        rounds = [list(request.rounds[WARM_UP:]) for request in self.requests]
        return Ran(self.tokens / self.seconds, stats, rounds, list(self.engine.spans))


def calibrated(laws: Sequence[Any], verify_s: float, step_s: float, **options: Any) -> Delays:
    """Delays to ask for, so that with what is computed anyway calls take verify_s and step_s."""
    options = options | {"method": "ssd", "fallback": "batched_retry", "lane": "inline"}
    own = run(laws, Delays(0.0, 0.0, 0.0), 20, **options).stats
    taken = (
        own["t_verify_ms"], own["t_redraft_step_ms"], own["t_look_ahead_ms"] / (options["k"] + 1)
    )  # fmt: skip
    wanted = (verify_s, step_s, step_s)
    return Delays(*(max(0.0, s - ms / 1e3) for s, ms in zip(wanted, taken, strict=True)))
