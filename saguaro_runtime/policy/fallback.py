"""What needs no measurement: the configured choice, and the fallback by batch."""

from __future__ import annotations

from typing import NamedTuple

from ..config import EngineConfig, Fallback
from ..round import Decision


class Choice(NamedTuple):
    """What the policy has settled on. retry: tokens a missed row redrafts, 0: it goes on."""

    method: str
    k: int
    branches: int
    retry: int


def choose_fallback(config: EngineConfig, batch: int) -> Fallback:
    """The configured fallback, or by batch where it is "auto".

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
    return _redrafted(choose_fallback(config, batch), config.draft_len)


def retries(config: EngineConfig, k: int) -> list[int]:
    """What a missed row may redraft under the configured fallback, of chains of k."""
    if config.reproducible:
        return [k]
    if config.fallback == "auto":
        return sorted({0, short(k), k})
    return [_redrafted(Fallback(config.fallback), k)]


def _redrafted(fallback: Fallback, k: int) -> int:
    """Tokens a missed row redrafts, of chains of k."""
    return {Fallback.IMMEDIATE_RETRY: short(k), Fallback.PARTIAL_ACCEPT: 0}.get(fallback, k)


def short(k: int) -> int:
    """A third of a chain, which is worth its time where a whole one is not."""
    return min(k, max(1, round(k / 3)))


def configured(config: EngineConfig, batch: int) -> Choice:
    """The choice that needs no measurement."""
    return Choice(config.method, config.draft_len, config.fan_out, retry_length(config, batch))


def decide(config: EngineConfig, batch: int) -> Decision:
    """What a round of `batch` rows does where nothing has been measured."""
    return decision_of(config, configured(config, batch))


def decision_of(config: EngineConfig, choice: Choice) -> Decision:
    """The round that a choice means."""
    goes_on = choice.retry == 0 and choice.k > 0
    independent = config.fallback == Fallback.INDEPENDENT.value and not config.reproducible
    return Decision(
        draft_len=choice.k,
        branches=choice.branches,
        retry=choice.retry,
        proposal=config.proposal if goes_on else "none",
        sit_out=independent and choice.branches > 0,
        ranking=config.ranking,
        downweight=config.downweight,
        scale_f=max(1, config.branches // (config.k + 1)),
    )
