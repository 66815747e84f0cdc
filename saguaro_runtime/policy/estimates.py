"""Running estimates of a pair of models: times by the number of rows, acceptance, hit rates.

Old observations fade, so that the estimates follow the text and the machine. They are a function of
the observations and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..metrics import Source, Span
from ..planner.search import Deployment, interpolate
from ..planner.theory import MissLaw, accept_lengths, fan_out, hit_rate

_KEEP, _KEEP_TIME = 0.995, 0.99
"""What is left of an observation after each later one, and of a time."""
_DOUBT = 0.1
"""Weight left to what was seen of past texts when drafting ahead is tried again."""
_FOLLOW = 0.05
"""How fast the pace follows single spans: much faster than the times by rows do."""
_OUTLIER = 3.0
"""A time is counted as at most so many times the usual one."""
_HOPED = 1.4
"""Tokens of a round that goes on with a proposal, before any were seen: an optimistic guess, as
otherwise it would never be tried where a redraft is about as good."""
_EXPONENTS = (0.5, 0.25, 0.75, 1.0, 1.5, 2.0)
"""Candidates for r in the miss probability F^-r; the first if branches have varied too little."""


class Faded:
    """Sum and number of observations, weighted the less the older they are."""

    def __init__(self, keep: float = _KEEP) -> None:
        self.count = self.total = 0.0
        self._keep = keep

    def add(self, value: float) -> None:
        self.count = self._keep * self.count + 1.0
        self.total = self._keep * self.total + value

    def doubt(self, share: float) -> None:
        """Scale the weight of what was seen by `share`."""
        self.count, self.total = share * self.count, share * self.total

    def mean(self, prior: float, weight: float = 2.0) -> float:
        """The mean, with `prior` counted `weight` times."""
        return (self.total + weight * prior) / (self.count + weight)


def _by_rows(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Time by rows: non-decreasing, extrapolated beyond what was measured by the last slope."""
    points: dict[int, float] = {}
    for rows, took in sorted(seconds.items()):
        points[rows] = max([took, 1e-9, *points.values()])
    inside, most = interpolate(points), max(points)
    return lambda rows: inside(rows) if rows <= most else points[most] * _growth(points, rows)


def _growth(points: Mapping[int, float], rows: int) -> float:
    """How much longer than at the most rows that were measured, by the slope before them."""
    if len(points) == 1:
        return 1.0
    before, most = sorted(points)[-2:]
    slope = math.log(points[most] / points[before]) / math.log(most / before)
    return float((rows / most) ** min(slope, 1.0))


