"""Counts and times: what the rounds did, on which side, and how much of it overlapped."""

from __future__ import annotations

import bisect
import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Source = Literal["first", "asked", "hit", "miss", "late"]
"""Why a round had the chain it had: a request's first round, which has none; a chain drafted on
demand, where nothing is prepared; the outcome before it was prepared; or it could have been and
was not; or the draft did not answer in time, or was off, and there was none."""

KEPT_SPANS = 200_000


_COLOURS = {"hit": "good", "miss": "bad", "late": "terrible"}
"""Names that a trace viewer gives colours."""


class Span(NamedTuple):
    """`lane` did `name` from `start` to `end`, in seconds of the monotonic clock; `rows`: on so
    many rows of tokens or logits, where that is what takes the time."""

    lane: str
    name: str
    start: float
    end: float
    rows: int = 0


class Timeline:
    """Spans in the order they ended. The clock is shared by all processes of a machine."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.spans: deque[Span] = deque(maxlen=KEPT_SPANS)

    @contextlib.contextmanager
    def span(self, name: str, rows: int = 0) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.spans.append(Span(self.lane, name, start, time.monotonic(), rows))

    def rounds(self, sources: Iterable[tuple[int, Source]], start: float) -> None:
        """A round that ends now, of (row, source) each: a lane per row shows hits and misses."""
        end = time.monotonic()
        self.spans.extend(Span(f"row {row}", source, start, end) for row, source in sources)

    def drain(self) -> list[Span]:
        """The spans since the last call."""
        spans = list(self.spans)
        self.spans.clear()
        return spans


class SpanLog:
    """The latest spans, and how often and how long each name took since the beginning."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self.totals: dict[tuple[str, str], tuple[int, float]] = {}

    def extend(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.spans.append(span)
            key = (span.lane, span.name)
            count, seconds = self.totals.get(key, (0, 0.0))
            self.totals[key] = count + 1, seconds + span.end - span.start

    def mean_ms(self, name: str) -> float:
        """Mean length of the spans called `name`, in milliseconds; 0 where there are none."""
        found = [its for (_, its_name), its in self.totals.items() if its_name == name]
        count = sum(its[0] for its in found)
        return 1e3 * sum(its[1] for its in found) / count if count else 0.0


def mean_ms(spans: Iterable[Span], name: str) -> float:
    """Mean length of the spans called `name`, in milliseconds; 0 where there are none."""
    times = [span.end - span.start for span in spans if span.name == name]
    return 1e3 * sum(times) / len(times) if times else 0.0


def overlap(spans: Iterable[Span], inner: str, outer: str) -> float:
    """Share of the time of `inner` spans inside `outer` spans of other lanes, in [0, 1]."""
    total = covered = 0.0
    outers: dict[str, list[Span]] = {}
    for span in spans:
        if span.name == outer:
            outers.setdefault(span.lane, []).append(span)  # one after another, as they ended
    starts = {lane: [span.start for span in its] for lane, its in outers.items()}
    for span in spans:
        if span.name != inner:
            continue
        total += span.end - span.start
        for lane, its in outers.items():
            if lane != span.lane:
                first = max(bisect.bisect_right(starts[lane], span.start) - 1, 0)
                last = bisect.bisect_left(starts[lane], span.end)
                covered += sum(
                    max(0.0, min(other.end, span.end) - max(other.start, span.start))
                    for other in its[first:last]
                )
    return covered / total if total else 0.0


def trace_events(spans: Iterable[Span]) -> str:
    """The spans as a JSON text that chrome://tracing and Perfetto open; one row per lane."""
    spans = list(spans)
    lanes = sorted({span.lane for span in spans})
    events = [
        {
            "name": span.name,
            "ph": "X",
            "pid": 0,
            "tid": lanes.index(span.lane),
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            **({"cname": _COLOURS[span.name]} if span.name in _COLOURS else {}),
        }
        for span in spans
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": {"name": lane}}
        for index, lane in enumerate(lanes)
    ]
    return json.dumps({"traceEvents": names + events})


@dataclass
class Times:
    """When a request was added, got its row, its first token, and ended; monotonic clock."""

    added: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None

    def summary(self, tokens: int) -> dict[str, float]:
        """Seconds from its adding; up to now where something is still to come."""
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
    """How many values were at most each of `bounds`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts = list(bounds), [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += times * value


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Served:
    """The requests that have ended: how many for each reason, and how long they took."""

    reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))

    def add(self, reason: str, prompt_tokens: int, times: Times) -> None:
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
