"""Verification kernels: (1) row statistics, (2) block masses R_i, (3) accept, extra token, outputs.

Launch 1 splits each judged row over programs, which store a partial maximum, log-sum and choice.
The later launches merge these again in every program: some hundred bytes, and no launch for it.
Launch 3 draws the extra token from splits of one row. The last program of a request to finish,
known by an atomic counter that launch 1 has zeroed, merges them and writes the outputs; the
interpreter runs programs one by one, so it does not test that hand-off.

Partials are merged in the order of the splits, so equal inputs give equal bits.
"""

# A constexpr and a runtime condition cannot share an `if`.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from ..distribution import PAD, Status
from ..distribution.rows import (
    _NEG_INF,
    _at,
    _finite_or_zero,
    _load_temperature,
    _reciprocal,
)
from ..rng import Stream, _uniform
from .contract import DRAFT_NAN, MASS_FLOOR
from .rows import (
    _load_cutoff,
    _load_draft_row,
    _load_num_draft,
    _log_sum,
    _merge_choices,
    _row_offset,
    _scan_mass,
    _scan_residual,
    _scan_split,
)
from .rules import _accept_block, _block_scales, _bound_masses, _is_one_hot, _judge

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_EXTRA = tl.constexpr(int(Stream.EXTRA))
_COUPLED = tl.constexpr(int(Stream.COUPLED))
_NAN = tl.constexpr(int(Status.NAN))
_EMPTY = tl.constexpr(int(Status.EMPTY))
_DRAFT_NAN = tl.constexpr(DRAFT_NAN)
_MASS_FLOOR = tl.constexpr(MASS_FLOOR)
_PAD = tl.constexpr(PAD)

_INTEGERS = (
    "vocab", "draft_vocab", "num_steps", "num_splits", "tiles", "stride_b", "stride_i",
    "bias_stride_b", "bias_stride_i", "draft_stride_b", "draft_stride_i", "draft_bias_stride_b",
    "draft_bias_stride_i",
)  # fmt: skip
"""Never specialised on: B, K, V and the strides change without a new binary."""

