"""Device helpers of the rules: what the judged rows say of each draft, and how many are kept."""

from __future__ import annotations

import triton
import triton.language as tl

from ..distribution.rows import (
    _INF,
    _NEG_INF,
    _at,
    _clean,
    _finite_or_zero,
    _is_within,
    _load_temperature,
    _reciprocal,
)
from .rows import _load_cutoff, _log_sum, _merge_rows, _row_offset


@triton.jit
def _is_one_hot(draft_ptr, one_hot_ptr, temperature_ptr, b):
    """1 where every draft of request b is a deterministic proposal, else 0."""
    if draft_ptr is None:
        return tl.full([], 1, tl.int32)
    else:
        one_hot = (_load_temperature(temperature_ptr + b) <= 0).to(tl.int32)
        if one_hot_ptr is not None:
            one_hot = tl.maximum(one_hot, tl.load(one_hot_ptr + b).to(tl.int32))
        return one_hot


@triton.jit
def _judge(
    part_ptr, target_ptr, row_index_ptr, bias_ptr, cutoff_ptr, cutoff_id_ptr, tokens_ptr, logq_ptr,
    one_hot, b, num_draft, temperature, vocab, num_steps, num_splits, stride_b, stride_i,
    bias_stride_b, bias_stride_i,
    PROBS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Per judged row, [BLOCK_K]: max, log-sum, log p(d), log q(d), log p(d)/q(d), q is one-hot."""
    step, num_rows = tl.arange(0, BLOCK_K), num_steps + 1
    judged = step < num_draft
    max_, log_sum = _merge_rows(
        part_ptr, b, num_draft, num_steps, num_splits, temperature, BLOCK_K, BLOCK_S
    )
    token = tl.load(tokens_ptr + b * num_steps + step, mask=judged, other=-1)
    inside = (token >= 0) & (token < vocab)
    row = _row_offset(row_index_ptr, b, step, num_rows, stride_b, stride_i, ALIGNED)
    z = tl.load(target_ptr + row + token, mask=inside, other=_NEG_INF).to(tl.float32)
    if PROBS:
        z = tl.where(z > 0, _log_sum(z), _NEG_INF)
    if bias_ptr is not None:
        row = _row_offset(None, b, step, 0, bias_stride_b, bias_stride_i, False)
        z += tl.load(bias_ptr + row + token, mask=inside, other=0.0)
    z = _clean(z)
    cutoff, cutoff_id = _load_cutoff(cutoff_ptr, cutoff_id_ptr, b, step, num_rows)
    # A NaN log-sum marks a row that defines no distribution: its draft is rejected.
    possible = _is_within(z, token, cutoff, cutoff_id) & (log_sum == log_sum)
    log_p = (z - _finite_or_zero(max_)) * _reciprocal(temperature) - log_sum
    log_p = tl.where(possible, log_p, _NEG_INF)
    point = tl.full([BLOCK_K], 0, tl.int32) + one_hot
    log_q = tl.zeros([BLOCK_K], tl.float32)
    if logq_ptr is not None:
        log_q = tl.load(logq_ptr + b * num_steps + step, mask=judged, other=0.0)
        point = tl.where(tl.abs(log_q) < _INF, point, 1)
    log_q = tl.where(point != 0, 0.0, log_q)
    return max_, log_sum, log_p, log_q, tl.where(judged, log_p - log_q, _NEG_INF), point


@triton.jit
def _block_scales(log_ratio, BLOCK_K: tl.constexpr):
    """log a_1..a_K: log a_i = min(0, log a_{i-1} + log p_i/q_i)."""
    step = tl.arange(0, BLOCK_K)
    scale, log_a = 0.0, tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCK_K):
        scale = tl.minimum(scale + _at(log_ratio, i, BLOCK_K), 0.0)
        log_a = tl.where(step == i, scale, log_a)
    return log_a


@triton.jit
def _bound_masses(
    log_a, log_p, log_q, exact, uniform, num_draft, BLOCK_K: tl.constexpr
):  # fmt: skip
    """(mass, needed): R where it decides nothing or is known, and the steps whose R must be summed.

    Of R = a - sum min(a p, q) the term of the next draft d' is known: with m = min(a p(d'), q(d')),
    max(a p(d') - q(d'), 0) <= R <= a - m, and R = a - m if q is one-hot (`exact`). Where u passes
    or fails at both ends, or a later step passes for sure, the rows need not be read.
    """
    step = tl.arange(0, BLOCK_K)
    follows = step[None, :] == step[:, None] + 1
    next_p = tl.sum(tl.where(follows, tl.exp(log_p)[None, :], 0.0), axis=1)
    next_q = tl.sum(tl.where(follows, tl.exp(log_q)[None, :], 0.0), axis=1)
    known = tl.sum(tl.where(follows, exact[None, :], 0), axis=1) != 0
    a = tl.exp(log_a)
    # h = 1 at a = 1, h = a at the last step: R = a gives both.
    known = known | (a == 1.0) | (step == num_draft - 1)
    high = tl.where((a == 1.0) | (step == num_draft - 1), a, a - tl.minimum(a * next_p, next_q))
    low = tl.maximum(a * next_p - next_q, 0.0)
    possible = (step < num_draft) & (uniform * (high + 1.0 - a) < high)
    sure = possible & (known | (uniform * (low + 1.0 - a) < low))
    return high, possible & (step > tl.max(tl.where(sure, step, -1), axis=0))


@triton.jit
def _accept_block(
    mass_ptr, log_ratio, log_p, log_q, exact, uniform, b, num_draft, num_steps, num_splits,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """k = max{i: u_i < h_i} and log a_k."""
    step, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S)[None, :]
    log_a = _block_scales(log_ratio, BLOCK_K)
    mass, needed = _bound_masses(log_a, log_p, log_q, exact, uniform, num_draft, BLOCK_K)
    if mass_ptr is not None:
        part = mass_ptr + (b * num_steps + step[:, None]) * num_splits + column
        mask = needed[:, None] & (column < num_splits)
        mass = tl.where(needed, tl.sum(tl.load(part, mask=mask, other=0.0), axis=1), mass)
    a = tl.exp(log_a)
    passes = (step < num_draft) & (uniform * (mass + 1.0 - a) < mass)
    k = tl.max(tl.where(passes, step + 1, 0), axis=0)
    return k, _at(log_a, k - 1, BLOCK_K)
