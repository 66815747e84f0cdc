"""One pass over rows: maximum, normaliser, the best id under noise, and the largest ids.

Launch 1 splits each row over programs. A program keeps its LIST largest ids apart, by rank key, and
describes the rest by (max, sum exp((z - max) / T), best id of z / T + g): what is scaled by C is a
prefix of the ranking, known only at the end; all of it is listed, or in a group of its own where it
is too large. An id that falls off the list joins the rest. Launch 2 merges a row's partials, in
their order.

Both `row_stats` (no noise, no list) and `saguaro_sample` are these two launches.
"""
# A constexpr and a runtime condition cannot share an `if`.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from ..rng import _gumbel_at, _gumbel_block
from .contract import PAD, Status
from .rows import (
    _ABSENT,
    _INF,
    _LAST_ID,
    _NEG_INF,
    _at,
    _bounded,
    _clean,
    _finite_or_zero,
    _id_of,
    _is_within,
    _key_id,
    _key_logit,
    _load_temperature,
    _load_tile,
    _log,
    _noise_at,
    _rank_key,
    _reciprocal,
    _row_start,
)

_PAD = tl.constexpr(PAD)
_NAN = tl.constexpr(int(Status.NAN))
_EMPTY = tl.constexpr(int(Status.EMPTY))
_LARGEST_KEY = tl.constexpr(2**63 - 1)


@triton.jit
def _accumulate(group, z, ids, noise, reciprocal):
    """Add ids to a group (max, sum, best, best id); best is relative to max, as the sum is."""
    old_max, old_sum, old_best, old_id = group
    new_max = tl.maximum(old_max, tl.max(z, axis=0))
    anchor = _finite_or_zero(new_max)
    x = (z - anchor) * reciprocal
    shift = (old_max - anchor) * reciprocal
    new_sum = old_sum * tl.exp(shift) + tl.sum(tl.exp(x), axis=0)
    score = x + noise
    best = tl.max(score, axis=0)
    best_id = tl.min(tl.where(score == best, ids, _LAST_ID), axis=0)
    old_best += shift
    return new_max, new_sum, tl.maximum(old_best, best), tl.where(best > old_best, best_id, old_id)