_SMALL = (
    "num_accepted_ptr", "output_ptr", "status_ptr", "num_passing_ptr", "bonus_ptr", "extra_ptr",
    "extra_arg_ptr", "counter_ptr", "mass_ptr", "part_ptr", "part_arg_ptr", "row_index_ptr",
    "cutoff_ptr", "cutoff_id_ptr", "num_draft_ptr", "temperature_ptr", "seed_ptr", "base_ptr",
    "tokens_ptr", "draft_row_index_ptr", "logq_ptr", "draft_cutoff_ptr", "draft_cutoff_id_ptr",
    "scale_logit_ptr", "scale_id_ptr", "downweight_ptr", "one_hot_ptr", "draft_temperature_ptr",
)  # fmt: skip
"""Where these begin, a slice of the scratch or of a batch, makes no new binary either."""


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL)
def _verify_stats_kernel(
    part_ptr,  # out [B, K, 3, S] float32: max, log-sum, best
    part_arg_ptr,  # out [B, K, S] int32
    counter_ptr,  # out [B] int32
    target_ptr,  # [B, K+1, V], or [N, V] with row_index
    row_index_ptr,  # [B, K+1] int64 | None
    bias_ptr,  # [B, K+1, V] float32 | None
    cutoff_ptr,  # [B, K+1] float32 | None
    cutoff_id_ptr,  # [B, K+1] int32
    num_draft_ptr,  # [B] int32
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    base_ptr,  # [B] int64
    vocab, num_steps, num_splits, tiles, stride_b, stride_i, bias_stride_b, bias_stride_i,
    COUPLED: tl.constexpr, PROBS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (B, S, K): a program owns `tiles` tiles of a judged row. Writes partials."""
    b, split, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if (split == 0) & (i == 0):
        tl.store(counter_ptr + b, 0)
    if i < _load_num_draft(num_draft_ptr + b, num_steps):
        num_rows = num_steps + 1
        row = _row_offset(row_index_ptr, b, i, num_rows, stride_b, stride_i, ALIGNED)
        bias_row = _row_offset(None, b, i, 0, bias_stride_b, bias_stride_i, False)
        cutoff, cutoff_id = _load_cutoff(cutoff_ptr, cutoff_id_ptr, b, i, num_rows)
        temperature = _load_temperature(temperature_ptr + b)
        p = (target_ptr + row, bias_row, temperature, 0.0, 0.0, cutoff, cutoff_id)
        noise = (tl.load(seed_ptr + b), tl.load(base_ptr + b), i)
        max_, total, best, arg = _scan_split(
            p, bias_ptr, split, tiles, vocab, -1, noise, COUPLED, _COUPLED, cutoff_ptr is not None,
            PROBS, BLOCK_V,
        )  # fmt: skip
        part = part_ptr + (b * num_steps + i) * 3 * num_splits + split
        tl.store(part, max_)
        tl.store(part + num_splits, _log_sum(total))
        tl.store(part + 2 * num_splits, best)
        tl.store(part_arg_ptr + (b * num_steps + i) * num_splits + split, arg)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL)
def _verify_mass_kernel(
    mass_ptr,  # out [B, K, S] float32: partial R_i in row i - 1
    part_ptr,  # [B, K, 3, S] float32
    target_ptr,  # [B, K+1, V], or [N, V] with row_index
    row_index_ptr,  # [B, K+1] int64 | None
    bias_ptr,  # [B, K+1, V] float32 | None
    cutoff_ptr,  # [B, K+1] float32 | None
    cutoff_id_ptr,  # [B, K+1] int32
    num_draft_ptr,  # [B] int32
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    base_ptr,  # [B] int64
    tokens_ptr,  # [B, K] int64
    draft_ptr,  # [B, K, V_draft], or [N, V_draft] with draft_row_index | None
    draft_row_index_ptr,  # [B, K] int64 | None
    logq_ptr,  # [B, K] float32 | None
    draft_cutoff_ptr,  # [B, K] float32 | None
    draft_cutoff_id_ptr,  # [B, K] int64
    scale_logit_ptr,  # [B, K] float32
    scale_id_ptr,  # [B, K] int64
    downweight_ptr,  # [B] float32 | None
    one_hot_ptr,  # [B] bool | None
    draft_temperature_ptr,  # [B] float32
    draft_bias_ptr,  # [B, K, V_draft] float32 | None
    map_ptr,  # [V] int32 | None
    vocab, draft_vocab, num_steps, num_splits, tiles, stride_b, stride_i, bias_stride_b,
    bias_stride_i, draft_stride_b, draft_stride_i, draft_bias_stride_b, draft_bias_stride_i,
    PROBS: tl.constexpr, DRAFT_PROBS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (B, S, K-1): a program owns `tiles` tiles of one R's row pair. Writes a partial R."""
    b, split, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) + 1
    num_draft = _load_num_draft(num_draft_ptr + b, num_steps)
    temperature = _load_temperature(temperature_ptr + b)
    one_hot = _is_one_hot(draft_ptr, one_hot_ptr, draft_temperature_ptr, b)
    if (i < num_draft) & (temperature > 0) & (one_hot == 0):
        max_, log_sum, log_p, log_q, log_ratio, point = _judge(
            part_ptr, target_ptr, row_index_ptr, bias_ptr, cutoff_ptr, cutoff_id_ptr, tokens_ptr,
            logq_ptr, one_hot, b, num_draft, temperature, vocab, num_steps, num_splits, stride_b,
            stride_i, bias_stride_b, bias_stride_i, PROBS, ALIGNED, BLOCK_K, BLOCK_S,
        )  # fmt: skip
        log_a = _block_scales(log_ratio, BLOCK_K)
        step = tl.arange(0, BLOCK_K)
        uniform = _uniform(tl.load(seed_ptr + b), tl.load(base_ptr + b), step, _ACCEPT)
        exact = tl.where(log_sum == log_sum, point, 1)
        _, needed = _bound_masses(log_a, log_p, log_q, exact, uniform, num_draft, BLOCK_K)
        if _at(needed.to(tl.int32), i - 1, BLOCK_K) != 0:
            num_rows = num_steps + 1
            row = _row_offset(row_index_ptr, b, i, num_rows, stride_b, stride_i, ALIGNED)
            bias_row = _row_offset(None, b, i, 0, bias_stride_b, bias_stride_i, False)
            cutoff, cutoff_id = _load_cutoff(cutoff_ptr, cutoff_id_ptr, b, i, num_rows)
            # i < num_draft: its row was judged, so max and log-sum are known.
            p = (
                target_ptr + row, bias_row, temperature, _at(max_, i, BLOCK_K),
                _at(log_sum, i, BLOCK_K), cutoff, cutoff_id,
            )  # fmt: skip
            q = _load_draft_row(
                draft_ptr, draft_row_index_ptr, draft_bias_ptr, map_ptr, tokens_ptr, logq_ptr,
                draft_cutoff_ptr, draft_cutoff_id_ptr, scale_logit_ptr, scale_id_ptr,
                downweight_ptr, draft_temperature_ptr, b, i, num_steps, vocab, draft_vocab,
                draft_stride_b, draft_stride_i, draft_bias_stride_b, draft_bias_stride_i,
                DRAFT_PROBS, ALIGNED,
            )  # fmt: skip
            mass = _scan_mass(
                p, q, bias_ptr, draft_bias_ptr, map_ptr, split, tiles, vocab, draft_vocab,
                _at(log_a, i - 1, BLOCK_K), PROBS, DRAFT_PROBS, BLOCK_V,
            )  # fmt: skip
            tl.store(mass_ptr + (b * num_steps + i - 1) * num_splits + split, mass)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL)
