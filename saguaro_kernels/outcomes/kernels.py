"""Kernels of outcome prediction: the best of each share of each row, then the best of a request."""

from __future__ import annotations

import triton
import triton.language as tl

from .._launch import LARGE
from ..distribution.rows import _bounded, _id_of, _load_temperature
from ..rng import _gumbel_at, _gumbel_block
from .reference import LARGEST

_NOTHING = tl.constexpr(-(2**63))
_LARGE = tl.constexpr(LARGE)
_LARGEST = tl.constexpr(LARGEST)
_LOWEST = tl.constexpr(-(2**63) + 2**32)  # keys of real candidates are above this


@triton.jit
def _order_key(score, low):
    """int64 that sorts as (score, low), 0 <= low < 2^31; nothing for -inf."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | low.to(tl.int64)
    return tl.where(score == float("-inf"), _NOTHING, key)


@triton.jit
def _key_score(key):
    ordered = (key >> 32).to(tl.int32)
    score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key > _LOWEST, score, float("-inf"))


_STRIDES = ["logits_stride_b", "logits_stride_k", "bias_stride_b", "bias_stride_k"]


@triton.jit(do_not_specialize=[*_STRIDES, "drafts", "vocab", "splits"])
def _predict_outcomes_scan_kernel(
    logits_ptr,  # [B, K+1, V]
    bias_ptr,  # [B, K+1, V]
    drafted_ptr,  # [B, K] int64
    num_draft_ptr,  # [B]
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    base_ptr,  # [B] int64
    cutoff_ptr,  # [B, K+1] float32
    column_ids_ptr,  # [V] int64 | None: ids of the columns
    best_ptr,  # [B, K+1, splits, F] int64, out
    top_ptr,  # [B, K+1, splits] float32, out
    sum_ptr,  # [B, K+1, splits] float32, out
    logits_stride_b,
    logits_stride_k,
    bias_stride_b,
    bias_stride_k,
    drafts,  # K
    vocab,  # in UNITs
    splits,
    noise_from,
    COLDEST: tl.constexpr,
    RANKING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    UNIT: tl.constexpr,  # of vocab and the strides, in elements
    F: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (B * (K+1), splits): a share of one row. Writes its F best (score, id) and its lse."""
    STREAM: tl.constexpr = 3 if RANKING == 2 else 2  # COUPLED, EXTRA
    row = tl.program_id(0) % (drafts + 1)
    request = (tl.program_id(0) // (drafts + 1)).to(tl.int64)
    split = tl.program_id(1)
    num_draft = tl.minimum(tl.maximum(tl.load(num_draft_ptr + request), 0), drafts)
    if row <= num_draft:
        vocab = vocab * UNIT
        here = tl.program_id(0).to(tl.int64)
        drafted = tl.load(drafted_ptr + request * drafts + row, mask=row < num_draft, other=-1)
        temperature = _load_temperature(temperature_ptr + request)
        noisy = temperature > 0.0
        if RANKING == 3:
            noisy &= temperature >= noise_from
        scale = tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, COLDEST), 1.0)
        seed, base = tl.load(seed_ptr + request), tl.load(base_ptr + request)
        cutoff = float("-inf")
        if HAS_CUTOFF:
            cutoff = tl.load(cutoff_ptr + here)
        logits_ptr += (request * logits_stride_b + row * logits_stride_k.to(tl.int64)) * UNIT
        if HAS_BIAS:
            bias_ptr += (request * bias_stride_b + row * bias_stride_k.to(tl.int64)) * UNIT
        best = _NOTHING + tl.arange(0, F).to(
            tl.int64
        )  # distinct, so that one at a time is replaced
        top = tl.full([BLOCK_V], -_LARGEST, tl.float32)
        total = tl.zeros([BLOCK_V], tl.float32)
        tiles = tl.cdiv(vocab, BLOCK_V)
        share = tl.cdiv(tiles, splits)
        for tile in range(split * share, tl.minimum(split * share + share, tiles)):
            column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            inside = column < vocab
            ids = _id_of(column_ids_ptr, column, inside)
            z = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            z = tl.where(z < float("inf"), z, float("-inf"))  # NaN and +inf are no candidates
            score = tl.minimum(z * scale, _LARGEST)
            if RANKING != 0:  # noqa: SIM102  decided at compile time, the other at run time
                if noisy:
                    if column_ids_ptr is None:
                        score += _gumbel_block(seed, base, row, tile * BLOCK_V, STREAM, BLOCK_V)
                    else:
                        score += _gumbel_at(seed, base, row, ids, STREAM)
            allowed = (ids != drafted) & (z >= cutoff) & (z > float("-inf"))
            score = tl.where(allowed, score, float("-inf"))
            new_top = tl.maximum(top, score)
            total = total * tl.exp(top - new_top) + tl.exp(score - new_top)
            top = new_top
            key = _order_key(score, 0x7FFFFFFF - ids)
            found, worst = tl.max(key, 0), tl.min(best, 0)
            while found > worst:  # F times for the first tile, about F / t for tile t
                best = tl.where(best == worst, found, best)
                key = tl.where(key == found, _NOTHING, key)
                found, worst = tl.max(key, 0), tl.min(best, 0)
        row_top = tl.max(top, 0)
        here = here * splits + split
        tl.store(best_ptr + here * F + tl.arange(0, F), best)
        tl.store(top_ptr + here, row_top)
        tl.store(sum_ptr + here, tl.sum(total * tl.exp(top - row_top), 0))


