"""What a round does: how much is drafted, and what a row does after an outcome nobody predicted.

    batch_size   fallback by batch alone: 1 retries at once, up to 32 retry together, more go on
    adaptive     fallback by the crossover b* of measured hit rates, tokens and times
    auto         also k, branches and C, every few rounds, by Theorem 7 on measured numbers; where
                 it predicts a loss, standard speculative decoding or none

A policy looks at what was committed and at the clock, so it changes no law. With reproducible=True
k and the fallback stay as they are, and with them the text of a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .config import EngineConfig, Fallback
from .estimates import Estimates, Faded
from .metrics import Source, Span
from .planner.search import Deployment, best_sd, evaluate
from .planner.theory import crossover_batch, expected_tokens
from .round import Decision

_EVERY, _SOON = 16, 4
"""Rounds between two decisions, and before the first; and before one that may be urgent."""
_CLEAR = 1.5
"""So many times faster is worth a change before enough has been seen."""
_MARGIN = 0.05
"""What is in use stays unless another choice is predicted to be so much better."""
_PROBE, _PROBE_MOST = 64, 1024
"""Rounds without drafting ahead after which it is tried again; doubled each time it loses."""
_KEPT = 64
"""Changes that the report remembers."""
_BLIND_DOWNWEIGHT = 0.5
"""C where the ranking does not see the dice and requests are hot."""


class Choice(NamedTuple):
    """What the policy has settled on. retry: tokens a missed row redrafts, 0: it goes on."""

    method: str
    k: int
    branches: int
    retry: int


def choose_fallback(config: EngineConfig, batch: int) -> Fallback:
    """The fallback that needs no measurement: the configured one, or by batch where it is "auto".

    Alone, a short redraft gains more than it costs. In a batch the other rows would wait for it,
    so the missed row goes on; undrafted, its next outcome is one row of the draft and hardly ever
    missed.
    """
    if config.reproducible or config.method != "ssd":
        return Fallback.BATCHED_RETRY
    if config.fallback != "auto":
        return Fallback(config.fallback)
    if config.policy == "batch_size" and 1 < batch <= 32:
        return Fallback.BATCHED_RETRY
    return Fallback.IMMEDIATE_RETRY if batch == 1 else Fallback.PARTIAL_ACCEPT


def retry_length(config: EngineConfig, batch: int) -> int:
    """Tokens a missed row redrafts under `choose_fallback`, 0..k."""
    fallback = choose_fallback(config, batch)
    if fallback is Fallback.PARTIAL_ACCEPT:
        return 0
    return _short(config.draft_len) if fallback is Fallback.IMMEDIATE_RETRY else config.draft_len


def decide(config: EngineConfig, batch: int) -> Decision:
    """What a round of `batch` rows does where nothing has been measured."""
    retry = retry_length(config, batch)
    return _decision(config, Choice(config.method, config.draft_len, config.fan_out, retry))


def _decision(config: EngineConfig, choice: Choice, downweight: float = 1.0) -> Decision:
    goes_on = choice.retry == 0 and choice.k > 0
    independent = config.fallback == Fallback.INDEPENDENT.value and not config.reproducible
    return Decision(
        draft_len=choice.k,
        branches=choice.branches,
        retry=choice.retry,
        proposal=config.proposal if goes_on else "none",
        sit_out=independent and choice.branches > 0,
        ranking=config.ranking,
        downweight=min(downweight, config.downweight),
        scale_f=max(1, config.branches // (config.k + 1)),
    )


def _plain(value: Any) -> Any:
    """Ready for JSON: a crossover at no batch is None."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def _short(k: int) -> int:
    return min(k, max(1, round(k / 3)))


