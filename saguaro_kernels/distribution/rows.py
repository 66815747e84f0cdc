"""Device helpers for rows of logits: loading, boundaries, log-probabilities, ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rng import _gumbel_at
from .contract import MAX_TEMPERATURE, MIN_TEMPERATURE

_NEG_INF = tl.constexpr(float("-inf"))
_INF = tl.constexpr(float("inf"))
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_MAX_TEMPERATURE = tl.constexpr(MAX_TEMPERATURE)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_ABSENT = tl.constexpr(-2139095041 * 2**32)  # the rank key of (-inf, _LAST_ID): below every id's


@triton.jit
def _clean(z):
    """NaN and +inf become -inf."""
    return tl.where(z < _INF, z, _NEG_INF)


@triton.jit
def _load_tile(row_ptr, bias_row_ptr, ids, vocab, MASKED: tl.constexpr):
    """z = logits + bias of a tile in float32, -inf outside the row; not cleaned.

    Full tiles are loaded without a mask: only then are aligned rows read 16 bytes at a time.
    """
    if MASKED:
        z = tl.load(row_ptr + ids, mask=ids < vocab, other=_NEG_INF).to(tl.float32)
        if bias_row_ptr is not None:
            z += tl.load(bias_row_ptr + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    else:
        z = tl.load(row_ptr + ids).to(tl.float32)
        if bias_row_ptr is not None:
            z += tl.load(bias_row_ptr + ids).to(tl.float32)
    return z


@triton.jit
def _row_start(ptr, row, stride, ALIGNED: tl.constexpr):
    """Start of a row. Strides of ALIGNED rows are given in units of 16 elements."""
    offset = row.to(tl.int64) * stride
    if ALIGNED:
        offset *= 16
    return ptr + offset


@triton.jit
def _bounded(x, most):
    """x in 0..most; 0 for NaN."""
    return tl.where(x > 0, tl.minimum(x, most), 0.0)


@triton.jit
def _load_temperature(ptr):
    """The temperature that acts: 0 for what is not above 0, MAX_TEMPERATURE for inf."""
    temperature = _bounded(tl.load(ptr), _MAX_TEMPERATURE)
    return tl.where(temperature > 0, tl.maximum(temperature, _MIN_TEMPERATURE), 0.0)


@triton.jit
def _reciprocal(temperature):
    """1 / T, of the temperature that ranks: 1 for a greedy row."""
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _finite_or_zero(x):
    """An anchor to subtract: -inf - -inf would be NaN."""
    return tl.where(x > _NEG_INF, x, 0.0)


@triton.jit
def _log(x):
    """log x, -inf at 0 without asking the logarithm."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), _NEG_INF)


@triton.jit
def _is_within(z, ids, bound, bound_id):
    """True for ids that rank at or above the boundary (bound, bound_id)."""
    return (z > bound) | ((z == bound) & (ids <= bound_id))


@triton.jit
def _row_log_prob(
    z, ids, temperature, anchor, lse, cutoff, cutoff_id, scale_logit, scale_id, log_scale
):
    """log q of a tile of cleaned z (bias added), as log_prob_reference; lse is relative to anchor.

    Scalars, or tensors that broadcast. Unfiltered: cutoff = -inf, cutoff_id = -1. Nothing scaled:
    scale_logit = inf, scale_id = -1. log_scale = log C (-inf allowed).
    """
    kept = _is_within(z, ids, cutoff, cutoff_id)
    reciprocal = 1.0 / tl.maximum(temperature, _MIN_TEMPERATURE)
    log_prob = (z - anchor) * reciprocal - lse
    log_prob += tl.where(_is_within(z, ids, scale_logit, scale_id), log_scale, 0.0)
    log_prob = tl.where(temperature <= 0.0, 0.0, tl.where(z == _NEG_INF, 0.0, log_prob))
    return tl.where(kept, log_prob, _NEG_INF)


@triton.jit
def _at(values, i, SIZE: tl.constexpr):
    """values[i] of a vector in registers, 0 where i is outside."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == i, values, 0), axis=0)


# -- ranks: order-preserving integers --------------------------------------------------------------


@triton.jit
def _order_bits(z):
    """int32 in the order of float32; -0 equals 0."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LAST_ID)


@triton.jit
def _value_of_bits(order):
    return (order ^ ((order >> 31) & _LAST_ID)).to(tl.float32, bitcast=True)


@triton.jit
def _value_of(order, GRAIN: tl.constexpr):
    """The logit of order bits in units of 2^GRAIN: the bits left out are ones in negatives."""
    if GRAIN > 0:
        low = tl.where(order < 0, (1 << GRAIN) - 1, 0)
        return _value_of_bits((order << GRAIN) | low)
    else:
        return _value_of_bits(order)


@triton.jit
def _rank_key(z, ids):
    """int64, larger for a larger logit, then for a lower id; all keys of a row differ."""
    return (_order_bits(z).to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def _key_logit(key):
    return _value_of_bits((key >> 32).to(tl.int32))


@triton.jit
def _key_id(key):
    return (key & _LAST_ID).to(tl.int32) ^ _LAST_ID


@triton.jit
def _id_of(column_ids_ptr, column, mask):
    """The id of a column: its number, unless the row has ids of its own."""
    if column_ids_ptr is None:
        return column
    else:
        return tl.load(column_ids_ptr + column, mask=mask, other=0)


@triton.jit
def _noise_at(
    keys, column_ids_ptr, column, mask, temperature, NOISE: tl.constexpr, STREAM: tl.constexpr
):
    """Noise of scattered columns, 0 in greedy rows."""
    noise = column * 0.0
    if NOISE:  # noqa: SIM102  decided at compile time, the other at run time
        if temperature > 0:
            ids = _id_of(column_ids_ptr, column, mask)
            noise = _gumbel_at(keys[0], keys[1], keys[2], ids, STREAM)
    return noise
