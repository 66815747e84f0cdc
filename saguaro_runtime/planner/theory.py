"""Closed forms: tokens per round, hit rate, fan-out, the speed of SD and SSD, the crossover b*.

Times are in units of T_V, one target forward, unless a name says seconds. Tokens per round count
the extra token, so they lie in 1 .. K + 1.

    SD  vs AR = E / (1 + T_D)                                            arXiv 2211.17192
    SSD vs AR = [p*E_hit + (1-p)*E_miss] / [p*max(1, T_p) + (1-p)*(1 + T_b)]
                                                                         arXiv 2603.03251, Theorem 7
    F_k ~ P(k)^(1 / (1 + r))  for a miss probability that falls as F^-r  the same, Theorem 12
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro_kernels.errors import ConfigError


def _probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: got {value}, want a probability in 0 .. 1")


def _time(name: str, value: float) -> None:
    if not (value >= 0.0 and math.isfinite(value)):
        raise ConfigError(f"{name}: got {value}, want a finite time >= 0")


def accept_lengths(acceptance: float, k: int) -> list[float]:
    """P(j drafts accepted), j = 0 .. k, when each is accepted independently with `acceptance`."""
    _probability("acceptance", acceptance)
    return [acceptance**j * (1.0 - acceptance) for j in range(k)] + [acceptance**k]


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens per round, (1 - a^(k+1)) / (1 - a): the accepted drafts and the extra token."""
    _probability("acceptance", acceptance)
    return sum(acceptance**j for j in range(k + 1))


