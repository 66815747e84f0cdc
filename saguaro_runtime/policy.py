"""What a row does after an outcome nobody predicted."""

from __future__ import annotations

from .config import EngineConfig, Fallback


def choose_fallback(config: EngineConfig, batch: int) -> Fallback:
    """The fallback of this round: the configured one, or by batch where it is "auto".

    Alone, a short redraft gains more than it costs. In a batch the other rows would wait for it,
    so the missed row goes on undrafted; its next outcome is one row of the draft and hardly ever
    missed.
    """
    if config.reproducible or config.method != "ssd":
        return Fallback.BATCHED_RETRY
    if config.fallback != "auto":
        return Fallback(config.fallback)
    return Fallback.IMMEDIATE_RETRY if batch == 1 else Fallback.PARTIAL_ACCEPT


def retry_length(config: EngineConfig, batch: int) -> int:
    """Tokens a missed row redrafts at once, 0..k."""
    fallback = choose_fallback(config, batch)
    if fallback is Fallback.BATCHED_RETRY:
        return config.draft_len
    if fallback is Fallback.IMMEDIATE_RETRY:
        return min(config.draft_len, max(1, round(config.k / 3)))
    return 0
