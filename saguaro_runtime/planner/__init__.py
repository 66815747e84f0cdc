"""Plans a deployment before it is built, and explains the speed of one that runs.

`theorem7`, `ssd_vs_sd` and their relatives are the closed forms; `simulate` checks them by playing
rounds; `roofline` predicts times from parameter counts; `plan` searches K, branches and fallback.
"""

from .theory import (
    MissLaw,
    accept_lengths,
    acceptance_for,
    crossover_batch,
    expected_tokens,
    fan_out,
    fast_rate,
    hit_rate,
    sd_speed,
    ssd_bound,
    ssd_vs_sd,
    theorem7,
)

__all__ = [
    "MissLaw",
    "accept_lengths",
    "acceptance_for",
    "crossover_batch",
    "expected_tokens",
    "fan_out",
    "fast_rate",
    "hit_rate",
    "sd_speed",
    "ssd_bound",
    "ssd_vs_sd",
    "theorem7",
]