@triton.jit(do_not_specialize=["drafts", "splits", "branches", "fan_out_stride"])
def _predict_outcomes_select_kernel(
    best_ptr,  # [B, K+1, splits, F] int64
    top_ptr,  # [B, K+1, splits] float32
    sum_ptr,  # [B, K+1, splits] float32
    num_draft_ptr,  # [B]
    fan_out_ptr,  # [B, K+1] int32
    accept_ptr,  # [B, K+1] float32
    depth_ptr,  # [B, M] int32, out
    tokens_ptr,  # [B, M] int64, out
    score_ptr,  # [B, M] float32, out
    drafts,  # K
    splits,
    branches,  # M
    fan_out_stride,
    ALLOCATION: tl.constexpr,
    HAS_ACCEPT: tl.constexpr,
    F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (B,): the M outcomes of one request, from all rows' candidates. Writes all of them."""
    request = tl.program_id(0).to(tl.int64)
    num_draft = tl.minimum(tl.maximum(tl.load(num_draft_ptr + request), 0), drafts).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    used = k <= num_draft
    row = request * (drafts + 1) + k
    split = tl.arange(0, BLOCK_S)
    at = row[:, None] * splits + split[None, :]
    known = used[:, None] & (split < splits)[None, :]
    top = tl.load(top_ptr + at, mask=known, other=-_LARGEST)
    total = tl.load(sum_ptr + at, mask=known, other=0.0)
    row_top = tl.max(top, 1)
    row_sum = tl.sum(total * tl.exp(top - row_top[:, None]), 1)
    log_weight = -(row_top + tl.log(tl.where(row_sum > 0.0, row_sum, 1.0)))
    tail = (k >= num_draft) & (k <= drafts)
    if HAS_ACCEPT:
        accept = tl.load(accept_ptr + row, mask=k <= drafts, other=0.0)
        accept = _bounded(accept, _LARGE)
        rest = tl.sum(tl.where(tail, accept, 0.0), 0)
        accept = tl.where(k == num_draft, rest, accept)
        log_weight += tl.where(
            accept > 0.0, tl.log(tl.where(accept > 0.0, accept, 1.0)), float("-inf")
        )

    candidate = tl.arange(0, BLOCK_S * F)
    keys = tl.load(
        best_ptr + row[:, None] * splits * F + candidate[None, :],
        mask=used[:, None] & (candidate < splits * F)[None, :],
        other=_NOTHING,
    )
    rank = tl.arange(0, F)[None, :]
    best = tl.full([BLOCK_K, F], _NOTHING, tl.int64)  # of each row, in order
    for place in range(0, branches):
        found = tl.max(keys, 1)[:, None]
        best = tl.where(rank == place, found, best)
        keys = tl.where(keys == found, _NOTHING, keys)
    score = _key_score(best) + log_weight[:, None]
    exists = best > _LOWEST

    if ALLOCATION == 0:
        share, left = branches // (num_draft + 1), branches % (num_draft + 1)
        count = share + (k > num_draft - left).to(tl.int32)
    elif ALLOCATION == 1:
        count = tl.load(fan_out_ptr + request * fan_out_stride + k, mask=k <= drafts, other=0)
        count = tl.minimum(tl.maximum(count, 0), branches)
        count = tl.where(k == num_draft, tl.sum(tl.where(tail, count, 0), 0), count)
    else:
        # The M-th largest weight of all, of equal ones the lowest depth; each row keeps a prefix.
        order = 0x7FFFFFFF - (k[:, None] * F + rank)
        keys = _order_key(tl.where(exists, score, float("-inf")), order)
        left = keys
        least = tl.max(tl.max(left, 1), 0)
        for _ in range(1, branches):
            left = tl.where(left == least, _NOTHING, left)
            least = tl.max(tl.max(left, 1), 0)
        count = tl.sum(((keys >= least) & (keys > _LOWEST)).to(tl.int32), 1)
    count = tl.where(used, count, 0)
    count = tl.minimum(count, tl.sum(exists.to(tl.int32), 1))
    first = tl.cumsum(count, 0) - count

    place = first[:, None] + rank
    chosen = (rank < count[:, None]) & (place < branches)
    out = request * branches + place
    tl.store(depth_ptr + out, k[:, None] + rank * 0, mask=chosen)
    tl.store(tokens_ptr + out, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=chosen)
    tl.store(score_ptr + out, score, mask=chosen)
    slot = tl.arange(0, F)
    unused = (slot >= tl.sum(count, 0)) & (slot < branches)
    out = request * branches + slot
    tl.store(depth_ptr + out, slot * 0 - 1, mask=unused)
    tl.store(tokens_ptr + out, slot.to(tl.int64) * 0 - 1, mask=unused)
    tl.store(score_ptr + out, slot * 0.0 + float("-inf"), mask=unused)
