"""A row's distribution: its logits, as the model wrote them, and a few scalars.

    z      = logits + bias                   invalid entries (NaN, +inf) count as -inf, see status
    kept   : z > cutoff, or z == cutoff and id <= cutoff_id
    scaled : z > scale_logit, or z == scale_logit and id <= scale_id         the F largest kept ids
    log q  = z / T - lse + [scaled] log C        for kept ids, else -inf

Filters apply in this order: temperature, top-k, top-p (smallest prefix of mass >= p), min-p
(relative to the maximum), then C. Equal logits rank by id, the lowest first, so that exactly k ids
are kept. Nothing of the vocabulary's size is ever written: whoever needs q reads the row again.

Temperature 0 is greedy: one-hot on the argmax (cutoff = max, cutoff_id = argmax, log q = 0 there);
filters do not matter, and lse is that of the unfiltered row at T = 1, which ranks the runners-up.
A row without a finite logit is one-hot on id 0, by the same formula: cutoff = -inf, cutoff_id = 0.

z / T - lse cancels at tiny temperatures (z = 30, T = 1e-5: half an ulp is 0.1). Whoever knows the
log-probability of one id near the top passes its logit as `anchor` and lse = -log q(id): z - anchor
is exact. row_stats gives (max, log_sum), a drawn token (its logit, -logq + [scaled] log C).

Source: top-p Holtzman et al. 1904.09751; min-p Nguyen et al. 2407.01082; C is Definition 14 of
"Speculative Speculative Decoding", 2603.03251.
"""

from __future__ import annotations

from .contract import MIN_TEMPERATURE, PAD, RowStats, Sampling, Status
from .rows import _clean, _is_within, _row_log_prob
from .reference import (
    clean_reference,
    cutoff_reference,
    is_within_reference,
    log_prob_reference,
    row_stats_reference,
)

__all__ = [
    "MIN_TEMPERATURE",
    "PAD",
    "RowStats",
    "Sampling",
    "Status",
    "_clean",
    "_is_within",
    "_row_log_prob",
    "clean_reference",
    "cutoff_reference",
    "is_within_reference",
    "log_prob_reference",
    "row_stats_reference",
]
