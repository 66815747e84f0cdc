"""The ranking of the outcomes and the factor C: tried in turns, the better one is used.

The ranking changes which branches are prepared, so it is judged by hits alone. C changes what is
drafted: acceptance falls and hits rise, so it is judged by tokens per second.

What is compared was measured in trials, in which both take turns: a text, a batch or a machine that
changes from one trial to the next changes both alike.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from saguaro_kernels.outcomes import NOISE_FROM_TEMPERATURE

from ..config import EngineConfig
from ..metrics import Source
from ..round import Decision

_LENGTH, _OFTEN, _SELDOM = 16, 64, 256
"""Rounds of a trial, half of them of each way; from the beginning of one to that of the next while
little is known; and later."""
_ENOUGH, _MUCH = 32, 400
"""What must have been seen of each before one is judged, and where trials become seldom."""
_MARGIN, _SIGMAS = 0.02, 2.0
"""How much better the other way must be: as a share, and in standard errors of the difference."""
_KEEP = 0.998
"""What is left of an observation after each later one: differences are small, so it is long."""
_BANDS = (NOISE_FROM_TEMPERATURE, 0.8)
"""Temperatures that part what is judged by itself."""
_BLIND = 0.5
"""C where it is on."""

Way = str | float


class Rate:
    """Gains by their costs, the older the less: hits by lookups, or tokens by seconds."""

    def __init__(self) -> None:
        self.count = self.gain = self.cost = 0.0
        self._squares = 0.0, 0.0, 0.0

    def add(self, gain: float, cost: float = 1.0) -> None:
        self.count = _KEEP * self.count + 1.0
        self.gain, self.cost = _KEEP * self.gain + gain, _KEEP * self.cost + cost
        new = gain * gain, gain * cost, cost * cost
        pairs = zip(self._squares, new, strict=True)
        self._squares = tuple(_KEEP**2 * old + one for old, one in pairs)  # type: ignore[assignment]

    @property
    def mean(self) -> float:
        return self.gain / self.cost if self.cost else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        gains, both, costs = self._squares
        spread = gains - 2 * self.mean * both + self.mean**2 * costs
        return math.sqrt(max(spread, 0.0)) / self.cost if self.cost else math.inf


class Contest:
    """Two ways of doing the same. `used` is the first until the other is seen to be better.

    block: rounds in a row of one way in a trial.
    """

    def __init__(self, usual: Way, other: Way, block: int = 1) -> None:
        self.usual, self.used, self.unused = usual, usual, other
        self.rates: dict[Way, Rate] = {usual: Rate(), other: Rate()}
        self.trying = False
        self._ways, self._block = (usual, other), block
        self._since = self._tried = 0

    def turn(self) -> Way:
        """What the next round uses."""
        if self._since == _LENGTH:
            self._judge()
        much = min(rate.count for rate in self.rates.values()) >= _MUCH
        if self._since >= (_SELDOM if much else _OFTEN):
            self._since = 0
        self._since += 1
        self.trying = self._since <= _LENGTH
        if not self.trying:
            return self.used
        # Thue and Morse: in the first rounds, which vary k, branches and redrafts, each way meets
        # as many of each, and neither is always the later one.
        self._tried += 1
        return self._ways[bin((self._tried - 1) // self._block).count("1") % 2]

    def _judge(self) -> None:
        used, unused = self.rates[self.used], self.rates[self.unused]
        if min(used.count, unused.count) < _ENOUGH:
            return
        noise = _SIGMAS * math.hypot(used.error, unused.error)
        if unused.mean - used.mean > max(noise, _MARGIN * used.mean):
            self.used, self.unused = self.unused, self.used


class _Trial(NamedTuple):
    """A round of a contest's trial, in which `way` was used."""

    contest: Contest
    way: Way

    def add(self, gain: float, cost: float = 1.0) -> None:
        self.contest.rates[self.way].add(gain, cost)