def acceptance_for(tokens: float, k: int) -> float:
    """The per-token acceptance at which `expected_tokens(a, k)` is `tokens` (bisection)."""
    if not 1.0 <= tokens <= k + 1:
        raise ConfigError(f"tokens: got {tokens}, want 1 .. {k + 1} for k = {k}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tokens else (low, middle)
    return high


@dataclass(frozen=True)
class MissLaw:
    """P(the extra token is not among F candidates) = min(1, scale * F^-exponent)."""

    scale: float
    exponent: float

    def __call__(self, fan_out: int) -> float:
        """Miss probability with `fan_out` candidates; 1 with none."""
        return min(1.0, self.scale * fan_out**-self.exponent) if fan_out > 0 else 1.0

    @classmethod
    def fit(cls, fan_outs: Sequence[int], miss_rates: Sequence[float]) -> MissLaw:
        """Least squares in log-log; needs two distinct fan-outs and positive miss rates."""
        pairs = [
            (math.log(f), math.log(m)) for f, m in zip(fan_outs, miss_rates, strict=True) if m > 0
        ]
        if len({x for x, _ in pairs}) < 2:
            raise ConfigError(f"fan_outs: got {list(fan_outs)}, want two with a positive miss rate")
        x_mean = sum(x for x, _ in pairs) / len(pairs)
        y_mean = sum(y for _, y in pairs) / len(pairs)
        slope = sum((x - x_mean) * (y - y_mean) for x, y in pairs) / sum(
            (x - x_mean) ** 2 for x, _ in pairs
        )
        return cls(scale=math.exp(y_mean - slope * x_mean), exponent=-slope)


def hit_rate(lengths: Sequence[float], fan_out: Sequence[int], miss: MissLaw) -> float:
    """P(the outcome was prepared) = sum over k of P(k) * (1 - miss(F_k))."""
    return sum(p * (1.0 - miss(f)) for p, f in zip(lengths, fan_out, strict=True))


def fan_out(lengths: Sequence[float], exponent: float, branches: int) -> list[int]:
    """Theorem 12: branches in proportion to P(k)^(1/(1+r)), rounded so that they sum to `branches`.

    Raises:
        ConfigError: `exponent` < 0 or `branches` < 1.
    """
    if exponent < 0 or branches < 1:
        raise ConfigError(
            f"exponent, branches: got {exponent}, {branches}, want exponent >= 0 and branches >= 1"
        )
    weights = [p ** (1.0 / (1.0 + exponent)) for p in lengths]
    shares = [branches * w / sum(weights) for w in weights]
    counts = [math.floor(share) for share in shares]
    # Largest remainder; of equal ones the shorter accept length first.
    order = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in order[: branches - sum(counts)]:
        counts[k] += 1
    return counts


def sd_speed(tokens: float, draft: float) -> float:
    """Standard speculative decoding against AR: tokens / (1 + T_D)."""
    _time("draft", draft)
    return tokens / (1.0 + draft)


def theorem7(
    hit_rate: float,
    tokens_hit: float,
    tokens_miss: float,
    draft_round: float,
    redraft: float,
    handoff: float = 0.0,
) -> float:
    """Speed of SSD against AR, where one AR token takes one T_V.

        [p*E_hit + (1-p)*E_miss] / [p*max(1, T_p) + (1-p)*(1 + T_b)]

    Args:
        hit_rate: p, the share of rounds whose chain was prepared.
        tokens_hit, tokens_miss: tokens per round of a prepared chain, and of a fallback chain.
        draft_round: T_p, one pre-drafting round of all branches, in T_V.
        redraft: T_b, what a miss waits for its fallback, in T_V; 0 when it goes on at once.
        handoff: what every round adds, in T_V (transfers; 0 in the paper).
    Source:
        arXiv 2603.03251, Theorem 7.
    """
    _probability("hit_rate", hit_rate)
    for name, value in (
        ("draft_round", draft_round),
        ("redraft", redraft),
        ("handoff", handoff),
    ):
        _time(name, value)
    tokens = hit_rate * tokens_hit + (1.0 - hit_rate) * tokens_miss
    time = hit_rate * max(1.0, draft_round) + (1.0 - hit_rate) * (1.0 + redraft)
    return tokens / (time + handoff)


def ssd_vs_sd(
    *,
    verify_seconds: float,
    draft_seconds: float,
    tree_round_seconds: float,
    redraft_seconds: float,
    hit_rate: float,
    tokens_sd: float,
    tokens_hit: float,
    tokens_miss: float,
) -> float:
    """Predicted throughput of SSD over SD from times and tokens measured in one run.

    An SD round costs T_V + T_draft. An SSD round costs max(T_V, T_tree_round) after a hit and
    T_V + T_redraft after a miss, each with its own tokens per round.
    """
    if verify_seconds <= 0:
        raise ConfigError(f"verify_seconds: got {verify_seconds}, want > 0")
    ssd = theorem7(
        hit_rate,
        tokens_hit,
        tokens_miss,
        tree_round_seconds / verify_seconds,
        redraft_seconds / verify_seconds,
    )
    return ssd / sd_speed(tokens_sd, draft_seconds / verify_seconds)


def ssd_bound(draft: float) -> float:
    """What SSD can gain on SD at most: 1 + T_D, reached when every round hits and T_p <= T_V."""
    _time("draft", draft)
    return 1.0 + draft


def fast_rate(
    hit_rate: float, hit_rate_after_fast: float, tokens_hit: float, tokens_fast: float
) -> float:
    """Tokens per round of a row that goes on with K = 0 at a miss, so that nobody waits.

        R_f = (p_F*E_h + (1-p)*E_f) / (1 - p + p_F)

    A two-state chain: after a chain round the next hits with p, after a K = 0 round with p_F.
    """
    _probability("hit_rate", hit_rate)
    _probability("hit_rate_after_fast", hit_rate_after_fast)
    weight = 1.0 - hit_rate + hit_rate_after_fast
    if weight == 0.0:  # p = 1 and p_F = 0: it never misses
        return tokens_hit
    return (hit_rate_after_fast * tokens_hit + (1.0 - hit_rate) * tokens_fast) / weight


def crossover_batch(
    hit_rate: float,
    hit_rate_after_fast: float,
    redraft: float,
    tokens_hit: float,
    tokens_redraft: float,
    tokens_fast: float = 1.0,
) -> float:
    """The batch b* from which K = 0 on a miss beats letting the batch wait for a redraft.

        1 - p^b* = (E_n / R_f - 1) / x,    x = T_b

    tokens_redraft: E_n, tokens per round of the policy that waits, after hits and misses alike.

    Returns:
        inf: redraft at any batch. <= 1: K = 0 always. Never negative.
    """
    rate = fast_rate(hit_rate, hit_rate_after_fast, tokens_hit, tokens_fast)
    gain = tokens_redraft / rate - 1.0
    if redraft == 0.0:
        return math.inf if gain > 0 else 0.0
    share = gain / redraft
    if share >= 1.0 or (hit_rate == 1.0 and share > 0.0):
        return math.inf
    if share <= 0.0 or hit_rate == 0.0:
        return 0.0
    return math.log(1.0 - share) / math.log(hit_rate)
