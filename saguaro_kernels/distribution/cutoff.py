"""Where a filtered row is cut: the last kept (logit, id), without sorting.

A multiway search on the order of the logits. A pass over the row counts the ids of a bracket in
BINS bins and keeps the bin in which the k-th id lies: in 8 bits a pass the bracket is one value.
Top-p looks for a mass instead: the mass above the bracket and inside it are summed exactly, that
of a bin is known between its count times its lowest and its highest weight, which narrows the
bracket until it is one value. Both searches share the passes. The first one cuts the logits
around the first tile's maximum into steps of 1/4, the later ones their order bits.

GRAIN is the number of order bits that are equal in all values of the dtype (16 for bfloat16);
`order` below is in units of it.
"""
# A constexpr and a runtime condition cannot share an `if`.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from .bins import (
    _bin_shift,
    _bins_of,
    _mass_of_k,
    _narrow_count,
    _narrow_mass,
    _part_of,
    _weight,
    _weight_of,
)
from .rows import (
    _LAST_ID,
    _NEG_INF,
    _at,
    _clean,
    _finite_or_zero,
    _load_temperature,
    _load_tile,
    _log,
    _order_bits,
    _reciprocal,
    _row_start,
    _value_of,
)

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _first_tile(
    top, hist, row_ptr, bias_row_ptr, start, vocab, zenith,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, LOG_BINS: tl.constexpr,
):  # fmt: skip
    """One more tile of the first pass: the maximum, and counts in steps of 1/4 below `zenith`."""
    ids = start + tl.arange(0, BLOCK)
    z = _clean(_load_tile(row_ptr, bias_row_ptr, ids, vocab, MASKED))
    steps = tl.minimum(tl.maximum((zenith - z) * 4.0, 0.0), (1 << LOG_BINS) - 1.0)
    hist += tl.histogram(steps.to(tl.int32), 1 << LOG_BINS, mask=ids < vocab)
    return tl.maximum(top, tl.max(z, axis=0)), hist


@triton.jit
def _count_tile(
    counts, masses, row_ptr, bias_row_ptr, start, vocab, bracket_k, bracket_p, top, reciprocal,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, GRAIN: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, LOG_BINS: tl.constexpr,
):  # fmt: skip
    """One more tile of a later pass.

    counts = (bins of k, bins of p, ids above k's bracket); masses = (row, above k's bracket, above
    p's, below p's).
    """
    hist_k, hist_p, above_k = counts
    mass, mass_above_k, mass_above, mass_below = masses
    low_k, high_k, shift_k = bracket_k
    low_p, high_p, shift_p = bracket_p
    ids = start + tl.arange(0, BLOCK)
    z = _clean(_load_tile(row_ptr, bias_row_ptr, ids, vocab, MASKED))
    order = _order_bits(z) >> GRAIN
    valid = ids < vocab
    weight = tl.zeros([BLOCK], tl.int64)
    if HAS_P:
        weight = _weight(z, top, reciprocal)
        inside = valid & (order >= low_p) & (order <= high_p)
        step = (high_p - order).to(tl.uint32) >> shift_p.to(tl.uint32)
        hist_p += tl.histogram(tl.where(inside, step.to(tl.int32), 0), 1 << LOG_BINS, mask=inside)
        mass += tl.sum(weight, axis=0)
        mass_above += tl.sum(tl.where(order > high_p, weight, 0), axis=0)
        mass_below += tl.sum(tl.where(order < low_p, weight, 0), axis=0)
    if HAS_K:
        inside = valid & (order >= low_k) & (order <= high_k)
        step = (high_k - order).to(tl.uint32) >> shift_k.to(tl.uint32)
        hist_k += tl.histogram(tl.where(inside, step.to(tl.int32), 0), 1 << LOG_BINS, mask=inside)
        above = valid & (order > high_k)
        above_k += tl.sum(above.to(tl.int32), axis=0)
        if HAS_P:
            mass_above_k += tl.sum(tl.where(above, weight, 0), axis=0)
    return (hist_k, hist_p, above_k), (mass, mass_above_k, mass_above, mass_below)


