"""The best choice by the closed forms, given what has been measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import EngineConfig
from ..planner.search import Deployment, best_sd, evaluate
from ..planner.theory import crossover_batch, expected_tokens
from .estimates import Estimates, Faded
from .fallback import Choice, retries, short

MARGIN = 0.03
"""A choice is replaced only if another is predicted to be better by this share."""
_TRUSTED = 48.0
"""Rounds after which a measured speed counts as much as the predicted one."""
_SIZES = (2, 4, 8, 12, 16, 20, 24, 32, 48, 64)


class Speeds:
    """Tokens and time of the rounds of each choice, by batch; times in units of the pace."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Choice], tuple[Faded, Faded]] = {}

    def add(self, batch: int, choice: Choice, tokens: float, seconds: float) -> None:
        """Take a round: tokens per row, and seconds by the pace."""
        seen_tokens, seen_seconds = self._seen.setdefault((batch, choice), (Faded(), Faded()))
        seen_tokens.add(tokens)
        seen_seconds.add(seconds)

    def correct(
        self, predicted: Mapping[Choice, float], known: Deployment, pace: float
    ) -> dict[Choice, float]:
        """Predictions moved towards what was measured: those of choices in use by their own
        measurements, the more the longer these are, others that draft ahead by what is usual."""
        errors, trust = {}, {}
        for (batch, choice), (tokens, seconds) in self._seen.items():
            if batch == known.batch and choice in predicted and seconds.total > 0:
                measured = tokens.total / seconds.total * known.plain_seconds / pace
                errors[choice] = math.log(measured / predicted[choice])
                trust[choice] = tokens.count / (tokens.count + _TRUSTED)
        ahead = [choice for choice in errors if choice.method == "ssd"]
        total = sum(trust[choice] for choice in ahead)
        usual = sum(trust[choice] * errors[choice] for choice in ahead) / (total + 0.5)
        corrected = {}
        for choice, speed in predicted.items():
            prior = usual if choice.method == "ssd" else 0.0
            error = prior + trust.get(choice, 0.0) * (errors.get(choice, prior) - prior)
            corrected[choice] = speed * math.exp(error)
        return corrected


def numbers_of(
    known: Deployment, estimates: Estimates, k: int, branches: int
) -> dict[str, float | int]:
    """The estimates for chains of k with so many branches, by name."""
    batch = known.batch
    predicted = evaluate(known, k, branches, 0)
    seen = estimates.hits.get((k, branches))
    tokens = estimates.mean_tokens(("hit",), expected_tokens(known.acceptance, k))
    return {
        "batch": batch,
        "acceptance": known.acceptance,
        "hit_rate": seen.mean(predicted[1]) if seen else predicted[1],
        "hit_rate_after_undrafted": known.hit_rate_after_fast(branches),
        "tokens_hit": tokens,
        "tokens_going_on": known.tokens_fast,
        "t_verify_ms": 1e3 * known.verify(k) * known.verify_seconds,
        "t_verify_one_ms": 1e3 * known.verify_seconds,
        "t_step_ms": 1e3 * known.step_seconds(batch),
        "t_round_ms": 1e3 * known.round_seconds,
        "t_ahead_ms": 1e3 * known.ahead(k, branches) * known.verify_seconds,
    }


def cross(
    known: Deployment, estimates: Estimates, now: Choice
) -> tuple[Choice, str, dict[str, Any]]:
    """K = 0 or a redraft, by the crossover batch b*."""
    numbers: dict[str, Any] = dict(numbers_of(known, estimates, now.k, now.branches))
    batch, p, redrafts = known.batch, numbers["hit_rate"], []
    for length in sorted({short(now.k), now.k}):
        crossing = crossover_batch(
            p,
            numbers["hit_rate_after_undrafted"],
            length * known.step_seconds(batch) / (known.verify(now.k) * known.verify_seconds),
            numbers["tokens_hit"],
            p * numbers["tokens_hit"] + (1 - p) * expected_tokens(known.acceptance, length),
            known.tokens_fast,
        )
        numbers[f"crossover_redraft_{length}"] = crossing
        # Within the margin what is in use stays.
        edge = batch / (1 + MARGIN) if now.retry == length else batch * (1 + MARGIN)
        if edge < crossing:
            redrafts.append((evaluate(known, now.k, now.branches, length)[0], length))
    retry = max(redrafts)[1] if redrafts else 0
    why = "a redraft beats going on up to b*" if retry else "going on beats a redraft from b*"
    return now._replace(retry=retry), why, numbers


def best_choice(
    config: EngineConfig,
    known: Deployment,
    speeds: Speeds,
    now: Choice,
    *,
    margin: float,
    leave: float,
    pace: float,
) -> tuple[Choice, str, dict[str, float]]:
    """The fastest choice by Theorem 7, or less drafting where it predicts a loss.

    `now` stays unless another one is better by `margin`, and drafting ahead unless less is better
    by `leave`.
    """
    ks = [config.k] if config.reproducible else list(range(1, config.k + 1))
    predicted = {
        Choice("ssd", k, m, retry): evaluate(known, k, m, retry)[0]
        for k in ks
        for m in _below(config.branches)
        for retry in retries(config, k)
    }
    sd, sd_k = best_sd(known, ks)
    if sd_k == 0 and config.reproducible:  # the text of a seed needs its k
        sd, sd_k = 0.0, config.k
    predicted[Choice("sd", sd_k, 0, sd_k) if sd_k else Choice("ar", 0, 0, 0)] = sd
    corrected = speeds.correct(predicted, known, pace)
    best = max(corrected, key=lambda choice: corrected[choice])
    if now.method == "ssd" and best.method != "ssd":
        ahead = [choice for choice in corrected if choice.method == "ssd"]
        most = max(ahead, key=lambda choice: corrected[choice])
        best = best if corrected[best] > corrected[most] * (1 + leave) else most
    numbers = {"predicted_vs_ar": corrected[best], "predicted_sd_vs_ar": sd}
    if now in corrected:
        numbers["predicted_before_vs_ar"] = corrected[now]
        if corrected[best] < corrected[now] * (1 + margin):
            best = now
    why = {
        "ssd": "the fastest by Theorem 7",
        "sd": "drafting ahead is predicted to lose against standard speculative decoding",
        "ar": "any drafting is predicted to lose against plain decoding",
    }[best.method]
    return best, why, numbers


def _below(branches: int) -> Iterable[int]:
    return (*(m for m in _SIZES if m < branches), branches)