class Policy:
    """Decides round by round and remembers why."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.estimates = Estimates()
        self.changes: list[dict[str, Any]] = []
        self._adapts = config.method == "ssd" and config.policy in ("adaptive", "auto")
        self._choice: Choice | None = None
        self._numbers: dict[str, Any] = {}
        self._why = "as configured"
        self._round = self._batch = 0
        self._due = _SOON
        self._probe, self._left_at = _PROBE, 0
        self._speeds: dict[tuple[int, Choice], tuple[Faded, Faded]] = {}
        """Tokens and seconds of rounds, by batch and choice."""
        self._tokens, self._last_end, self._since = 0, 0.0, 0

    def decide(self, batch: int, temperatures: Sequence[float] = ()) -> Decision:
        """What the next round of `batch` rows does."""
        self._round += 1
        if batch != self._batch:
            # Another batch is another question; what is known answers it at once.
            self._due = self._due if self._choice is None else self._round
            self._batch = batch
            if self._choice is None or self._choice.method == "ssd":
                self._choice = self._configured(batch)
        if self._adapts and self._round > self._due:
            self._due = self._round + (_EVERY if self._round > _EVERY else _SOON)
            self._revise(batch)
        assert self._choice is not None
        choice, self._since = self._choice, self._since + 1
        if self._adapts and self.config.policy == "auto" and self._round <= _EVERY:
            choice = self._varied(choice)
        return _decision(self.config, choice, self._downweight(temperatures))

    def observe(self, spans: Sequence[Span]) -> None:
        """Take the times of work that was done, once a round."""
        if not self._adapts:
            return
        self.estimates.observe_spans(spans)
        end = next((its.end for its in spans if its.name == "verify"), None)
        if end is None:
            return
        # A choice counts once the branches of the one before are used up.
        if (
            self._since > 2
            and self._round > _EVERY
            and not any(its.name == "prefill" for its in spans)
        ):
            assert self._choice is not None
            key = self._batch, self._choice
            tokens, seconds = self._speeds.setdefault(key, (Faded(), Faded()))
            tokens.add(self._tokens / self._batch)
            seconds.add(end - self._last_end)
        self._tokens, self._last_end = 0, end

    def observe_row(
        self, source: Source, drafted: int, accepted: int, before: tuple[int, int, bool]
    ) -> None:
        """Take a row's round, see Estimates."""
        if self._adapts:
            self._tokens += accepted + 1
            self.estimates.observe_row(source, drafted, accepted, before)

    def report(self) -> dict[str, Any]:
        """What is done now and why, the numbers behind it, and what changed before."""
        choice = self._choice or self._configured(1)
        return {
            "name": self.config.policy,
            **choice._asdict(),
            "why": self._why,
            "numbers": dict(self._numbers),
            "changes": list(self.changes),
        }

    def _configured(self, batch: int) -> Choice:
        config = self.config
        return Choice(config.method, config.draft_len, config.fan_out, retry_length(config, batch))

    def _downweight(self, temperatures: Sequence[float]) -> float:
        """Saguaro's C: off where the ranking knows the dice, which is worth more."""
        config = self.config
        blind = config.ranking == "probability" and config.rule != "coupled"
        hot = bool(temperatures) and min(temperatures) >= 0.8
        fixed = config.reproducible or config.policy != "auto" or config.downweight < 1
        return _BLIND_DOWNWEIGHT if blind and hot and not fixed else 1.0

    def _revise(self, batch: int) -> None:
        assert self._choice is not None
        now = self._choice
        if now.method != "ssd" and self._round >= self._left_at + self._probe:
            self._probe = min(2 * self._probe, _PROBE_MOST)
            self._set(self._configured(batch), "drafting ahead is tried again", {})
            self._due = self._round + _SOON
            return
        known = self.estimates.deployment(batch)
        if known is None:
            return
        if self.config.policy == "auto":
            self._plan(known, now)
        else:
            self._cross(known, now)

    def _cross(self, known: Deployment, now: Choice) -> None:
        """K = 0 or a redraft, by the crossover batch b*."""
        early = self._round <= _EVERY
        if self.config.fallback != "auto" or self.config.reproducible or early:
            return
        numbers, batch = self._measured(known, now.k, now.branches), known.batch
        p, redrafts = numbers["hit_rate"], []
        for length in sorted({_short(now.k), now.k}):
            crossing = crossover_batch(
                p,
                numbers["hit_rate_after_undrafted"],
                length * known.step_seconds(batch) / (known.verify(now.k) * known.verify_seconds),
                numbers["tokens_hit"],
                p * numbers["tokens_hit"] + (1 - p) * expected_tokens(known.acceptance, length),
            )
            numbers[f"crossover_redraft_{length}"] = crossing
            # Within the margin what is in use stays.
            edge = batch / (1 + _MARGIN) if now.retry == length else batch * (1 + _MARGIN)
            if edge < crossing:
                redrafts.append((evaluate(known, now.k, now.branches, length)[0], length))
        retry = max(redrafts)[1] if redrafts else 0
        why = "a redraft beats going on up to b*" if retry else "going on beats a redraft from b*"
        self._set(now._replace(retry=retry), why, numbers)

    def _plan(self, known: Deployment, now: Choice) -> None:
        """The choice that Theorem 7 likes best, or less drafting where it predicts a loss."""
        config = self.config
        numbers = self._measured(known, config.k, config.branches)
        ks = [config.k] if config.reproducible else list(range(1, config.k + 1))
        sizes = [m for m in (2, 4, 8, 12, 16, 20, 24, 32, 48, 64) if m < config.branches]
        speeds = {
            Choice("ssd", k, m, retry): evaluate(known, k, m, retry)[0]
            for k in ks
            for m in (*sizes, config.branches)
            for retry in self._retries(k)
        }
        sd, sd_k = best_sd(known, ks)
        if sd_k == 0 and config.reproducible:  # the text of a seed needs its k
            sd, sd_k = 0.0, config.k
        speeds[Choice("sd", sd_k, 0, sd_k) if sd_k else Choice("ar", 0, 0, 0)] = sd
        self._correct(speeds, known)
        best = max(speeds, key=lambda its: speeds[its])
        numbers |= {"predicted_vs_ar": speeds[best], "predicted_sd_vs_ar": sd}
        if now in speeds:
            numbers["predicted_before_vs_ar"] = speeds[now]
            early = self._round <= _EVERY
            if speeds[best] < speeds[now] * (_CLEAR if early else 1 + _MARGIN):
                best = now
        if best.method != "ssd" and now.method == "ssd":
            self._left_at = self._round
        why = {
            "ssd": "the fastest by Theorem 7",
            "sd": "drafting ahead is predicted to lose against standard speculative decoding",
            "ar": "any drafting is predicted to lose against plain decoding",
        }[best.method]
        self._set(best, why, numbers)

    def _correct(self, speeds: dict[Choice, float], known: Deployment) -> None:
        """Put what was measured in place of predictions, and scale the others alike."""
        measured = {}
        for (batch, choice), (tokens, seconds) in self._speeds.items():
            if batch == known.batch and choice in speeds and tokens.count >= _EVERY / 2:
                measured[choice] = tokens.total / seconds.total * known.verify_seconds
        ratios = [math.log(its / speeds[choice]) for choice, its in measured.items()]
        usual = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        for choice in speeds:
            if choice.method == "ssd":
                speeds[choice] *= usual
        speeds.update(measured)

    def _varied(self, choice: Choice) -> Choice:
        """Shorter and narrower trees at first: what they take tells how times grow."""
        k, branches = choice.k, max(1, choice.branches // 4)
        if not self.config.reproducible and self._round // 2 % 2:
            k = max(1, k // 2)
        retry = min(choice.retry, k) if choice.retry else 0
        narrow = self._round % 2 == 1
        return choice._replace(k=k, branches=branches if narrow else choice.branches, retry=retry)

    def _retries(self, k: int) -> list[int]:
        """What a missed row may redraft under the configured fallback."""
        if self.config.reproducible:
            return [k]
        fixed = {
            Fallback.IMMEDIATE_RETRY.value: [_short(k)],
            Fallback.BATCHED_RETRY.value: [k],
            Fallback.INDEPENDENT.value: [k],
            Fallback.PARTIAL_ACCEPT.value: [0],
        }
        return fixed.get(self.config.fallback, sorted({0, _short(k), k}))

    def _measured(self, known: Deployment, k: int, branches: int) -> dict[str, Any]:
        """The numbers behind a decision, by name."""
        batch, estimates = known.batch, self.estimates
        predicted = evaluate(known, k, branches, 0)
        seen = estimates.hits.get((k, branches))
        after = estimates.hits_after_undrafted.mean(1.0 - known.miss(branches), weight=8.0)
        tokens = estimates.mean_tokens(("hit",), expected_tokens(known.acceptance, k))
        return {
            "round": self._round,
            "batch": batch,
            "acceptance": known.acceptance,
            "hit_rate": seen.mean(predicted[1]) if seen else predicted[1],
            "hit_rate_after_undrafted": min(1.0, after),
            "tokens_hit": tokens,
            "t_verify_ms": 1e3 * known.verify(k) * known.verify_seconds,
            "t_verify_one_ms": 1e3 * known.verify_seconds,
            "t_step_ms": 1e3 * known.step_seconds(batch),
            "t_ahead_ms": 1e3 * known.ahead(k, branches) * known.verify_seconds,
        }

    def _set(self, choice: Choice, why: str, numbers: dict[str, Any]) -> None:
        self._numbers = numbers = {name: _plain(value) for name, value in numbers.items()}
        if choice == self._choice:
            return
        self._choice, self._why, self._since = choice, why, 0
        self.changes.append({"round": self._round, **choice._asdict(), "why": why} | numbers)
        del self.changes[:-_KEPT]