class Trials:
    """Sets the ranking and C of an engine's rounds where policy="auto" may."""

    def __init__(self, config: EngineConfig) -> None:
        free = config.policy == "auto" and config.method == "ssd" and not config.reproducible
        free = free and config.rule != "coupled"
        # A row that sits out says a round later whether it hit, of which round is not known.
        self._ranks = free and config.ranking == "auto" and config.fallback != "independent"
        # Where the ranking uses the verifier's noise C gains nothing, see docs/theory.md.
        self._scales = free and config.ranking == "probability" and config.downweight == 1
        self._rankings = [
            Contest("probability", "noise"),
            *(Contest("noise", "probability") for _ in _BANDS),
        ]
        self._factors = [*(Contest(1.0, _BLIND, 8) for _ in _BANDS), Contest(_BLIND, 1.0, 8)]
        self._used: dict[str, Any] = {"ranking": config.ranking, "downweight": config.downweight}
        self._by: dict[str, Contest] = {}
        """Who decided the last round's ranking and C."""
        self._ranked: tuple[_Trial | None, _Trial | None] = None, None
        """Of the last round and of this: a hit is found by what the round before prepared."""
        self._timed: _Trial | None = None
        self._last: tuple[Decision, int] | None = None
        self._same = 0
        """Rounds in a row that were decided alike."""

    def decide(
        self, decision: Decision, temperatures: Sequence[float], varied: bool
    ) -> tuple[Decision, str | None]:
        """The decision with ranking and C, and why one of them has changed, if it has.
        varied: the round does something else than the last one anyway, so its speed says nothing.
        """
        hot = [temperature for temperature in temperatures if temperature > 0]
        # At T = 0 both rankings are one, and C would change what is drafted for nothing.
        all_hot, changed = len(hot) == len(temperatures), None
        self._by, tried = {}, dict[str, _Trial]()
        if hot and decision.branches and self._ranks:
            self._by["ranking"] = self._rankings[bisect_right(_BANDS, fmean(hot))]
        if hot and decision.branches and self._scales and all_hot:
            self._by["downweight"] = self._factors[bisect_right(_BANDS, min(hot))]
        for name, contest in self._by.items():
            before, way = contest.used, contest.used
            if all_hot and not (varied and name == "downweight"):
                way = contest.turn()
                if contest.trying:
                    tried[name] = _Trial(contest, way)
            if contest.used != before:
                changed = _why(name, contest.used)
            if isinstance(way, str):
                # The usual ranking is the rule by temperature, request by request.
                decision = decision._replace(ranking="auto" if way == contest.usual else way)
            else:
                decision = decision._replace(downweight=way)
        self._used = {"ranking": decision.ranking, "downweight": decision.downweight}
        self._used |= {name: contest.used for name, contest in self._by.items()}
        self._ranked = self._ranked[1], tried.get("ranking")
        self._timed = tried.get("downweight")
        now = decision, len(temperatures)
        self._same, self._last = (self._same + 1 if now == self._last else 1), now
        return decision, changed

    def observe_row(self, source: Source, was_drafted: bool) -> None:
        """Take whether a row's outcome was found. was_drafted: the round that prepared it had
        drafts; without, nearly any ranking finds it."""
        trial = self._ranked[0]
        if trial and was_drafted and source in ("hit", "miss"):
            trial.add(float(source == "hit"))

    def observe_round(self, tokens: float, seconds: float) -> None:
        """Take a round: tokens per row, and seconds by the pace."""
        # The chains of a round were drafted in the one before, and found by what was before that.
        if self._timed and self._same > 2:
            self._timed.add(tokens, seconds)

    def used(self) -> dict[str, Any]:
        """The ranking and C in use, trials aside."""
        return dict(self._used)

    def numbers(self, pace: float) -> dict[str, float]:
        """What has been measured at temperatures as they are now."""
        found = {}
        for name, contest in self._by.items():
            ranking = name == "ranking"
            for way, rate in contest.rates.items():
                if rate.count:
                    label = f"hit_rate_{way}" if ranking else f"tokens_per_s_downweight_{way:g}"
                    found[label] = rate.mean if ranking else rate.mean / pace
        return found


def _why(name: str, used: Way) -> str:
    if name == "ranking":
        return f"ranking by {used} is seen to find more outcomes"
    return f"C = {used:g} is seen to be faster"
