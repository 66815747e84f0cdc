"""Plans a deployment before it is built, and explains the speed of one that runs.

`theorem7`, `ssd_vs_sd` and their relatives are the closed forms; `simulate` checks them by playing
rounds; `roofline` predicts times from parameter counts; `plan` searches K, branches and fallback.
"""

from .search import Deployment, Plan, plan
from .simulation import Simulation, simulate
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
    "Deployment",
    "MissLaw",
    "Plan",
    "Simulation",
    "accept_lengths",
    "acceptance_for",
    "crossover_batch",
    "expected_tokens",
    "fan_out",
    "fast_rate",
    "hit_rate",
    "plan",
    "sd_speed",
    "simulate",
    "ssd_bound",
    "ssd_vs_sd",
    "theorem7",
]
