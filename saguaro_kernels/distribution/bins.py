"""Bins of a bracket of order bits, and what their counts and masses tell: see `cutoff`.

Weights exp((z - max) / T) are summed as integers, so that a sum is the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import _NEG_INF, _at, _value_of

_FIXED_POINT = tl.constexpr(float(2**40))


@triton.jit
def _weight(z, top, reciprocal):
    """exp((z - max) / T) in fixed point."""
    return (tl.exp((z - top) * reciprocal) * _FIXED_POINT + 0.5).to(tl.int64)


@triton.jit
def _weight_of(order, top, reciprocal, GRAIN: tl.constexpr):
    """Weight of an order; 0 for those below -inf's, which are no numbers."""
    z = _value_of(order, GRAIN)
    return _weight(tl.where(z == z, z, _NEG_INF), top, reciprocal)


@triton.jit
def _bin_shift(low, high, LOG_BINS: tl.constexpr):
    """The least s with (high - low) >> s < BINS."""
    span = high.to(tl.int64) - low.to(tl.int64)
    return tl.sum(((span >> (LOG_BINS + tl.arange(0, 32))) > 0).to(tl.int32), axis=0)


@triton.jit
def _bin_orders(low, high, shift, BINS: tl.constexpr):
    """The lowest and the highest order of every bin; bins past the bracket are clipped to it."""
    j = tl.arange(0, BINS).to(tl.int64)
    start = high.to(tl.int64)
    lows, highs = start - ((j + 1) << shift) + 1, start - (j << shift)
    return tl.maximum(lows, low).to(tl.int32), tl.maximum(highs, low).to(tl.int32)


@triton.jit
def _bins_of(low, high, top, reciprocal, GRAIN: tl.constexpr, LOG_BINS: tl.constexpr):
    """Lowest and highest order of every bin of a bracket, and their weights."""
    lows, highs = _bin_orders(low, high, _bin_shift(low, high, LOG_BINS), 1 << LOG_BINS)
    weights_low = _weight_of(lows, top, reciprocal, GRAIN)
    return lows, highs, weights_low, _weight_of(highs, top, reciprocal, GRAIN)


@triton.jit
def _narrow_count(hist, above, k, lows, highs, BINS: tl.constexpr):
    """The bracket (low, high) of the k-th id, its bin, how many of the bin are kept, and its size.

    Where all of a bin is kept, the bracket is the empty one just below the bin.
    """
    total = above + tl.cumsum(hist, axis=0)
    j = tl.minimum(tl.sum((total < k).to(tl.int32), axis=0), BINS - 1)
    size = _at(hist, j, BINS)
    need = k - (_at(total, j, BINS) - size)
    low, high = _at(lows, j, BINS), _at(highs, j, BINS)
    whole = need >= size
    edge = tl.where(whole, low - 1, high)
    return tl.where(whole, low - 1, low), edge, j, need, size, whole


@triton.jit
def _mass_of_k(hist, weights_low, weights_high, above, j, need, BINS: tl.constexpr):
    """Bounds of the mass of the k ids kept, of which the last `need` lie in bin j."""
    before = tl.where(tl.arange(0, BINS) < j, hist, 0).to(tl.int64)
    counts = before + tl.where(tl.arange(0, BINS) == j, need, 0)
    low, high = tl.sum(counts * weights_low, axis=0), tl.sum(counts * weights_high, axis=0)
    return above + low, above + high


@triton.jit
def _part_of(mass, p):
    """ceil(p mass), at least 1: the mass to be reached."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _narrow_mass(
    hist, weights_low, weights_high, above, inside, goal_low, goal_high, lows, highs, low, high,
    bottom, BINS: tl.constexpr,
):  # fmt: skip
    """The next bracket (low, high) of the id that reaches the goal, and what is known of it.

    Returns low, high, bottom, size, bounds of the mass above, and whether the id is in it for sure.
    Bins whose bounds do not tell whether the goal is reached stay in the bracket. Where that leaves
    it wide, only the first of them is tried: the next pass sums it exactly, and the id is there, or
    below, down to `bottom`.
    """
    count = hist.to(tl.int64)
    mass_low, mass_high = count * weights_low, count * weights_high
    to_low, to_high = tl.cumsum(mass_low, axis=0), tl.cumsum(mass_high, axis=0)
    rest_low, rest_high = tl.sum(mass_low, axis=0) - to_low, tl.sum(mass_high, axis=0) - to_high
    reached_low = above + tl.maximum(to_low, inside - rest_high)
    reached_high = above + tl.minimum(to_high, inside - rest_low)
    first = tl.minimum(tl.sum((reached_high < goal_low).to(tl.int32), axis=0), BINS - 1)
    last = tl.minimum(tl.sum((reached_low < goal_high).to(tl.int32), axis=0), BINS - 1)
    last = tl.maximum(first, last)
    j = tl.arange(0, BINS)
    size = tl.sum(tl.where((j >= first) & (j <= last), hist, 0), axis=0)
    before_low = tl.where(first > 0, _at(reached_low, first - 1, BINS), above)
    before_high = tl.where(first > 0, _at(reached_high, first - 1, BINS), above)
    tried = tl.min(tl.where((j >= first) & (hist > 0), j, last), axis=0)
    wide = (last - first > BINS // 8) & (size > 1)
    below = (above + inside < goal_low) & (bottom < low)
    here = (below == 0) & (above + inside >= goal_high)
    next_low = _at(lows, tl.where(wide, tried, last), BINS)
    return (
        tl.where(here, next_low, tl.where(below, bottom, low)),
        tl.where(here, _at(highs, first, BINS), tl.where(below, low - 1, high)),
        tl.where(here, _at(lows, last, BINS), bottom),
        size,
        before_low,
        before_high,
        here & (wide == 0),
    )