@triton.jit
def _scan_tile(
    groups, listed, lowest, bad, row_ptr, bias_row_ptr, column_ids_ptr, temperature, start, vocab,
    cutoff, scale, keys, LIST: tl.constexpr, FILTERED: tl.constexpr, SCALED: tl.constexpr,
    NOISE: tl.constexpr, STREAM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One more tile: groups (rest, scaled), listed keys, lowest key (kept, scaled), bad ids."""
    rest, scaled_group = groups
    seed, base, offset = keys
    reciprocal = _reciprocal(temperature)
    ids = start + tl.arange(0, BLOCK)
    z = _load_tile(row_ptr, bias_row_ptr, ids, vocab, MASKED)
    bad += tl.sum((z < _INF).to(tl.int32) ^ 1, axis=0)
    z = _clean(z)
    noise = tl.zeros([BLOCK], tl.float32)
    if NOISE:
        if temperature > 0:
            if column_ids_ptr is None:
                noise = _gumbel_block(seed, base, offset, start, STREAM, BLOCK)
            else:
                own = _id_of(column_ids_ptr, ids, ids < vocab)
                noise = _gumbel_at(seed, base, offset, own, STREAM)
    if FILTERED:
        z = tl.where(_is_within(z, ids, cutoff[0], cutoff[1]), z, _NEG_INF)
    rank = _rank_key(z, ids)
    lowest, lowest_scaled = lowest
    if FILTERED:
        lowest = tl.minimum(lowest, tl.min(tl.where(z > _NEG_INF, rank, _LARGEST_KEY), axis=0))
    if SCALED:
        inside = _is_within(z, ids, scale[0], scale[1])
        lowest_scaled = tl.minimum(
            lowest_scaled, tl.min(tl.where(inside & (z > _NEG_INF), rank, _LARGEST_KEY), axis=0)
        )
    if LIST > 0:
        old, last, largest = listed, tl.min(listed, axis=0), tl.max(rank, axis=0)
        while largest > last:
            listed = tl.where(listed == last, largest, listed)
            last = tl.min(listed, axis=0)
            largest = tl.max(tl.where(rank < largest, rank, _ABSENT), axis=0)
        # Those that fell off the list join a group.
        z_off, ids_off = tl.where(old < last, _key_logit(old), _NEG_INF), _key_id(old)
        if tl.max(z_off, axis=0) > _NEG_INF:
            present = z_off > _NEG_INF
            noise_off = _noise_at(
                keys, column_ids_ptr, ids_off, present, temperature, NOISE, STREAM
            )
            if SCALED:
                off_inside = _is_within(z_off, ids_off, scale[0], scale[1])
                scaled_group = _accumulate(
                    scaled_group,
                    tl.where(off_inside, z_off, _NEG_INF),
                    ids_off,
                    noise_off,
                    reciprocal,
                )
                z_off = tl.where(off_inside, _NEG_INF, z_off)
            rest = _accumulate(rest, z_off, ids_off, noise_off, reciprocal)
        z = tl.where(rank < last, z, _NEG_INF)
    if SCALED:
        z_scaled = tl.where(inside, z, _NEG_INF)
        scaled_group = _accumulate(scaled_group, z_scaled, ids, noise, reciprocal)
        z = tl.where(inside, _NEG_INF, z)
    rest = _accumulate(rest, z, ids, noise, reciprocal)
    return (rest, scaled_group), listed, (lowest, lowest_scaled), bad


_SMALL = (
    "keys_ptr", "floats_ptr", "ints_ptr", "temperature_ptr", "cutoff_ptr", "cutoff_id_ptr",
    "scale_logit_ptr", "scale_id_ptr", "seed_ptr", "base_ptr", "offset_ptr", "downweight_ptr",
    "token_ptr", "logq_ptr", "lse_ptr", "cutoff_out_ptr", "cutoff_id_out_ptr", "status_ptr",
    "scale_logit_out_ptr", "scale_id_out_ptr", "top_ids_ptr", "top_logits_ptr", "max_ptr",
    "log_sum_ptr",
)  # fmt: skip
"""Where these begin, a slice of the scratch or of a batch, makes no binary of its own."""


@triton.jit(
    do_not_specialize=["vocab", "num_splits", "tiles", "stride", "bias_stride", "offset"],
    do_not_specialize_on_alignment=_SMALL,
)
def _row_scan_kernel(
    keys_ptr,  # out [R, S, LIST + FILTERED + SCALED] int64: largest ids, lowest kept, lowest scaled
    floats_ptr,  # out [R, S, G, 2] float32: max, sum
    ints_ptr,  # out [R, S, G, 2] int32: best id, bad entries
    logits_ptr,  # [R, V]
    bias_ptr,  # [R, V] | None
    temperature_ptr,  # [R] float32
    cutoff_ptr,  # [R] float32 | None
    cutoff_id_ptr,  # [R] int64
    scale_logit_ptr,  # [R] float32 | None: the scaled set, where it is too large to be listed
    scale_id_ptr,  # [R] int64
    seed_ptr,  # [R] int64 | None: no noise
    base_ptr,  # [R] int64
    offset_ptr,  # [R] int64 | None: `offset` for every row
    column_ids_ptr,  # [V] int64 | None: ids of the columns, by which noise is drawn
    vocab, num_splits, tiles, stride, bias_stride, offset,
    LIST: tl.constexpr, STREAM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, S): a program owns `tiles` tiles of one row. Writes its partial."""
    r, split = tl.program_id(0), tl.program_id(1)
    FILTERED: tl.constexpr = cutoff_ptr is not None
    SCALED: tl.constexpr = scale_logit_ptr is not None
    NOISE: tl.constexpr = seed_ptr is not None
    row_ptr = _row_start(logits_ptr, r, stride, ALIGNED)
    bias_row_ptr = bias_ptr
    if bias_ptr is not None:
        bias_row_ptr = _row_start(bias_ptr, r, bias_stride, ALIGNED)
    temperature = _load_temperature(temperature_ptr + r)
    cutoff, scale, keys = (0.0, 0), (0.0, 0), (0, 0, 0)
    if FILTERED:
        cutoff = (tl.load(cutoff_ptr + r), tl.load(cutoff_id_ptr + r))
    if SCALED:
        scale = (tl.load(scale_logit_ptr + r), tl.load(scale_id_ptr + r))
    if NOISE:
        if offset_ptr is not None:
            offset = tl.load(offset_ptr + r)
        keys = (tl.load(seed_ptr + r), tl.load(base_ptr + r), offset)

    zero, none = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float32)
    count = tl.full([], 0, tl.int32)
    groups = ((none, zero, none, count), (none, zero, none, count))
    listed = _ABSENT + tl.arange(0, LIST if LIST > 0 else 1).to(tl.int64)  # no two alike
    lowest = (tl.full([], _LARGEST_KEY, tl.int64), tl.full([], _LARGEST_KEY, tl.int64))
    bad = count
    first = split * tiles
    full = tl.maximum(tl.minimum(vocab // BLOCK, first + tiles), first)
    end = tl.minimum(tl.cdiv(vocab, BLOCK), first + tiles)
    for tile in range(first, full):
        groups, listed, lowest, bad = _scan_tile(
            groups, listed, lowest, bad, row_ptr, bias_row_ptr, column_ids_ptr, temperature,
            tile * BLOCK, vocab, cutoff, scale, keys, LIST, FILTERED, SCALED, NOISE, STREAM, False,
            BLOCK,
        )  # fmt: skip
    if full < end:
        groups, listed, lowest, bad = _scan_tile(
            groups, listed, lowest, bad, row_ptr, bias_row_ptr, column_ids_ptr, temperature,
            full * BLOCK, vocab, cutoff, scale, keys, LIST, FILTERED, SCALED, NOISE, STREAM, True,
            BLOCK,
        )  # fmt: skip

    part = r.to(tl.int64) * num_splits + split
    WIDTH: tl.constexpr = LIST + FILTERED + SCALED
    if LIST > 0:
        tl.store(keys_ptr + part * WIDTH + tl.arange(0, LIST), listed)
    if FILTERED:
        tl.store(keys_ptr + part * WIDTH + LIST, lowest[0])
    if SCALED:
        tl.store(keys_ptr + part * WIDTH + LIST + FILTERED, lowest[1])
    GROUPS: tl.constexpr = 1 + SCALED
    _store_group(floats_ptr, ints_ptr, part * GROUPS, groups[0], bad)
    if SCALED:
        _store_group(floats_ptr, ints_ptr, part * GROUPS + 1, groups[1], bad)


@triton.jit
def _store_group(floats_ptr, ints_ptr, slot, group, bad):
    max_, sum_, _, best_id = group
    tl.store(floats_ptr + slot * 2, max_)
    tl.store(floats_ptr + slot * 2 + 1, sum_)
    tl.store(ints_ptr + slot * 2, best_id)
    tl.store(ints_ptr + slot * 2 + 1, bad)


@triton.jit
def _lowest_key(ptr, num_splits, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr):
    """Least of one key per split; -inf's where no split has one."""
    split = tl.arange(0, BLOCK_S)
    key = tl.load(ptr + split * WIDTH, mask=split < num_splits, other=_LARGEST_KEY)
    lowest = tl.min(key, axis=0)
    return tl.where(lowest == _LARGEST_KEY, _ABSENT, lowest)


@triton.jit(
    do_not_specialize=["num_splits", "stride", "bias_stride", "offset", "top_f", "scale_f"],
    do_not_specialize_on_alignment=(*_SMALL, "logits_ptr", "bias_ptr"),
)
def _row_merge_kernel(
    token_ptr,  # out [R] int64
    logq_ptr,  # out [R] float32 | None
    lse_ptr,  # out [R] float32
    cutoff_out_ptr,  # out [R] float32
    cutoff_id_out_ptr,  # out [R] int64
    status_ptr,  # out [R] int32
    scale_logit_out_ptr,  # out [R] float32 | None
    scale_id_out_ptr,  # out [R] int64
    top_ids_ptr,  # out [R, top_f] int64 | None
    top_logits_ptr,  # out [R, top_f] float32
    max_ptr,  # out [R] float32 | None
    log_sum_ptr,  # out [R] float32
    keys_ptr,  # [R, S, LIST + FILTERED + SCALED] int64
    floats_ptr,  # [R, S, G, 2] float32
    ints_ptr,  # [R, S, G, 2] int32
    logits_ptr,  # [R, V]
    bias_ptr,  # [R, V] | None
    temperature_ptr,  # [R] float32
    cutoff_ptr,  # [R] float32 | None
    downweight_ptr,  # [R] float32 | None: nothing is scaled
    scale_logit_ptr,  # [R] float32 | None: the scaled set is among the listed
    seed_ptr,  # [R] int64 | None
    base_ptr,  # [R] int64
    offset_ptr,  # [R] int64 | None
    column_ids_ptr,  # [V] int64 | None
    num_splits, stride, bias_stride, offset, top_f, scale_f,
    LIST: tl.constexpr, STREAM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (R): merges a row's partials, in the order of the splits. Writes the row's results."""
    r = tl.program_id(0).to(tl.int64)
    FILTERED: tl.constexpr = cutoff_ptr is not None
    SCALED: tl.constexpr = scale_logit_ptr is not None
    NOISE: tl.constexpr = seed_ptr is not None
    GROUPS: tl.constexpr = 1 + SCALED
    WIDTH: tl.constexpr = LIST + FILTERED + SCALED
    temperature = _load_temperature(temperature_ptr + r)
    reciprocal = _reciprocal(temperature)
    keys = (0, 0, 0)
    if NOISE:
        if offset_ptr is not None:
            offset = tl.load(offset_ptr + r)
        keys = (tl.load(seed_ptr + r), tl.load(base_ptr + r), offset)

    # The groups: [BLOCK_S * GROUPS], and the logit of each one's best id.
    slot = tl.arange(0, BLOCK_S * GROUPS)
    present = slot < num_splits * GROUPS
    at = (r * num_splits * GROUPS + slot) * 2
    max_ = tl.load(floats_ptr + at, mask=present, other=_NEG_INF)
    sum_ = tl.load(floats_ptr + at + 1, mask=present, other=0.0)
    best_id = tl.load(ints_ptr + at, mask=present, other=0)
    bad = tl.sum(tl.load(ints_ptr + at + 1, mask=present, other=0), axis=0) > 0
    present = max_ > _NEG_INF
    best_z = tl.load(
        _row_start(logits_ptr, r, stride, ALIGNED) + best_id, mask=present, other=_NEG_INF
    ).to(tl.float32)
    if bias_ptr is not None:
        bias_row_ptr = _row_start(bias_ptr, r, bias_stride, ALIGNED)
        best_z += tl.load(bias_row_ptr + best_id, mask=present, other=0.0).to(tl.float32)
    top = tl.max(max_, axis=0)

    # The listed ids: [BLOCK_S * LIST], and the LIST largest of them in order.
    if LIST > 0:
        entry = tl.arange(0, BLOCK_S * LIST)
        split, rank = entry // LIST, entry % LIST
        listed = tl.load(
            keys_ptr + (r * num_splits + split) * WIDTH + rank, mask=split < num_splits,
            other=_ABSENT,
        )  # fmt: skip
        z, ids = _key_logit(listed), _key_id(listed)
        top = tl.maximum(top, tl.max(z, axis=0))
        column, largest_key = tl.arange(0, LIST), tl.full([], _LARGEST_KEY, tl.int64)
        ranked = tl.full([LIST], _ABSENT, tl.int64)
        for i in range(0, tl.maximum(top_f, scale_f)):
            largest_key = tl.max(tl.where(listed < largest_key, listed, _ABSENT), axis=0)
            ranked = tl.where(column == i, largest_key, ranked)
        if top_ids_ptr is not None:
            ranked_z = _key_logit(ranked)
            found = ranked_z > _NEG_INF
            ranked_id = tl.where(found, _id_of(column_ids_ptr, _key_id(ranked), found), _PAD)
            wanted = column < top_f
            tl.store(top_ids_ptr + r * top_f + column, ranked_id, mask=wanted)
            tl.store(top_logits_ptr + r * top_f + column, ranked_z, mask=wanted)

    # Log-weights relative to the maximum, C included.
    anchor = _finite_or_zero(top)
    log_group = (max_ - anchor) * reciprocal
    log_best = (best_z - anchor) * reciprocal
    if LIST > 0:
        log_listed = (z - anchor) * reciprocal
    scale_logit, scale_id = float("inf"), -1
    if downweight_ptr is not None:
        if SCALED:
            scaled_ptr = keys_ptr + r * num_splits * WIDTH + LIST + FILTERED
            boundary = _lowest_key(scaled_ptr, num_splits, WIDTH, BLOCK_S)
        else:
            boundary = _at(ranked, scale_f - 1, LIST)
        scale_logit, scale_id = _key_logit(boundary), _key_id(boundary)
        group_scaled = (slot % GROUPS) > 0
        left = tl.max(tl.where(group_scaled, _NEG_INF, max_), axis=0)
        if LIST > 0:
            listed_scaled = _is_within(z, ids, scale_logit, scale_id)
            left = tl.maximum(left, tl.max(tl.where(listed_scaled, _NEG_INF, z), axis=0))
        # Scaling every kept id changes nothing; a greedy row is not scaled.
        if (left > _NEG_INF) & (temperature > 0):
            log_scale = _log(_bounded(tl.load(downweight_ptr + r), 1.0))
            log_group += tl.where(group_scaled, log_scale, 0.0)
            log_best += tl.where(group_scaled, log_scale, 0.0)
            if LIST > 0:
                log_listed += tl.where(listed_scaled, log_scale, 0.0)
        else:
            scale_logit, scale_id = float("inf"), -1

    # The normaliser, and the best of z / T + g.
    largest = tl.max(log_group, axis=0)
    noise = _noise_at(keys, column_ids_ptr, best_id, present, temperature, NOISE, STREAM)
    score = tl.where(present, log_best + noise, _NEG_INF)
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, best_id, _LAST_ID), axis=0)
    log_token = tl.max(tl.where(present & (best_id == token), log_best, _NEG_INF), axis=0)
    if LIST > 0:
        largest = tl.maximum(largest, tl.max(log_listed, axis=0))
        noise = _noise_at(keys, column_ids_ptr, ids, z > _NEG_INF, temperature, NOISE, STREAM)
        score = log_listed + noise
        best_listed = tl.max(score, axis=0)
        token_listed = tl.min(tl.where(score == best_listed, ids, _LAST_ID), axis=0)
        log_token_listed = tl.max(tl.where(ids == token_listed, log_listed, _NEG_INF), axis=0)
        wins = (best_listed > best) | ((best_listed == best) & (token_listed < token))
        token = tl.where(wins, token_listed, token)
        log_token = tl.where(wins, log_token_listed, log_token)
    largest = _finite_or_zero(largest)
    total = tl.sum(sum_ * tl.exp(log_group - largest), axis=0)
    if LIST > 0:
        total += tl.sum(tl.exp(log_listed - largest), axis=0)
    empty = top == _NEG_INF
    log_sum = tl.where(empty, 0.0, largest + _log(total))
    one_hot = empty | (temperature <= 0)
    token = tl.where(empty, 0, token)

    cutoff, cutoff_id = float("-inf"), -1
    if FILTERED:
        if tl.load(cutoff_ptr + r) > _NEG_INF:
            key = _lowest_key(keys_ptr + r * num_splits * WIDTH + LIST, num_splits, WIDTH, BLOCK_S)
            cutoff, cutoff_id = _key_logit(key), _key_id(key)
    tl.store(token_ptr + r, _id_of(column_ids_ptr, token, token >= 0))
    tl.store(lse_ptr + r, tl.where(empty, 0.0, anchor * reciprocal + log_sum))
    tl.store(cutoff_out_ptr + r, tl.where(one_hot, top, cutoff))
    tl.store(cutoff_id_out_ptr + r, tl.where(one_hot, token, cutoff_id))
    tl.store(status_ptr + r, tl.where(bad, _NAN, tl.where(empty, _EMPTY, 0)))
    if logq_ptr is not None:
        tl.store(logq_ptr + r, tl.where(one_hot, 0.0, log_token - log_sum))
        tl.store(scale_logit_out_ptr + r, scale_logit)
        tl.store(scale_id_out_ptr + r, scale_id)
    if max_ptr is not None:
        tl.store(max_ptr + r, top)
        tl.store(log_sum_ptr + r, log_sum)
