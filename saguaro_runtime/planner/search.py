"""The search of `saguaro plan`: K, branches and fallback that are fastest by Theorem 7."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from saguaro_kernels.errors import ConfigError

from .theory import (
    MissLaw,
    accept_lengths,
    expected_tokens,
    fan_out,
    fast_rate,
    hit_rate,
    sd_speed,
)


@dataclass(frozen=True)
class Deployment:
    """What is known of a pair and its devices.

    Args:
        acceptance: probability that a draft is accepted if those before it were.
        verify_seconds: a target forward of one token per request: the unit T_V.
        step_seconds: function of rows: seconds of one drafter forward.
        verify_rows: function of rows: seconds of a target forward over so many tokens. Default:
            verify_seconds for any number.
        ahead_seconds: function of (k, rows): seconds of drafting ahead. Default: k + 1 forwards.
        abandons: at batch 1, a miss stops drafting ahead early.
        tokens_fast: tokens of a round that goes on after a miss without a redraft; more than 1 if
            there is a proposal.
        hit_rate_fast: function of branches: hit rate after such a round. Default: that of its
            single outcome row.
        round_seconds: what every round takes besides the models, in plain decoding as well.
    """

    acceptance: float
    miss: MissLaw
    verify_seconds: float
    step_seconds: Callable[[int], float]
    batch: int = 1
    drafters: int = 1
    target_devices: int = 1
    handoff_seconds: float = 0.0
    verify_rows: Callable[[int], float] | None = None
    ahead_seconds: Callable[[int, int], float] | None = None
    abandons: bool = True
    tokens_fast: float = 1.0
    hit_rate_fast: Callable[[int], float] | None = None
    round_seconds: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """Seconds of a round of plain decoding, the baseline of all speeds."""
        return self.verify_seconds + self.round_seconds

    def hit_rate_after_fast(self, branches: int) -> float:
        """P(hit) after a round that went on."""
        return self.hit_rate_fast(branches) if self.hit_rate_fast else 1.0 - self.miss(branches)

    def verify(self, k: int) -> float:
        """A verification of K drafts per request, in T_V."""
        if self.verify_rows is None:
            return 1.0
        return self.verify_rows(self.batch * (k + 1)) / self.verify_seconds

    def ahead(self, k: int, branches: int) -> float:
        """Drafting ahead, in T_V; the branches are shared among the drafters."""
        rows = -(-self.batch * branches // self.drafters)
        if self.ahead_seconds is None:
            return (k + 1) * self.step_seconds(rows) / self.verify_seconds
        return self.ahead_seconds(k, rows) / self.verify_seconds

    def __post_init__(self) -> None:
        if self.verify_seconds <= 0 or min(self.batch, self.drafters, self.target_devices) < 1:
            raise ConfigError(
                f"deployment: got verify_seconds={self.verify_seconds}, batch={self.batch}, "
                f"drafters={self.drafters}, target_devices={self.target_devices}, want all positive"
            )


@dataclass(frozen=True)
class Plan:
    """One configuration and what is predicted of it; speeds are per row, times in T_V."""

    k: int
    branches: int
    fan_out: tuple[int, ...]
    fallback: str
    redraft_tokens: int
    hit_rate: float
    draft_round: float
    speed_vs_ar: float
    speed_vs_sd: float
    sd_speed_vs_ar: float
    sd_k: int
    tokens_per_second: float
    per_device_vs_sd: float


def interpolate(seconds_by_rows: Mapping[int, float]) -> Callable[[int], float]:
    """Time by rows: log-log between the given points and beyond them.

    Below the first, a straight line through the first two, as most of a small forward is the same
    whatever its rows; but it never grows as rows fall, and n rows take n/m of m rows' time or more.
    """
    given = sorted(seconds_by_rows.items())
    points = [(math.log(rows), math.log(t)) for rows, t in given]
    fewest, least = given[0]
    slope = (given[1][1] - least) / (given[1][0] - fewest) if len(given) > 1 else 0.0

    def seconds(rows: int) -> float:
        if len(points) == 1:
            return math.exp(points[0][1])
        if rows < fewest:
            return max(least - max(slope, 0.0) * (fewest - rows), least * rows / fewest)
        x = math.log(rows)
        last = next((i for i in range(1, len(points)) if x <= points[i][0]), len(points) - 1)
        (x0, y0), (x1, y1) = points[last - 1], points[last]
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))

    return seconds


def best_sd(deployment: Deployment, ks: Sequence[int]) -> tuple[float, int]:
    """The fastest standard speculative decoding against AR, and its K (0 is AR itself)."""
    unit = deployment.verify_seconds
    step, fixed = deployment.step_seconds(deployment.batch) / unit, deployment.round_seconds / unit
    speeds = [(1.0, 0)]
    for k in ks:
        verify = deployment.verify(k) + fixed
        tokens = expected_tokens(deployment.acceptance, k)
        speeds.append((sd_speed(tokens, k * step / verify) / verify * (1.0 + fixed), k))
    return max(speeds)


def evaluate(
    deployment: Deployment, k: int, branches: int, redraft_tokens: int
) -> tuple[float, float, float, list[int]]:
    """Speed vs AR, hit rate, T_p and fan-out of one configuration.

    redraft_tokens = 0 is the fallback that goes on with K = 0 and waits for nothing.
    """
    batch, unit = deployment.batch, deployment.verify_seconds
    lengths = accept_lengths(deployment.acceptance, k)
    fans = fan_out(lengths, deployment.miss.exponent, branches)
    p = hit_rate(lengths, fans, deployment.miss)
    verify, draft_round = deployment.verify(k), deployment.ahead(k, branches)
    fixed = deployment.round_seconds / unit
    handoff = 2.0 * deployment.handoff_seconds / unit + fixed
    hit_time = max(verify, draft_round)
    tokens_hit = expected_tokens(deployment.acceptance, k)
    if redraft_tokens == 0:
        p_fast = deployment.hit_rate_after_fast(branches)
        rate = fast_rate(p, p_fast, tokens_hit, deployment.tokens_fast)
        return rate / (hit_time + handoff) * (1.0 + fixed), p, draft_round, fans
    redraft = redraft_tokens * deployment.step_seconds(batch) / unit
    tokens_miss = expected_tokens(deployment.acceptance, redraft_tokens)
    # The batch waits when any of its rows misses; those that hit need their chains to be finished.
    all_hit = p**batch
    miss_time = (verify if batch == 1 and deployment.abandons else hit_time) + redraft
    time = all_hit * hit_time + (1.0 - all_hit) * miss_time + handoff
    tokens = p * tokens_hit + (1.0 - p) * tokens_miss
    return tokens / time * (1.0 + fixed), p, draft_round, fans


def plan(
    deployment: Deployment,
    *,
    ks: Sequence[int] = tuple(range(1, 13)),
    branches: Sequence[int] = (4, 8, 12, 16, 20, 24, 32, 48, 64),
) -> Plan:
    """The fastest of all `ks` x `branches` x fallbacks (K = 0, or redraft 1 .. K tokens)."""
    sd, sd_k = best_sd(deployment, ks)
    best: Plan | None = None
    for k in ks:
        for count in branches:
            for redraft_tokens in range(k + 1):
                speed, p, draft_round, fans = evaluate(deployment, k, count, redraft_tokens)
                if best is not None and speed <= best.speed_vs_ar:
                    continue
                devices = deployment.target_devices + deployment.drafters
                best = Plan(
                    k=k,
                    branches=count,
                    fan_out=tuple(fans),
                    fallback=f"redraft {redraft_tokens}" if redraft_tokens else "K = 0, no wait",
                    redraft_tokens=redraft_tokens,
                    hit_rate=p,
                    draft_round=draft_round,
                    speed_vs_ar=speed,
                    speed_vs_sd=speed / sd,
                    sd_speed_vs_ar=sd,
                    sd_k=sd_k,
                    tokens_per_second=speed * deployment.batch / deployment.plain_seconds,
                    per_device_vs_sd=speed / sd * deployment.target_devices / devices,
                )
    if best is None:
        raise ConfigError("ks, branches: got an empty range, want at least one of each")
    return best
