"""What a round does: how much is drafted, and what a row does after an outcome nobody predicted."""

from __future__ import annotations

from .config import EngineConfig, Fallback
from .round import Decision


def choose_fallback(config: EngineConfig, batch: int) -> Fallback:
    """The fallback of this round: the configured one, or by batch where it is "auto".

    Alone, a short redraft gains more than it costs. In a batch the other rows would wait for it,
    so the missed row goes on; undrafted, its next outcome is one row of the draft and hardly ever
    missed.
    """
    if config.reproducible or config.method != "ssd":
        return Fallback.BATCHED_RETRY
    if config.fallback != "auto":
        return Fallback(config.fallback)
    return Fallback.IMMEDIATE_RETRY if batch == 1 else Fallback.PARTIAL_ACCEPT


def retry_length(config: EngineConfig, batch: int) -> int:
    """Tokens a missed row redrafts, 0..k."""
    fallback = choose_fallback(config, batch)
    if fallback is Fallback.PARTIAL_ACCEPT:
        return 0
    if fallback is Fallback.IMMEDIATE_RETRY:
        return min(config.draft_len, max(1, round(config.k / 3)))
    return config.draft_len


def decide(config: EngineConfig, batch: int) -> Decision:
    """What a round of `batch` rows does."""
    fallback = choose_fallback(config, batch)
    return Decision(
        draft_len=config.draft_len,
        branches=config.fan_out,
        retry=retry_length(config, batch),
        proposal=config.proposal if fallback is Fallback.PARTIAL_ACCEPT else "none",
        sit_out=fallback is Fallback.INDEPENDENT,
        ranking=config.ranking,
        downweight=config.downweight,
        scale_f=max(1, config.branches // (config.k + 1)),
    )