def _verify_extra_kernel(
    num_accepted_ptr,  # out [B] int32
    output_ptr,  # out [B, K+1] int64
    status_ptr,  # out [B] int32
    num_passing_ptr,  # out [B] int32 | None: drafts that pass their own test
    bonus_ptr,  # [B] int64 | None: emitted after a whole chain
    extra_ptr,  # scratch [B, 4, S] float32: max, best, total, best of the residual
    extra_arg_ptr,  # scratch [B, 2, S] int32
    counter_ptr,  # [B] int32, zero; the programs of a request that are done
    mass_ptr,  # [B, K, S] float32 | None
    part_ptr,  # [B, K, 3, S] float32
    part_arg_ptr,  # [B, K, S] int32
    target_ptr,  # [B, K+1, V], or [N, V] with row_index
    row_index_ptr,  # [B, K+1] int64 | None
    bias_ptr,  # [B, K+1, V] float32 | None
    cutoff_ptr,  # [B, K+1] float32 | None
    cutoff_id_ptr,  # [B, K+1] int32
    num_draft_ptr,  # [B] int32
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    base_ptr,  # [B] int64
    tokens_ptr,  # [B, K] int64
    draft_ptr,  # [B, K, V_draft], or [N, V_draft] with draft_row_index | None
    draft_row_index_ptr,  # [B, K] int64 | None
    logq_ptr,  # [B, K] float32 | None
    draft_cutoff_ptr,  # [B, K] float32 | None
    draft_cutoff_id_ptr,  # [B, K] int64
    scale_logit_ptr,  # [B, K] float32
    scale_id_ptr,  # [B, K] int64
    downweight_ptr,  # [B] float32 | None
    one_hot_ptr,  # [B] bool | None
    draft_temperature_ptr,  # [B] float32
    draft_bias_ptr,  # [B, K, V_draft] float32 | None
    map_ptr,  # [V] int32 | None
    vocab, draft_vocab, num_steps, num_splits, tiles, stride_b, stride_i, bias_stride_b,
    bias_stride_i, draft_stride_b, draft_stride_i, draft_bias_stride_b, draft_bias_stride_i,
    BLOCK_RULE: tl.constexpr, COUPLED: tl.constexpr, PROBS: tl.constexpr,
    DRAFT_PROBS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (B, S): a program owns `tiles` tiles of the extra row; the last one writes all."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_draft = _load_num_draft(num_draft_ptr + b, num_steps)
    temperature = _load_temperature(temperature_ptr + b)
    seed, base = tl.load(seed_ptr + b), tl.load(base_ptr + b)
    one_hot = _is_one_hot(draft_ptr, one_hot_ptr, draft_temperature_ptr, b)
    own_choice = temperature <= 0
    if COUPLED:
        own_choice = b >= 0
    step = tl.arange(0, BLOCK_K)
    judged = step < num_draft
    max_, log_sum, log_p, log_q, log_ratio, point = _judge(
        part_ptr, target_ptr, row_index_ptr, bias_ptr, cutoff_ptr, cutoff_id_ptr, tokens_ptr,
        logq_ptr, one_hot, b, num_draft, temperature, vocab, num_steps, num_splits, stride_b,
        stride_i, bias_stride_b, bias_stride_i, PROBS, ALIGNED, BLOCK_K, BLOCK_S,
    )  # fmt: skip
    whole = (log_sum == log_sum) & (max_ > _NEG_INF)

    # k, the target's choice where it stopped, and log a_k.
    uniform = _uniform(seed, base, step, _ACCEPT)
    passes = (tl.log(uniform) < log_ratio).to(tl.int32)
    choice = tl.zeros([BLOCK_K], tl.int32)
    if own_choice:
        choice = _merge_choices(
            part_ptr, part_arg_ptr, max_, b, num_draft, num_steps, num_splits, temperature,
            BLOCK_K, BLOCK_S,
        )  # fmt: skip
        token = tl.load(tokens_ptr + b * num_steps + step, mask=judged, other=-1)
        passes = ((choice == token) & whole).to(tl.int32)
    k = tl.min(tl.where(judged & (passes == 0), step, num_draft), axis=0)
    log_scale = 0.0
    if BLOCK_RULE:
        if own_choice == 0:
            k, log_scale = _accept_block(
                mass_ptr, log_ratio, log_p, log_q, tl.where(log_sum == log_sum, point, 1), uniform,
                b, num_draft, num_steps, num_splits, BLOCK_K, BLOCK_S,
            )  # fmt: skip
    row_status = tl.where(log_sum == log_sum, tl.where(max_ == _NEG_INF, _EMPTY, 0), _NAN)
    status = tl.max(tl.where(judged, row_status, 0), axis=0)
    draft_bad = tl.max(tl.where(judged, point, 0), axis=0)
    draft_bad = tl.where((one_hot != 0) | own_choice, 0, draft_bad) * _DRAFT_NAN

    if num_passing_ptr is not None:
        if split == 0:
            tl.store(num_passing_ptr + b, tl.sum(tl.where(judged, passes, 0), axis=0))

    is_known = own_choice & (k < num_draft)
    known = _at(choice, k, BLOCK_K).to(tl.int64)
    if bonus_ptr is not None:
        is_known = is_known | (k == num_draft)
        known = tl.where(k == num_draft, tl.load(bonus_ptr + b), known)
    if is_known:
        if split == 0:
            _write_verdict(
                num_accepted_ptr, output_ptr, status_ptr, tokens_ptr, b, k, num_steps, known,
                tl.where(status == 0, draft_bad, status), BLOCK_K,
            )  # fmt: skip
    else:
        num_rows = num_steps + 1
        row = _row_offset(row_index_ptr, b, k, num_rows, stride_b, stride_i, ALIGNED)
        bias_row = _row_offset(None, b, k, 0, bias_stride_b, bias_stride_i, False)
        cutoff, cutoff_id = _load_cutoff(cutoff_ptr, cutoff_id_ptr, b, k, num_rows)
        p = (
            target_ptr + row, bias_row, temperature, _at(max_, k, BLOCK_K),
            _at(log_sum, k, BLOCK_K), cutoff, cutoff_id,
        )  # fmt: skip
        # Of a refused draft the residual is wanted: of a one-hot draft, p without the token.
        refused = (k < num_draft) & (_at(whole.to(tl.int32), k, BLOCK_K) != 0)
        is_point = _at(point, k, BLOCK_K) != 0
        rest = tl.exp(log_scale) * (1.0 - tl.exp(_at(log_p, k, BLOCK_K)))
        refused_token = tl.load(tokens_ptr + b * num_steps + k, mask=k < num_draft, other=-1)
        exclude = tl.where(refused & is_point & (rest > _MASS_FLOOR), refused_token, -1)
        # Of 64 bits: cut to 32, an id outside the vocabulary might exclude another.
        exclude = tl.where(exclude < vocab, tl.maximum(exclude, -1), -1).to(tl.int32)
        pair = refused & (is_point == 0)
        extra = extra_ptr + b * 4 * num_splits + split
        extra_arg = extra_arg_ptr + b * 2 * num_splits + split
        STREAM: tl.constexpr = _COUPLED if COUPLED else _EXTRA
        if pair:
            if draft_ptr is not None:
                q = _load_draft_row(
                    draft_ptr, draft_row_index_ptr, draft_bias_ptr, map_ptr, tokens_ptr,
                    logq_ptr, draft_cutoff_ptr, draft_cutoff_id_ptr, scale_logit_ptr, scale_id_ptr,
                    downweight_ptr, draft_temperature_ptr, b, k, num_steps, vocab, draft_vocab,
                    draft_stride_b, draft_stride_i, draft_bias_stride_b, draft_bias_stride_i,
                DRAFT_PROBS, ALIGNED,
                )  # fmt: skip
                total, left_best, left_arg, best, arg = _scan_residual(
                    p, q, bias_ptr, draft_bias_ptr, map_ptr, split, tiles, vocab, draft_vocab,
                    log_scale, (seed, base, k), STREAM, PROBS, DRAFT_PROBS, BLOCK_V,
                )  # fmt: skip
                tl.store(extra, _at(max_, k, BLOCK_K))
                tl.store(extra + num_splits, best)
                tl.store(extra + 2 * num_splits, total)
                tl.store(extra + 3 * num_splits, left_best)
                tl.store(extra_arg, arg)
                tl.store(extra_arg + num_splits, left_arg)
        else:
            row_max, total, best, arg = _scan_split(
                p, bias_ptr, split, tiles, vocab, exclude, (seed, base, k), True, STREAM,
                cutoff_ptr is not None, PROBS, BLOCK_V,
            )  # fmt: skip
            tl.store(extra, row_max)
            tl.store(extra + num_splits, best)
            tl.store(extra + 2 * num_splits, total)
            tl.store(extra + 3 * num_splits, _NEG_INF)
            tl.store(extra_arg, arg)
            tl.store(extra_arg + num_splits, 0)
        # All of this program's stores precede the counter's release.
        tl.debug_barrier()
        done = tl.atomic_add(counter_ptr + b, 1, sem="acq_rel")
        if done == num_splits - 1:
            extra_token, extra_status = _merge_extra(
                extra_ptr, extra_arg_ptr, b, num_splits, temperature, pair, BLOCK_S
            )
            if k == num_draft:
                status = tl.maximum(status, extra_status)
            status = tl.where(status == 0, draft_bad, status)
            _write_verdict(
                num_accepted_ptr, output_ptr, status_ptr, tokens_ptr, b, k, num_steps,
                extra_token, status, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _merge_extra(
    extra_ptr, extra_arg_ptr, b, num_splits, temperature, pair, BLOCK_S: tl.constexpr
):  # fmt: skip
    """The extra token of the merged splits, and the status of a row that was only scanned now."""
    split = tl.arange(0, BLOCK_S)
    mask = split < num_splits
    # .cg: other programs wrote these while this one ran.
    part = extra_ptr + b * 4 * num_splits + split
    part_max = tl.load(part, mask=mask, other=_NEG_INF, cache_modifier=".cg")
    best = tl.load(part + num_splits, mask=mask, other=_NEG_INF, cache_modifier=".cg")
    total = tl.sum(
        tl.load(part + 2 * num_splits, mask=mask, other=0.0, cache_modifier=".cg"), axis=0
    )
    left = tl.load(part + 3 * num_splits, mask=mask, other=_NEG_INF, cache_modifier=".cg")
    args = extra_arg_ptr + b * 2 * num_splits + split
    arg = tl.load(args, mask=mask, other=0, cache_modifier=".cg")
    left_arg = tl.load(args + num_splits, mask=mask, other=0, cache_modifier=".cg")
    row_max = tl.max(part_max, axis=0)
    best += (part_max - _finite_or_zero(row_max)) * _reciprocal(temperature)
    token = _at(arg, tl.argmax(best, axis=0), BLOCK_S)
    if pair & (total > _MASS_FLOOR):
        token = _at(left_arg, tl.argmax(left, axis=0), BLOCK_S)
    status = tl.where(total == total, tl.where(row_max == _NEG_INF, _EMPTY, 0), _NAN)
    return token, status


@triton.jit
def _write_verdict(
    num_accepted_ptr, output_ptr, status_ptr, tokens_ptr, b, k, num_steps, extra, status,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    position = tl.arange(0, 2 * BLOCK_K)
    token = tl.load(tokens_ptr + b * num_steps + position, mask=position < k, other=_PAD)
    token = tl.where(position == k, extra.to(tl.int64), token)
    tl.store(output_ptr + b * (num_steps + 1) + position, token, mask=position <= num_steps)
    tl.store(num_accepted_ptr + b, k)
    tl.store(status_ptr + b, status)
