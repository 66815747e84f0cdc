"""Device helpers of the verification kernels: tiles of rows, merged statistics, scalars of a draft.

Two tuples travel through them (`p`, `q` as in the formulas):
    p = (row pointer, offset of its bias, temperature, max, log-sum, cutoff, cutoff_id)
    q = (row pointer, offset of its bias, temperature, token, z[token], lse relative to it, cutoff,
         cutoff_id, scale_logit, scale_id, log C)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..distribution.rows import (
    _INF,
    _NEG_INF,
    _bounded,
    _clean,
    _finite_or_zero,
    _is_within,
    _load_temperature,
    _log,
    _reciprocal,
    _row_log_prob,
)
from ..rng import _gumbel_block, _log1p

_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _row_offset(row_index_ptr, b, i, num_rows, stride_b, stride_i, ALIGNED: tl.constexpr):
    """Element offset of row i (scalar or vector) of request b. ALIGNED strides count 16s."""
    if row_index_ptr is None:
        offset = b * stride_b + i * stride_i.to(tl.int64)
    else:
        row = tl.load(row_index_ptr + b * num_rows + i, mask=i < num_rows, other=0)
        offset = row * stride_i
    if ALIGNED:
        offset *= 16
    return offset


@triton.jit
def _load_num_draft(ptr, num_steps):
    """How many drafts a request has, 0..K whatever is written there."""
    return tl.minimum(tl.maximum(tl.load(ptr), 0), num_steps)


@triton.jit
def _load_cutoff(cutoff_ptr, cutoff_id_ptr, b, i, num_rows):
    """Edge of the kept ids of row i (scalar or vector); (-inf, -1) without filters."""
    if cutoff_ptr is None:
        return i * 0.0 + _NEG_INF, i * 0 - 1
    else:
        row = b * num_rows + i
        cutoff = tl.load(cutoff_ptr + row, mask=i < num_rows, other=_NEG_INF)
        return cutoff, tl.load(cutoff_id_ptr + row, mask=i < num_rows, other=-1)


@triton.jit
def _load_ids(ptr, ids, limit, MASKED: tl.constexpr):
    """ptr[ids] in float32, -inf outside 0..limit-1. Unmasked, so that full tiles load 16 bytes."""
    if MASKED:
        return tl.load(ptr + ids, mask=(ids >= 0) & (ids < limit), other=_NEG_INF).to(tl.float32)
    else:
        return tl.load(ptr + ids).to(tl.float32)


@triton.jit
def _log_sum(x):
    """log x, -inf at 0; NaN stays NaN, which marks a row that held NaN or +inf."""
    return tl.where(x == 0.0, _NEG_INF, tl.log(tl.where(x == 0.0, 1.0, x)))


@triton.jit
def _load_biased(ptr, bias_ptr, bias_row, ids, limit, PROBS: tl.constexpr, MASKED: tl.constexpr):
    """z of a tile, as written by the model or log of a probability, plus the bias."""
    z = _load_ids(ptr, ids, limit, MASKED)
    if PROBS:
        z = tl.where(z == _NEG_INF, z, _log_sum(z))
    if bias_ptr is not None:
        z += _load_ids(bias_ptr + bias_row, ids, limit, MASKED)
    return z


@triton.jit
def _as_block(scalar):
    """[1]: the interpreter turns a comparison of a float scalar into floats when it spreads it."""
    return scalar + tl.zeros([1], tl.float32)


# -- scans of one row -----------------------------------------------------------------------------


@triton.jit
def _scan_tile(
    state, p, bias_ptr, start, vocab, exclude, noise, NOISE: tl.constexpr, STREAM: tl.constexpr,
    FILTERED: tl.constexpr, PROBS: tl.constexpr, MASKED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One more tile of (max, sum exp((z - max) / T), best, argbest); best is relative to max.

    best = max of (z - max) / T + g. Without NOISE, and at temperature 0, argbest is the argmax.
    """
    old_max, old_sum, old_best, old_arg = state
    row_ptr, bias_row, temperature, _, _, cutoff, cutoff_id = p
    seed, base, offset = noise
    ids = start + tl.arange(0, BLOCK_V)
    z = _load_biased(row_ptr, bias_ptr, bias_row, ids, vocab, PROBS, MASKED)
    bad = (z < _INF) == 0
    z = _clean(z)
    if FILTERED:
        z = tl.where(_is_within(z, ids, cutoff, cutoff_id), z, _NEG_INF)
    z = tl.where(ids == exclude, _NEG_INF, z)
    tile_max, tile_arg = tl.max(z, axis=0, return_indices=True)
    new_max = tl.maximum(old_max, tile_max)
    anchor = _finite_or_zero(new_max)
    x = (z - anchor) * _reciprocal(temperature)
    old_x = (old_max - anchor) * _reciprocal(temperature)
    # A bad entry makes the sum NaN, and so the row's log-sum: that is how its status travels.
    tile_sum = tl.sum(tl.where(bad, float("nan"), tl.exp(x)), axis=0)
    tile_best = (tile_max - anchor) * _reciprocal(temperature)
    if NOISE:
        if temperature > 0:
            x += _gumbel_block(seed, base, offset, start, STREAM, BLOCK_V)
        tile_best, tile_arg = tl.max(x, axis=0, return_indices=True)
    old_best += old_x
    return (
        new_max,
        old_sum * tl.exp(old_x) + tile_sum,
        tl.maximum(tile_best, old_best),
        tl.where(tile_best > old_best, start + tile_arg, old_arg),
    )