@triton.jit
def _find_tie(row_ptr, bias_row_ptr, vocab, order, need, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the `need`-th id of this order; reads the row up to it."""
    start, found = 0, -1
    while (found < 0) & (start < vocab):
        ids = start + tl.arange(0, BLOCK)
        z = _clean(_load_tile(row_ptr, bias_row_ptr, ids, vocab, True))
        tie = ((_order_bits(z) >> GRAIN) == order) & (ids < vocab)
        nth = tl.cumsum(tie.to(tl.int32), axis=0)
        found = tl.max(tl.where(tie & (nth == need), ids, -1), axis=0)
        need -= tl.sum(tie.to(tl.int32), axis=0)
        start += BLOCK
    return found


@triton.jit(
    do_not_specialize=[
        "vocab", "default_k", "num_rows", "stride_b", "stride_i", "bias_stride_b", "bias_stride_i",
    ],
    do_not_specialize_on_alignment=[
        "cutoff_ptr", "cutoff_id_ptr", "row_index_ptr", "num_draft_ptr", "temperature_ptr",
        "top_k_ptr", "top_p_ptr", "min_p_ptr",
    ],
)  # fmt: skip
def _row_cutoff_kernel(
    cutoff_ptr,  # out [B, L] float32
    cutoff_id_ptr,  # out [B, L] int32 | int64
    logits_ptr,  # [B, L, V], or [N, V] with row_index
    row_index_ptr,  # [B, L] int64 | None
    num_draft_ptr,  # [B] int32 | None: rows beyond are neither read nor written
    bias_ptr,  # [B, L, V] | None
    temperature_ptr,  # [B] float32
    top_k_ptr,  # [B] int32 | None
    top_p_ptr,  # [B] float32 | None
    min_p_ptr,  # [B] float32 | None
    vocab, default_k, num_rows, stride_b, stride_i, bias_stride_b, bias_stride_i,
    HAS_K: tl.constexpr, ALIGNED: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    LOG_BINS: tl.constexpr,
):  # fmt: skip
    """Grid (B, L): one row. Writes a bound of the kept ids; (-inf, -1) where no filter applies."""
    b, i = tl.program_id(0), tl.program_id(1)
    if num_draft_ptr is not None:
        if i > tl.maximum(tl.load(num_draft_ptr + b), 0):
            return
    out = b.to(tl.int64) * num_rows + i
    if row_index_ptr is not None:
        row_ptr = _row_start(logits_ptr, tl.load(row_index_ptr + out), stride_i, ALIGNED)
    else:
        row_ptr = _row_start(_row_start(logits_ptr, b, stride_b, ALIGNED), i, stride_i, ALIGNED)
    bias_row_ptr = bias_ptr
    if bias_ptr is not None:
        bias_row_ptr = _row_start(bias_ptr, b, bias_stride_b, ALIGNED)
        bias_row_ptr = _row_start(bias_row_ptr, i, bias_stride_i, ALIGNED)
    temperature = _load_temperature(temperature_ptr + b)
    HAS_P: tl.constexpr = top_p_ptr is not None
    k, p, min_p = default_k, tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + b)
    if HAS_P:
        p = tl.load(top_p_ptr + b)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
    by_k, by_p = (k > 0) & (k < vocab), p < 1.0
    cutoff, cutoff_id = float("-inf"), -1
    if (temperature > 0) & (by_k | by_p | (min_p > 0)):
        cutoff, cutoff_id = _find_cutoff(
            row_ptr, bias_row_ptr, vocab, _reciprocal(temperature), k, p, by_k, by_p, min_p,
            temperature, HAS_K, HAS_P, GRAIN, BLOCK, LOG_BINS,
        )  # fmt: skip
    tl.store(cutoff_ptr + out, cutoff)
    tl.store(cutoff_id_ptr + out, cutoff_id)


@triton.jit
def _first_pass(
    row_ptr, bias_row_ptr, vocab, reciprocal, k, p, by_k, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    LOG_BINS: tl.constexpr,
):  # fmt: skip
    """The maximum, and the brackets of k and of p, from a histogram in steps of 1/4.

    It starts 16 above the maximum of the first tile and ends 48 below; the last bin is open.
    """
    BINS: tl.constexpr = 1 << LOG_BINS
    first_ids = tl.arange(0, BLOCK)
    near = tl.max(_clean(_load_tile(row_ptr, bias_row_ptr, first_ids, vocab, True)), axis=0)
    zenith = _finite_or_zero(near) + BINS // 16
    top, hist = float("-inf"), tl.zeros([BINS], tl.int32)
    full = vocab // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        top, hist = _first_tile(
            top, hist, row_ptr, bias_row_ptr, start, vocab, zenith, False, BLOCK, LOG_BINS
        )
    if full < vocab:
        top, hist = _first_tile(
            top, hist, row_ptr, bias_row_ptr, full, vocab, zenith, True, BLOCK, LOG_BINS
        )
    top = tl.maximum(top, _LOWEST)
    # The rounding of zenith - z may move a logit by less than `slack`.
    slack = 0.03125 + tl.abs(zenith) * 1e-6
    j = tl.arange(0, BINS)
    z_high = tl.where(j == 0, top, tl.minimum(zenith - j * 0.25 + slack, top))
    z_low = tl.where(j == BINS - 1, _NEG_INF, tl.minimum(zenith - (j + 1) * 0.25 - slack, top))
    lows, highs = _order_bits(z_low) >> GRAIN, _order_bits(z_high) >> GRAIN
    total = tl.cumsum(hist, axis=0)
    j_k = tl.minimum(tl.sum((total < k).to(tl.int32), axis=0), BINS - 1)
    # Of p: a bin is where p of the mass is reached only if it may be, and was not for sure before.
    count = tl.where(by_k, tl.maximum(tl.minimum(hist, k - (total - hist)), 0), hist)
    mass_low = count * tl.exp((z_low - top) * reciprocal)
    mass_high = count * tl.exp((z_high - top) * reciprocal)
    to_low, to_high = tl.cumsum(mass_low, axis=0), tl.cumsum(mass_high, axis=0)
    rest_low, rest_high = tl.sum(mass_low, axis=0) - to_low, tl.sum(mass_high, axis=0) - to_high
    rounding = 1e-4 * (tl.sum(mass_high, axis=0) + 1.0)
    may = (1.0 - p) * to_high + rounding >= p * rest_low
    must = (1.0 - p) * to_low >= p * rest_high + rounding
    first = tl.sum((may == 0).to(tl.int32), axis=0)
    last = tl.minimum(tl.sum((must == 0).to(tl.int32), axis=0), BINS - 1)
    last = tl.maximum(first, last)
    return (
        top, _at(lows, j_k, BINS), _at(highs, j_k, BINS), _at(lows, last, BINS),
        _at(highs, first, BINS),
    )  # fmt: skip


@triton.jit
def _later_pass(
    row_ptr, bias_row_ptr, vocab, low_k, high_k, low_p, high_p, top, reciprocal,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    LOG_BINS: tl.constexpr,
):  # fmt: skip
    """Counts and masses of _count_tile over the row, in bins of the two brackets."""
    zero, none = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    empty = tl.zeros([1 << LOG_BINS], tl.int32)
    counts, masses = (empty, empty, zero), (none, none, none, none)
    bracket_k = (low_k, high_k, _bin_shift(low_k, high_k, LOG_BINS))
    bracket_p = (low_p, high_p, _bin_shift(low_p, high_p, LOG_BINS))
    full = vocab // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        counts, masses = _count_tile(
            counts, masses, row_ptr, bias_row_ptr, start, vocab, bracket_k, bracket_p, top,
            reciprocal, HAS_K, HAS_P, GRAIN, False, BLOCK, LOG_BINS,
        )  # fmt: skip
    if full < vocab:
        counts, masses = _count_tile(
            counts, masses, row_ptr, bias_row_ptr, full, vocab, bracket_k, bracket_p, top,
            reciprocal, HAS_K, HAS_P, GRAIN, True, BLOCK, LOG_BINS,
        )  # fmt: skip
    return counts, masses


@triton.jit
def _find_cutoff(
    row_ptr, bias_row_ptr, vocab, reciprocal, k, p, by_k, by_p, min_p, temperature,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    LOG_BINS: tl.constexpr,
):  # fmt: skip
    """The last kept (logit, id) of a row under its filters."""
    BINS: tl.constexpr = 1 << LOG_BINS
    top, low_k, high_k, low_p, high_p = _first_pass(
        row_ptr, bias_row_ptr, vocab, reciprocal, k, p, by_k, GRAIN, BLOCK, LOG_BINS
    )
    # What is known of the last kept id: its order, how many of its ties are kept, how many exist.
    zero = tl.full([], 0, tl.int32)
    need_k, size_k, need_p, size_p = zero, zero, zero, zero
    done_k, done_p, bottom = by_k == 0, by_p == 0, low_p
    passes = 0
    while ((done_k & done_p) == 0) & (passes < 16):
        counts, masses = _later_pass(
            row_ptr, bias_row_ptr, vocab, low_k, high_k, low_p, high_p, top, reciprocal,
            HAS_K, HAS_P, GRAIN, BLOCK, LOG_BINS,
        )  # fmt: skip
        hist_k, hist_p, above_k = counts
        mass, mass_above_k, mass_above, mass_below = masses
        goal_low, goal_high = mass, mass
        if HAS_K:
            if by_k:
                lows, highs, weights_low, weights_high = _bins_of(
                    low_k, high_k, top, reciprocal, GRAIN, LOG_BINS
                )
                low_k, high_k, j_k, need_k, size_k, whole = _narrow_count(
                    hist_k, above_k, k, lows, highs, BINS
                )
                if HAS_P:
                    goal_low, goal_high = _mass_of_k(
                        hist_k, weights_low, weights_high, mass_above_k, j_k, need_k, BINS
                    )
                need_k = tl.where(whole, 0, need_k)
                done_k = low_k == high_k
        if HAS_P:
            if done_p == 0:
                lows, highs, weights_low, weights_high = _bins_of(
                    low_p, high_p, top, reciprocal, GRAIN, LOG_BINS
                )
                goal_low, goal_high = _part_of(goal_low, p), _part_of(goal_high, p)
                low_p, high_p, bottom, size_p, before_low, before_high, here = _narrow_mass(
                    hist_p, weights_low, weights_high, mass_above, mass - mass_above - mass_below,
                    goal_low, goal_high, lows, highs, low_p, high_p, bottom, BINS,
                )  # fmt: skip
                each = tl.maximum(_weight_of(high_p, top, reciprocal, GRAIN), 1)
                least = tl.cdiv(tl.maximum(goal_low - before_high, 1), each)
                most = tl.cdiv(tl.maximum(goal_high - before_low, 1), each)
                need_p = tl.minimum(most, size_p).to(tl.int32)
                alone = here & (size_p <= 1)
                known = here & (low_p == high_p) & (tl.minimum(least, size_p) == need_p)
                done_p = alone | known
                if alone:  # the one id of the bracket is the last one kept
                    low_p, high_p, need_p, size_p = low_p - 1, low_p - 1, 0, 0
        passes += 1

    order, need, size = low_k, need_k, size_k
    if HAS_P:
        if by_p:
            order, need, size = low_p, need_p, size_p
    cutoff, cutoff_id = float("-inf"), _LAST_ID
    if by_k | by_p:
        whole = need <= 0
        cutoff = _value_of(tl.where(whole, order + 1, order), GRAIN)
        if (whole == 0) & (need < size) & (cutoff > _NEG_INF):
            cutoff_id = _find_tie(row_ptr, bias_row_ptr, vocab, order, need, GRAIN, BLOCK)
    floor = top + temperature * tl.minimum(_log(min_p), 0.0)
    cutoff_id = tl.where(floor > cutoff, _LAST_ID, cutoff_id)
    return tl.maximum(tl.maximum(cutoff, floor), _LOWEST), cutoff_id
