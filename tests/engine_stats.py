"""What `Engine.stats()` may say of a run, for tests of what reads it."""

from __future__ import annotations

from typing import Any

STATS: dict[str, Any] = {
    "tokens_per_round": 2.0,
    "accepted_per_round": 1.0,
    "hit_rate": 0.5,
    "overlap": 0.9,
    "t_verify_ms": 60.0,
    "t_draft_step_ms": 15.0,
    "t_redraft_step_ms": 12.0,
    "t_look_ahead_ms": 45.0,
    "t_sample_ms": 3.0,
    "t_promote_ms": 4.0,
    "t_overrun_ms": 3.0,
    "t_host_ms": 5.0,
    "prefill_s": 0.5,
    "rounds": 10,
    "rounds_by_source": {"first": 1, "asked": 9},
    "tokens": 18,
    "verifications": 10,
    "tokens_per_round_after": {"hit": 2.5, "miss": 1.5},
    "speculation": "on",
}