class Estimates:
    """Running estimates of one engine. proposes: rows that go on after a miss get a proposal."""

    def __init__(self, proposes: bool = False) -> None:
        self.proposes = proposes
        self.seconds: dict[str, dict[int, Faded]] = {}
        self.pace = 1.0
        """How slow the machine is now, relative to the first measurements. Times are kept in units
        of it, so that old ones and new ones compare."""
        self.kept = Faded()
        self.hits: dict[tuple[int, int], Faded] = {}
        self.hits_after_undrafted = Faded()
        self.tokens: dict[str, Faded] = {}
        self.pauses = Faded(_KEEP_TIME)
        """Seconds between the verifications of rounds that draft nothing."""
        self.fast = Faded()
        """Tokens of rounds of rows that went on after a miss: with nothing, or with a proposal."""

    def observe_spans(self, spans: Iterable[Span]) -> None:
        """Take times of work on a known number of rows."""
        for span in spans:
            if span.rows:
                by_rows = self.seconds.setdefault(span.name, {})
                seen = by_rows.setdefault(span.rows, Faded(_KEEP_TIME))
                took = (span.end - span.start) / self.pace
                if seen.count > 3 and seen.total > 0:
                    usual = seen.total / seen.count
                    took = min(took, _OUTLIER * usual)
                    self.pace *= 1 + _FOLLOW * (took / usual - 1)
                seen.add(took)

    def observe_pause(self, seconds: float) -> None:
        """Take the time between the verifications of two rounds that drafted nothing."""
        took, seen = seconds / self.pace, self.pauses
        seen.add(min(took, _OUTLIER * seen.total / seen.count) if seen.count > 3 else took)

    def observe_row(
        self,
        source: Source,
        drafted: int,
        accepted: int,
        before: tuple[int, int, bool],
        went_on: bool,
    ) -> None:
        """Take a row's round; `before`: k and branches its outcome was prepared with, and whether
        the round before had drafts. went_on: a missed row was not redrafted."""
        if source == "miss" and went_on:
            self.fast.add(accepted + 1.0)
            if drafted:  # a proposal: it says nothing about the draft model
                drafted = accepted = 0
        for _ in range(accepted):
            self.kept.add(1.0)
        if accepted < drafted:
            self.kept.add(0.0)
        if drafted:
            self.tokens.setdefault(source, Faded()).add(accepted + 1.0)
        if source in ("hit", "miss"):
            k, branches, was_drafted = before
            hit = float(source == "hit")
            if was_drafted:
                self.hits.setdefault((k, branches), Faded()).add(hit)
            else:
                self.hits_after_undrafted.add(hit)

    def has_seen(self, name: str, rows: int) -> bool:
        """Whether such work on at most `rows` rows was seen three times."""
        found = self.seconds.get(name, {})
        return sum(faded.count for n, faded in found.items() if n <= rows) > 2

    def doubt(self) -> None:
        """Discount what was seen of texts, after a time in which nothing could be seen."""
        seen = self.kept, self.fast, self.hits_after_undrafted
        for faded in (*seen, *self.tokens.values(), *self.hits.values()):
            faded.doubt(_DOUBT)

    @property
    def acceptance(self) -> float:
        """Of each draft that was reached."""
        return self.kept.mean(0.7)

    def time(self, *names: str) -> Callable[[int], float] | None:
        """Seconds of the first of `names` that was measured, by rows; None where none was."""
        for name in names:
            if found := self.seconds.get(name):
                now = {n: self.pace * faded.total / faded.count for n, faded in found.items()}
                return _by_rows(now)
        return None

    def miss_law(self) -> MissLaw:
        """The miss law that fits the observed hit rates best."""
        seen = [(key, hits) for key, hits in self.hits.items() if hits.count >= 4]
        if not seen:
            return MissLaw(0.25, _EXPONENTS[0])
        weights = [hits.count for _, hits in seen]
        best, least = MissLaw(0.25, _EXPONENTS[0]), math.inf
        for exponent in _EXPONENTS:
            scales = [math.log(self._scale(*key, hits, exponent)) for key, hits in seen]
            mean = sum(w * x for w, x in zip(weights, scales, strict=True)) / sum(weights)
            spread = sum(w * (x - mean) ** 2 for w, x in zip(weights, scales, strict=True))
            if spread < least - 1e-9:
                best, least = MissLaw(math.exp(mean), exponent), spread
        return best

    def _scale(self, k: int, branches: int, hits: Faded, exponent: float) -> float:
        """The scale of the miss law that explains the hit rate at (k, branches)."""
        lengths = accept_lengths(self.acceptance, k)
        fans, wanted = fan_out(lengths, exponent, branches), hits.mean(0.75)
        low, high = 1e-3, 4.0
        for _ in range(16):
            scale = math.sqrt(low * high)
            found = hit_rate(lengths, fans, MissLaw(scale, exponent))
            low, high = (scale, high) if found > wanted else (low, scale)
        return math.sqrt(low * high)

    def deployment(self, batch: int) -> Deployment | None:
        """What the planner needs to know; None while a time has not been measured."""
        verify = self.time("verify")
        step = self.time("draft_step", "feed_last")
        tree, sample = self.time("tree_step"), self.time("sample")
        if verify is None or step is None or tree is None or sample is None:
            return None
        rest = self.time("predict")

        def ahead(k: int, rows: int) -> float:
            return k * (tree(rows) + sample(rows)) + step(batch) + (rest(rows) if rest else 0.0)

        miss = self.miss_law()

        def after_going_on(branches: int) -> float:
            return min(1.0, self.hits_after_undrafted.mean(1.0 - miss(branches), weight=8.0))

        return Deployment(
            acceptance=self.acceptance,
            miss=miss,
            verify_seconds=verify(batch),
            step_seconds=step,
            batch=batch,
            verify_rows=verify,
            ahead_seconds=ahead,
            abandons=False,
            tokens_fast=self.fast.mean(_HOPED if self.proposes else 1.0, weight=8.0),
            hit_rate_fast=after_going_on,
            round_seconds=self.pace * self.pauses.mean(0.0, weight=0.1),
        )

    def mean_tokens(self, sources: Sequence[str], otherwise: float) -> float:
        """Tokens per round of drafted rounds whose chain came from one of `sources`."""
        found = [self.tokens[name] for name in sources if name in self.tokens]
        count = sum(faded.count for faded in found)
        return (sum(faded.total for faded in found) + 4 * otherwise) / (count + 4)
