"""Theorem 7 from what engines say of themselves: `Engine.stats()` of SD and of SSD, of one run.

    raw      the theorem as published: T_V of SSD's rounds for both, and nothing but models at work
    in full  each method's own rounds, with all that they are seen to pay:
             SD   T_V + K T_D + host
             SSD  T_V + overrun + p T_promote + (1 - p) T_b + host
             and, once per text, its prompt

The overrun is by how much drafting ahead outlasts its verification, round by round: the mean of
max(1, T_p) - 1, where the theorem has the maximum of the means. The host is the time between two
verifications in which neither side works: hand-offs, commits, tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .theory import ssd_vs_sd


def _hits(stats: Mapping[str, Any], batch: int, retry: int) -> float:
    """The share of rounds in which nobody waits: all rows wait where one redrafts."""
    return float(stats["hit_rate"] ** batch) if retry else 1.0


def raw(sd: Mapping[str, Any], ssd: Mapping[str, Any], *, k: int, batch: int, retry: int) -> float:
    """SSD against SD as Theorem 7 has it. k: of SD; retry: tokens that a missed row redrafts."""
    tokens = ssd["tokens_per_round"]
    return ssd_vs_sd(
        verify_seconds=ssd["t_verify_ms"] / 1e3,
        draft_seconds=k * sd["t_draft_step_ms"] / 1e3,
        tree_round_seconds=ssd["t_look_ahead_ms"] / 1e3,
        redraft_seconds=retry * ssd["t_redraft_step_ms"] / 1e3,
        hit_rate=_hits(ssd, batch, retry),
        tokens_sd=sd["tokens_per_round"],
        tokens_hit=tokens,
        tokens_miss=tokens,
    )


def in_full(
    sd: Mapping[str, Any], ssd: Mapping[str, Any], *, k: int, batch: int, retry: int
) -> float:
    """SSD against SD from the same terms and those that the theorem leaves out."""
    p = _hits(ssd, batch, retry)
    waits = p * ssd["t_promote_ms"] + (1.0 - p) * retry * ssd["t_redraft_step_ms"]
    # A text's first round has no drafts.
    drafted = sd["rounds_by_source"].get("asked", 0) / max(sd["rounds"], 1)
    return _rate(ssd, waits + ssd["t_overrun_ms"]) / _rate(sd, drafted * k * sd["t_draft_step_ms"])


def _rate(stats: Mapping[str, Any], waits_ms: float) -> float:
    """Tokens per second of rounds that take a verification, the host's time and `waits_ms`."""
    round_s = (stats["t_verify_ms"] + stats["t_host_ms"] + waits_ms) / 1e3
    return float(stats["tokens"] / (stats["verifications"] * round_s + stats["prefill_s"]))
