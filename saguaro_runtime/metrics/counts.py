"""Counts and durations of requests and rounds."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["first", "asked", "hit", "miss", "late"]
"""Where the chain of a round came from. first: a request's first round, which has none. asked:
drafted on demand, as nothing was prepared. hit, miss: the last outcome was, or was not, among the
prepared ones. late: the draft did not answer in time, or was off, and there is none."""


@dataclass
class Times:
    """When a request was added, got its row, its first token, and ended; monotonic clock."""

    added: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None

    def summary(self, tokens: int) -> dict[str, float]:
        """Seconds since it was added; up to now for what is still to come."""
        now = time.monotonic() if self.ended is None else self.ended
        first = now if self.first is None else self.first
        admitted = now if self.admitted is None else self.admitted
        decoding = now - first
        return {
            "wait_s": admitted - self.added,
            "first_token_s": first - self.added,
            "seconds": now - self.added,
            "tokens_per_s": (tokens - 1) / decoding if tokens > 1 and decoding > 0 else 0.0,
        }


class Histogram:
    """How many values were at most each of `bounds`, which ascend.

    counts: one more than bounds; counts[i] were at most bounds[i] and above the bound before it.
    total: the sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts = list(bounds), [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times, in the unit of the bounds; in the last place if it is above
        all of them."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += times * value


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Served:
    """The requests that have ended: how many for each reason, and how long they took.

    first_token_s, seconds: from adding a request to its first token, and to its end.
    """

    reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))

    def add(self, reason: str, prompt_tokens: int, times: Times) -> None:
        """Take a request that ends now, and set its time of ending."""
        times.ended = time.monotonic()
        _count(self.reasons, reason)
        self.prompt_tokens += prompt_tokens
        self.seconds.add(times.ended - times.added)
        if times.first is not None:
            self.first_token_s.add(times.first - times.added)


@dataclass
class Counts:
    """Sums over rounds and rows; one per request and one per engine.

    hits + misses = the rounds that asked for a prepared chain.
    tokens_after, rounds_after: accepted + 1 and rounds, by where their chain came from.
    fallbacks: what rows that missed went on with.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    hits_by_length: dict[int, int] = field(default_factory=dict)
    misses_by_length: dict[int, int] = field(default_factory=dict)
    tokens_after: dict[str, int] = field(default_factory=dict)
    rounds_after: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def add_round(self, drafted: int, accepted: int, committed: int, source: Source) -> None:
        """A round of one row; where it ends the text, fewer than accepted + 1 are committed."""
        self.rounds += 1
        self.tokens += committed
        self.drafted += drafted
        self.accepted += accepted
        _count(self.accepted_lengths, accepted)
        _count(self.tokens_after, source, accepted + 1)
        _count(self.rounds_after, source)

    def add_lookup(self, accepted: int, hit: bool, fallback: str) -> None:
        """A row's lookup of its outcome, with `accepted` drafts; `fallback`: what the row goes on
        with if it was not prepared."""
        self.hits += hit
        self.misses += not hit
        _count(self.hits_by_length if hit else self.misses_by_length, accepted)
        if not hit:
            _count(self.fallbacks, fallback)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON. Rates of nothing are 0."""
        rounds, asks = max(self.rounds, 1), max(self.hits + self.misses, 1)
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_round": 1 + self.accepted / rounds if self.rounds else 0.0,
            "accepted_per_round": self.accepted / rounds,
            "acceptance": self.accepted / max(self.drafted, 1),
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / asks,
            "accepted_lengths": dict(sorted(self.accepted_lengths.items())),
            "hits_by_length": dict(sorted(self.hits_by_length.items())),
            "misses_by_length": dict(sorted(self.misses_by_length.items())),
            "fallbacks": dict(self.fallbacks),
            "rounds_by_source": dict(self.rounds_after),
            "tokens_per_round_after": {
                source: self.tokens_after[source] / count
                for source, count in self.rounds_after.items()
            },
        }


def _count(table: dict[Any, int], key: Any, amount: int = 1) -> None:
    table[key] = table.get(key, 0) + amount
