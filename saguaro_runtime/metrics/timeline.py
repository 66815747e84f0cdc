"""Spans of work of all lanes over time."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .counts import Source

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
        """Time the block as a span of this lane; one that raises leaves none."""
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
    """The latest spans, and how often and how long each name took since the beginning.

    totals: (lane, name) -> how many, and seconds in all.
    """

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self.totals: dict[tuple[str, str], tuple[int, float]] = {}

    def extend(self, spans: Iterable[Span]) -> None:
        """Take spans; beyond KEPT_SPANS the oldest go, and stay in the totals."""
        for span in spans:
            self.spans.append(span)
            key = (span.lane, span.name)
            count, seconds = self.totals.get(key, (0, 0.0))
            self.totals[key] = count + 1, seconds + span.end - span.start

    def count(self, lane: str, name: str) -> int:
        """How many spans there were."""
        return self.totals.get((lane, name), (0, 0.0))[0]

    def seconds(self, lane: str, name: str) -> float:
        """How long all of them took."""
        return self.totals.get((lane, name), (0, 0.0))[1]

    def mean_ms(self, name: str) -> float:
        """Mean length of the spans called `name`, in milliseconds; 0 where there are none."""
        found = [total for (_, span_name), total in self.totals.items() if span_name == name]
        count, seconds = sum(n for n, _ in found), sum(s for _, s in found)
        return 1e3 * seconds / count if count else 0.0


def overlap(spans: Iterable[Span], inner: str, outer: str) -> float:
    """Share of the time of `inner` spans inside `outer` spans of other lanes, in [0, 1]."""
    total = covered = 0.0
    outers: dict[str, list[Span]] = {}
    for span in spans:
        if span.name == outer:
            outers.setdefault(span.lane, []).append(span)  # one after another, as they ended
    starts = {lane: [span.start for span in found] for lane, found in outers.items()}
    for span in spans:
        if span.name != inner:
            continue
        total += span.end - span.start
        for lane, found in outers.items():
            if lane != span.lane:
                first = max(bisect.bisect_right(starts[lane], span.start) - 1, 0)
                last = bisect.bisect_left(starts[lane], span.end)
                covered += sum(
                    max(0.0, min(other.end, span.end) - max(other.start, span.start))
                    for other in found[first:last]
                )
    return covered / total if total else 0.0


class Pause(NamedTuple):
    """The time between two verifications, in seconds per round. overrun: drafting ahead that
    outlasts the first of them; host: neither side works, hand-offs and the host's own work."""

    overrun: float = 0.0
    host: float = 0.0


def pause(spans: Iterable[Span]) -> Pause:
    """The mean pause between two verifications, without those during which a prompt is prefilled.

        | verify | overrun | the draft answers | host | verify |

    Once the draft drafts ahead for the second of them it has answered: what is left is the host's.
    """
    work = sorted((span for span in spans if not span.lane.startswith("row ")), key=_start)
    verifies = [span for span in work if span.name == "verify"]
    others = deque(span for span in work if span.name not in ("verify", "target_forward"))
    rounds, overrun, host = 0, 0.0, 0.0
    open_: list[Span] = []
    for before, after in itertools.pairwise(verifies):
        while others and others[0].start < after.start:
            open_.append(others.popleft())
        open_ = [span for span in open_ if span.end > before.end]
        if any(span.name == "prefill" for span in open_):
            continue
        ahead = [span for span in open_ if span.name == "look_ahead"]
        next_ = [
            span.start for span in ahead if span.start >= before.end and span.end > after.start
        ]
        until = min(next_, default=after.start)
        last = max((span.end for span in ahead if span.start < before.end), default=before.end)
        overrun += min(last, until) - before.end
        host += after.start - before.end - _covered(open_, before.end, until)
        rounds += 1
    return Pause(overrun / rounds, host / rounds) if rounds else Pause()


def _start(span: Span) -> float:
    return span.start


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds from `start` to `end` inside any of the spans, which come in order of their start."""
    covered, at = 0.0, start
    for span in spans:
        first, last = max(span.start, at), min(span.end, end)
        if first < last:
            covered, at = covered + last - first, last
    return covered


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
