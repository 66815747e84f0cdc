"""Decides round by round, and remembers why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..config import EngineConfig
from ..metrics import Source, Span
from ..round import Decision
from .estimates import Estimates
from .fallback import Choice, configured, decision_of, retries
from .search import MARGIN, Speeds, best_choice, cross, numbers_of
from .trials import Trials

_EVERY, _SOON, _SELDOM = 16, 4, 64
"""Rounds between two decisions: usually; while little is known; and at most, where nothing
changes."""
_PLAIN = 8
"""From this round to round _EVERY plain decoding is timed, if it has not been: its time can only be
guessed from verifications of more rows."""
_CLEAR = 0.5
"""The margin of a change before enough has been seen."""
_LEAVE, _SURE = 0.15, 128
"""The margin for ending drafting ahead in the first _SURE rounds: once it has ended, no more is
learned about it."""
_PROBE, _PROBE_MOST = 64, 1024
"""Rounds without drafting ahead after which it is tried again; doubled each time it loses."""
_KEPT = 64
"""Changes that the report remembers."""

_UNDRAFTED = Choice("ar", 0, 0, 0)


class Policy:
    """What an engine does in each of its rounds."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.estimates, self.speeds = Estimates(config.proposal != "none"), Speeds()
        self.trials = Trials(config)
        self.changes: list[dict[str, Any]] = []
        self._adapts = config.method == "ssd" and config.policy in ("adaptive", "auto")
        self._choice: Choice | None = None
        self._numbers: dict[str, Any] = {}
        self._why = "as configured"
        self._round = self._batch = 0
        self._due, self._every, self._learns_until = _SOON, _EVERY, _EVERY
        self._ahead: Choice | None = None
        """How drafting ahead was done when it ended."""
        self._probe, self._left_at = _PROBE, 0
        self._tokens, self._last_end, self._since = 0, 0.0, 0
        self._redrafts = False
        """Missed rows of this round were redrafted."""
        self._undrafted = False, False
        """Whether nothing was drafted in the last round, and in this."""

    def decide(self, batch: int, temperatures: Sequence[float] = ()) -> Decision:
        """What the next round of `batch` rows does."""
        self._round += 1
        if batch != self._batch:
            # Another batch size needs a decision of its own, at once.
            self._due = self._due if self._choice is None else self._round
            self._batch = batch
            if self._choice is None or self._choice.method == "ssd":
                self._choice = configured(self.config, batch)
        if self._adapts and self._round > self._due:
            self._due = self._round + (self._every if self._round > self._learns_until else _SOON)
            self._revise(batch)
        assert self._choice is not None
        choice, self._since = self._choice, self._since + 1
        if self._adapts and self.config.policy == "auto" and self._round <= _EVERY:
            choice = _UNDRAFTED if self._lacks_plain(batch) else self._varied(choice)
        self._redrafts = choice.retry > 0
        self._undrafted = self._undrafted[1], choice.k == 0
        decision, changed = self.trials.decide(
            decision_of(self.config, choice), temperatures, varied=self._round <= _EVERY
        )
        if changed:
            self._note(changed, self.trials.numbers(self.estimates.pace))
        return decision

    def observe(self, spans: Sequence[Span]) -> None:
        """Take the times of work that was done, once a round."""
        if not self._adapts:
            return
        if self._round > 1:  # the first round includes one-time costs
            self.estimates.observe_spans(spans)
        verified = next((span for span in spans if span.name == "verify"), None)
        if verified is None:
            return
        end, prompts = verified.end, any(span.name == "prefill" for span in spans)
        if self._undrafted == (True, True) and not prompts:
            # A pause longer than the work itself is no cost of a round: the caller was away.
            length = verified.end - verified.start
            self.estimates.observe_pause(min(verified.start - self._last_end, length))
        # A choice counts once the branches of the one before are used up.
        settled = self._since > 2 and self._round > _EVERY
        if settled and not prompts:
            assert self._choice is not None
            tokens, seconds = self._tokens / self._batch, end - self._last_end
            self.speeds.add(self._batch, self._choice, tokens, seconds / self.estimates.pace)
            self.trials.observe_round(tokens, seconds / self.estimates.pace)
        self._tokens, self._last_end = 0, end

    def observe_row(
        self, source: Source, drafted: int, accepted: int, before: tuple[int, int, bool]
    ) -> None:
        """Take a row's round, see Estimates."""
        if self._adapts:
            self._tokens += accepted + 1
            self.estimates.observe_row(source, drafted, accepted, before, not self._redrafts)
            self.trials.observe_row(source, was_drafted=before[2])

    def report(self) -> dict[str, Any]:
        """What is done now and why, the numbers behind it, and what changed before."""
        choice = self._choice or configured(self.config, 1)
        return {
            "name": self.config.policy,
            **choice._asdict(),
            **self.trials.used(),
            "why": self._why,
            "numbers": self._numbers | _readable(self.trials.numbers(self.estimates.pace)),
            "changes": list(self.changes),
        }

    def _revise(self, batch: int) -> None:
        assert self._choice is not None
        now, config, early = self._choice, self.config, self._round <= self._learns_until
        if now.method != "ssd" and self._round >= self._left_at + self._probe:
            self._probe = min(2 * self._probe, _PROBE_MOST)
            self._set(self._ahead or configured(config, batch), "drafting ahead is tried again", {})
            # Long enough to learn from, and so that what is learned counts.
            self.estimates.doubt()
            self._due, self._learns_until = self._round + _SOON, self._round + _EVERY
            return
        known = self.estimates.deployment(batch)
        if known is None:
            return
        if config.policy == "auto":
            numbers = numbers_of(known, self.estimates, config.k, config.branches)
            margin = _CLEAR if early else MARGIN
            best, why, speeds = best_choice(
                config, known, self.speeds, now, margin=margin, pace=self.estimates.pace,
                leave=_LEAVE if self._round <= _SURE else MARGIN,
            )  # fmt: skip
            if best.method != "ssd" and now.method == "ssd":
                self._left_at, self._ahead = self._round, now
            self._set(best, why, numbers | speeds)
        elif config.fallback == "auto" and not config.reproducible and not early:
            self._set(*cross(known, self.estimates, now))

    def _lacks_plain(self, batch: int) -> bool:
        """No verification of one token per request has been seen, and it is time for it."""
        seen = self.estimates.has_seen("verify", batch)
        return self._round >= _PLAIN and not seen and not self.config.reproducible

    def _varied(self, choice: Choice) -> Choice:
        """Shorter and narrower trees at first, and rows that go on after a miss: what they take
        and give tells how times and tokens vary."""
        k, branches = choice.k, max(1, choice.branches // 4)
        if not self.config.reproducible and self._round // 2 % 2:
            k = max(1, k // 2)
        going_on = 0 in retries(self.config, k) and self._round // 4 % 2
        retry = 0 if going_on else min(choice.retry, k)
        narrow = self._round % 2 == 1
        return choice._replace(k=k, branches=branches if narrow else choice.branches, retry=retry)

    def _set(self, choice: Choice, why: str, numbers: dict[str, Any]) -> None:
        self._numbers = {"round": self._round} | _readable(numbers)
        if choice == self._choice:
            if self._round > self._learns_until:
                self._every = min(2 * self._every, _SELDOM)
            return
        self._every = _EVERY
        self._choice, self._why, self._since = choice, why, 0
        self._note(why, numbers)

    def _note(self, why: str, numbers: dict[str, Any]) -> None:
        """Remember a change, and the numbers that led to it."""
        assert self._choice is not None
        did = self._choice._asdict() | self.trials.used()
        self.changes.append({"round": self._round, **_readable(numbers), **did, "why": why})
        del self.changes[:-_KEPT]


def _readable(numbers: dict[str, Any]) -> dict[str, Any]:
    """Ready for JSON: a crossover at no batch is None."""
    return {name: _plain(value) for name, value in numbers.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