@triton.jit
def _scan_split(
    p, bias_ptr, split, tiles, vocab, exclude, noise, NOISE: tl.constexpr, STREAM: tl.constexpr,
    FILTERED: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """_scan_tile over the tiles of one split."""
    first = split * tiles
    full = tl.maximum(tl.minimum(vocab // BLOCK_V, first + tiles), first)
    end = tl.minimum(tl.cdiv(vocab, BLOCK_V), first + tiles)
    max_, total, best, arg = float("-inf"), 0.0, float("-inf"), 0
    for tile in range(first, full):
        max_, total, best, arg = _scan_tile(
            (max_, total, best, arg), p, bias_ptr, tile * BLOCK_V, vocab, exclude, noise,
            NOISE, STREAM, FILTERED, PROBS, False, BLOCK_V,
        )  # fmt: skip
    for tile in range(full, end):
        max_, total, best, arg = _scan_tile(
            (max_, total, best, arg), p, bias_ptr, tile * BLOCK_V, vocab, exclude, noise,
            NOISE, STREAM, FILTERED, PROBS, True, BLOCK_V,
        )  # fmt: skip
    return max_, total, best, arg


@triton.jit
def _load_pair(
    p, q, bias_ptr, draft_bias_ptr, map_ptr, ids, vocab, draft_vocab, PROBS: tl.constexpr,
    DRAFT_PROBS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(log p, log q) of a tile of target ids. A draft row whose token has no logit is one-hot."""
    row_ptr, bias_row, temperature, max_, log_sum, cutoff, cutoff_id = p
    z = _clean(_load_biased(row_ptr, bias_ptr, bias_row, ids, vocab, PROBS, MASKED))
    log_p = _row_log_prob(
        z, ids, _as_block(temperature), _finite_or_zero(max_), log_sum, cutoff, cutoff_id, _INF,
        -1, 0.0,
    )  # fmt: skip
    (row_ptr, bias_row, temperature, token, anchor, lse, cutoff, cutoff_id, scale_logit, scale_id,
     log_c) = q  # fmt: skip
    if map_ptr is None:
        own = ids
        z = _load_biased(row_ptr, draft_bias_ptr, bias_row, own, draft_vocab, DRAFT_PROBS, MASKED)
    else:
        own = tl.load(map_ptr + ids, mask=ids < vocab, other=-1)
        # An id without a draft id ranks below all: -1 would stand at the edge of an unfiltered row.
        own = tl.where(own < 0, _NO_ID, own)
        z = _load_biased(row_ptr, draft_bias_ptr, bias_row, own, draft_vocab, DRAFT_PROBS, True)
    log_q = _row_log_prob(
        _clean(z), own, _as_block(temperature), _finite_or_zero(anchor), lse, cutoff, cutoff_id,
        scale_logit, scale_id, log_c,
    )  # fmt: skip
    usable = (anchor > _NEG_INF) & (anchor < _INF)
    return log_p, tl.where(usable, log_q, tl.where(ids == token, 0.0, _NEG_INF))


@triton.jit
def _scan_mass(
    p, q, bias_ptr, draft_bias_ptr, map_ptr, split, tiles, vocab, draft_vocab, log_scale,
    PROBS: tl.constexpr, DRAFT_PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """sum (a p - q)+ over one split, a = exp(log_scale)."""
    first = split * tiles
    full = tl.minimum(vocab, draft_vocab) // BLOCK_V
    full = tl.maximum(tl.minimum(full, first + tiles), first)
    end = tl.minimum(tl.cdiv(vocab, BLOCK_V), first + tiles)
    total = 0.0
    for tile in range(first, full):
        ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        log_p, log_q = _load_pair(
            p, q, bias_ptr, draft_bias_ptr, map_ptr, ids, vocab, draft_vocab, PROBS, DRAFT_PROBS,
            False,
        )  # fmt: skip
        excess = tl.exp(log_p + log_scale) - tl.exp(log_q)
        total += tl.sum(tl.where(excess > 0, excess, 0.0), axis=0)
    for tile in range(full, end):
        ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        log_p, log_q = _load_pair(
            p, q, bias_ptr, draft_bias_ptr, map_ptr, ids, vocab, draft_vocab, PROBS, DRAFT_PROBS,
            True,
        )  # fmt: skip
        excess = tl.exp(log_p + log_scale) - tl.exp(log_q)
        total += tl.sum(tl.where(excess > 0, excess, 0.0), axis=0)
    return total


@triton.jit
def _scan_residual(
    p, q, bias_ptr, draft_bias_ptr, map_ptr, split, tiles, vocab, draft_vocab, log_scale, noise,
    STREAM: tl.constexpr, PROBS: tl.constexpr, DRAFT_PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Over one split: mass, best and argbest of (a p - q)+, best and argbest of p."""
    first = split * tiles
    full = tl.minimum(vocab, draft_vocab) // BLOCK_V
    full = tl.maximum(tl.minimum(full, first + tiles), first)
    end = tl.minimum(tl.cdiv(vocab, BLOCK_V), first + tiles)
    total, left_best, left_arg, best, arg = 0.0, float("-inf"), 0, float("-inf"), 0
    for tile in range(first, full):
        total, left_best, left_arg, best, arg = _scan_residual_tile(
            (total, left_best, left_arg, best, arg), p, q, bias_ptr, draft_bias_ptr, map_ptr,
            tile * BLOCK_V, vocab, draft_vocab, log_scale, noise, STREAM, PROBS,
            DRAFT_PROBS, False, BLOCK_V,
        )  # fmt: skip
    for tile in range(full, end):
        total, left_best, left_arg, best, arg = _scan_residual_tile(
            (total, left_best, left_arg, best, arg), p, q, bias_ptr, draft_bias_ptr, map_ptr,
            tile * BLOCK_V, vocab, draft_vocab, log_scale, noise, STREAM, PROBS,
            DRAFT_PROBS, True, BLOCK_V,
        )  # fmt: skip
    return total, left_best, left_arg, best, arg


@triton.jit
def _scan_residual_tile(
    state, p, q, bias_ptr, draft_bias_ptr, map_ptr, start, vocab, draft_vocab, log_scale, noise,
    STREAM: tl.constexpr, PROBS: tl.constexpr, DRAFT_PROBS: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    total, left_best, left_arg, best, arg = state
    seed, base, offset = noise
    ids = start + tl.arange(0, BLOCK_V)
    log_p, log_q = _load_pair(
        p, q, bias_ptr, draft_bias_ptr, map_ptr, ids, vocab, draft_vocab, PROBS, DRAFT_PROBS,
        MASKED,
    )  # fmt: skip
    above = log_p + log_scale
    gap = log_q - above
    # log(1 - q/p) would round to 0 for small q/p.
    left = tl.where(gap < 0, above + _log1p(-tl.exp(tl.where(gap < 0, gap, -1.0))), _NEG_INF)
    gumbel = _gumbel_block(seed, base, offset, start, STREAM, BLOCK_V)
    tile_best, tile_arg = tl.max(left + gumbel, axis=0, return_indices=True)
    left_arg = tl.where(tile_best > left_best, start + tile_arg, left_arg)
    left_best = tl.maximum(left_best, tile_best)
    tile_best, tile_arg = tl.max(log_p + gumbel, axis=0, return_indices=True)
    arg = tl.where(tile_best > best, start + tile_arg, arg)
    return (
        total + tl.sum(tl.exp(left), axis=0),
        left_best,
        left_arg,
        tl.maximum(best, tile_best),
        arg,
    )


# -- what the judged rows say ---------------------------------------------------------------------


@triton.jit
def _merge_rows(
    part_ptr, b, num_draft, num_steps, num_splits, temperature,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """max and log-sum (relative to max) of the judged rows: [BLOCK_K] each."""
    row, column = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
    mask = (row < num_draft) & (column < num_splits)
    part = part_ptr + (b * num_steps + row) * 3 * num_splits + column
    part_max = tl.load(part, mask=mask, other=_NEG_INF)
    part_sum = tl.load(part + num_splits, mask=mask, other=_NEG_INF)
    max_ = tl.max(part_max, axis=1)
    part_sum += (part_max - _finite_or_zero(max_)[:, None]) * _reciprocal(temperature)
    return max_, _log_sum(tl.sum(tl.exp(part_sum), axis=1))


@triton.jit
def _merge_choices(
    part_ptr, part_arg_ptr, max_, b, num_draft, num_steps, num_splits, temperature,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The target's own choice in each judged row: [BLOCK_K] int32."""
    row, column = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_S)[None, :]
    mask = (row < num_draft) & (column < num_splits)
    part = part_ptr + (b * num_steps + row) * 3 * num_splits + column
    part_max = tl.load(part, mask=mask, other=_NEG_INF)
    best = tl.load(part + 2 * num_splits, mask=mask, other=_NEG_INF)
    best += (part_max - _finite_or_zero(max_)[:, None]) * _reciprocal(temperature)
    arg = tl.load(part_arg_ptr + (b * num_steps + row) * num_splits + column, mask=mask, other=0)
    return tl.sum(tl.where(column == tl.argmax(best, axis=1)[:, None], arg, 0), axis=1)


@triton.jit
def _load_draft_row(
    draft_ptr, row_index_ptr, bias_ptr, map_ptr, tokens_ptr, logq_ptr, cutoff_ptr, cutoff_id_ptr,
    scale_logit_ptr, scale_id_ptr, downweight_ptr, temperature_ptr, b, i, num_steps, vocab,
    draft_vocab, stride_b, stride_i, bias_stride_b, bias_stride_i, PROBS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The tuple q of draft row i of request b."""
    at = b * num_steps + i
    token = tl.load(tokens_ptr + at)
    own = token
    if map_ptr is not None:
        own = tl.load(map_ptr + token, mask=(token >= 0) & (token < vocab), other=-1).to(tl.int64)
    row_ptr = draft_ptr + _row_offset(row_index_ptr, b, i, num_steps, stride_b, stride_i, ALIGNED)
    bias_row = _row_offset(None, b, i, 0, bias_stride_b, bias_stride_i, False)
    inside = (own >= 0) & (own < draft_vocab)
    anchor = tl.load(row_ptr + own, mask=inside, other=_NEG_INF).to(tl.float32)
    if PROBS:
        anchor = tl.where(anchor > 0, _log_sum(anchor), _NEG_INF)
    if bias_ptr is not None:
        anchor += tl.load(bias_ptr + bias_row + own, mask=inside, other=0.0)
    lse = -tl.load(logq_ptr + at)
    cutoff, cutoff_id = float("-inf"), token * 0 - 1
    if cutoff_ptr is not None:
        cutoff, cutoff_id = tl.load(cutoff_ptr + at), tl.load(cutoff_id_ptr + at)
    scale_logit, scale_id, log_c = float("inf"), token * 0 - 1, 0.0
    if downweight_ptr is not None:
        scale_logit, scale_id = tl.load(scale_logit_ptr + at), tl.load(scale_id_ptr + at)
        log_c = _log(_bounded(tl.load(downweight_ptr + b), 1.0))
        # lse counts from a scaled token, log q(d) already holds its log C.
        lse += tl.where(_is_within(anchor, own, scale_logit, scale_id), log_c, 0.0)
    return (
        row_ptr, bias_row, _load_temperature(temperature_ptr + b), token, anchor, lse, cutoff,
        cutoff_id, scale_logit, scale_id, log_c,
    )  # fmt: skip
