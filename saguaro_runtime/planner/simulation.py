"""A discrete-event simulation of rounds: two devices, a batch of rows, hits, misses and hand-offs.

It knows nothing of the closed forms and checks them: the target verifies while the drafter
pre-drafts, each row's outcome was prepared or not, and missed rows wait for a redraft ("wait") or
go on with nothing drafted ("fast"). Times are in units of T_V.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from saguaro_kernels.errors import ConfigError

Fallback = Literal["wait", "fast"]


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did; speeds are per row, against AR at one token per T_V."""

    speed_vs_ar: float
    tokens_per_round: float
    hit_rate: float
    target_busy: float
    draft_busy: float


def simulate(
    rounds: int,
    *,
    acceptance: float,
    k: int,
    hit_rate: float,
    draft_round: float,
    redraft: float = 0.0,
    k_miss: int | None = None,
    hit_rate_after_fast: float = 1.0,
    batch: int = 1,
    fallback: Fallback = "wait",
    handoff: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Play `rounds` rounds of a batch and count.

    Args:
        acceptance: each draft is accepted with this probability until the first is not.
        k, k_miss: drafts of a prepared chain, and of a redrafted one (default k).
        hit_rate: probability that a row's outcome was prepared; `hit_rate_after_fast` in the round
            after one without drafts, whose budget goes to its single outcome row.
        draft_round: pre-drafting all branches. A miss abandons it, as its rows are then wanted.
        redraft: redrafting the missed rows ("wait" only); every row waits, as one batch.
        handoff: one way between the devices, outcome and chain, each round twice.
    """
    if rounds < 1 or batch < 1 or fallback not in ("wait", "fast"):
        raise ConfigError(
            f"rounds, batch, fallback: got {rounds}, {batch}, {fallback!r}, "
            "want rounds >= 1, batch >= 1 and 'wait' or 'fast'"
        )
    rng = random.Random(seed)
    k_miss = k if k_miss is None else k_miss
    drafted = [k] * batch
    clock = target_busy = draft_busy = 0.0
    tokens = hits = 0
    for _ in range(rounds):
        hit = []
        for length in drafted:
            accepted = 0
            while accepted < length and rng.random() < acceptance:
                accepted += 1
            tokens += accepted + 1
            hit.append(rng.random() < (hit_rate if length else hit_rate_after_fast))
        hits += sum(hit)
        target_busy += 1.0
        outcome_known = clock + 1.0 + handoff
        # A row that hit needs its chain to be finished; without any, pre-drafting is dropped.
        ready = max(outcome_known, clock + draft_round) if any(hit) else outcome_known
        draft_busy += min(draft_round, ready - clock)
        if fallback == "wait" and not all(hit):
            ready += redraft
            draft_busy += redraft
        drafted = [k if h else (k_miss if fallback == "wait" else 0) for h in hit]
        clock = ready + handoff
    return Simulation(
        speed_vs_ar=tokens / batch / clock,
        tokens_per_round=tokens / batch / rounds,
        hit_rate=hits / batch / rounds,
        target_busy=target_busy / clock,
        draft_busy=draft_busy / clock,
    )
