"""Drafting from the geometric mean of the draft and of what it leaves to the target.

    q*(x) proportional to sqrt(q(x) max(r(x), 1e-8)),   r = (p - q)+ / its sum

p and q are the target's and the draft's row. It needs the target's row while drafting, which no
drafter has; it is an op on two given rows, and lossless when its row is verified as the draft's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from .._call import call
from .._launch import FLOATS, Impl, check_int, check_tensor, on_device, resolve_impl
from ..distribution import Sampling, check_keys, check_rows, log_prob_reference, row_stats
from ..distribution.launch import MAX_LIST, _units
from ..distribution.reference import clean_reference
from ..distribution.rows import (
    _clean,
    _finite_or_zero,
    _load_temperature,
    _load_tile,
    _row_log_prob,
    _row_start,
)
from ..residual import residual
from ..rng import Keys, Stream
from .contract import Sample

FLOOR = 1e-8
_FLOOR = tl.constexpr(FLOOR)


@dataclasses.dataclass(frozen=True)
class GeometricConfig:
    """Ids per program, and its warps."""

    block: int
    num_warps: int


def geometric_config() -> GeometricConfig:
    """Two loads of 16 bytes per thread in bfloat16, as where rows are verified."""
    return GeometricConfig(block=4096, num_warps=8)


@torch.no_grad()
def geometric_row_reference(
    draft_logits: torch.Tensor,
    temperature: torch.Tensor,
    cutoff: torch.Tensor,
    cutoff_id: torch.Tensor,
    top: torch.Tensor,
    log_sum: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """Overwrite residual probabilities `row` [R, V] by the log-weights of q*."""
    anchor = top.masked_fill(top == -torch.inf, 0.0)
    log_q = log_prob_reference(
        clean_reference(draft_logits)[0], temperature, cutoff, cutoff_id, log_sum, anchor=anchor
    )
    row.copy_(0.5 * (log_q + row.clamp(min=FLOOR).log()))


@triton.jit(
    do_not_specialize=["vocab", "stride", "row_stride"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "cutoff_ptr", "cutoff_id_ptr", "max_ptr", "log_sum_ptr",
    ],
)  # fmt: skip
def _geometric_row_kernel(
    row_ptr,  # in, out [R, V] float32
    logits_ptr,  # [R, V]
    temperature_ptr,  # [R] float32
    cutoff_ptr,  # [R] float32
    cutoff_id_ptr,  # [R] int64
    max_ptr,  # [R] float32
    log_sum_ptr,  # [R] float32
    vocab, stride, row_stride,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles): one tile of a row. Overwrites r by log sqrt(q max(r, 1e-8))."""
    r, start = tl.program_id(0), tl.program_id(1) * BLOCK
    q = (
        _load_temperature(temperature_ptr + r), _finite_or_zero(tl.load(max_ptr + r)),
        tl.load(log_sum_ptr + r), tl.load(cutoff_ptr + r), tl.load(cutoff_id_ptr + r),
    )  # fmt: skip
    row_ptr = _row_start(row_ptr, r, row_stride, ALIGNED)
    logits_ptr = _row_start(logits_ptr, r, stride, ALIGNED)
    if start + BLOCK <= vocab:
        _geometric_tile(row_ptr, logits_ptr, start, vocab, q, False, BLOCK)
    else:
        _geometric_tile(row_ptr, logits_ptr, start, vocab, q, True, BLOCK)


@triton.jit
def _geometric_tile(
    row_ptr, logits_ptr, start, vocab, q, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    temperature, anchor, log_sum, cutoff, cutoff_id = q
    ids = start + tl.arange(0, BLOCK)
    z = _clean(_load_tile(logits_ptr, None, ids, vocab, MASKED))
    log_q = _row_log_prob(
        z, ids, temperature, anchor, log_sum, cutoff, cutoff_id, float("inf"), -1, 0.0
    )
    residual = _load_tile(row_ptr, None, ids, vocab, MASKED)
    log_row = 0.5 * (log_q + tl.log(tl.maximum(residual, _FLOOR)))
    if MASKED:
        tl.store(row_ptr + ids, log_row, mask=ids < vocab)
    else:
        tl.store(row_ptr + ids, log_row)


def _geometric_row(
    draft_logits: torch.Tensor,
    temperature: torch.Tensor,
    cutoff: torch.Tensor,
    cutoff_id: torch.Tensor,
    top: torch.Tensor,
    log_sum: torch.Tensor,
    impl: str,
    row: torch.Tensor,
) -> None:
    """saguaro::geometric_row."""
    if impl == "reference":
        geometric_row_reference(draft_logits, temperature, cutoff, cutoff_id, top, log_sum, row)
        return
    rows, vocab = row.shape
    if rows:
        config = geometric_config()
        aligned, strides = _units(draft_logits.stride(0), row.stride(0))
        with on_device(row.device):
            _geometric_row_kernel[(rows, triton.cdiv(vocab, config.block))](
                row, draft_logits, temperature.contiguous(), cutoff, cutoff_id, top, log_sum,
                vocab, *strides,
                ALIGNED=aligned, BLOCK=config.block, num_warps=config.num_warps,
            )  # fmt: skip


def sample_geometric(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    draft_sampling: Sampling,
    keys: Keys,
    *,
    offset: torch.Tensor | int,
    target_sampling: Sampling | None = None,
    stream: Stream = Stream.DRAFT,
    top_f: int = 0,
    impl: Impl = "auto",
) -> tuple[Sample, torch.Tensor]:
    """Draw one token per row from q*, and return the row it was drawn from.

        q*(x) proportional to sqrt(q(x) max(r(x), 1e-8)),   r = (p - q)+ / its sum;  p where p == q

    Args:
        draft_logits, target_logits: [R, V] float16 | bfloat16 | float32; last dimension contiguous.
        draft_sampling, target_sampling: [R] each; the target's default is the draft's.
        keys, offset, stream, top_f: as in `saguaro_sample`.
    Returns:
        Sample and log q* [R, V] float32. The row is what `verify` takes as the draft's logits, at
        temperature 1 and without filters; the Sample's scalars belong to it.
    Raises:
        ShapeError, DTypeError, DeviceError: of any argument.
    Cost:
        The only vocabulary-sized output here: 12 launches, three of them of [R]; the draft's row is
        read 5 times, the target's 3 times. 0 host syncs.
    Source:
        A summary of arXiv 2603.03251 in circulation; the paper's own scheme is Definition 14, see
        `saguaro_sample`. docs/theory.md, "Saguaro's downweighting".
    """
    from . import saguaro_sample

    implementation = resolve_impl(impl, draft_logits.device)
    check_rows(draft_logits, draft_sampling, None, "draft_logits", "draft_sampling")
    shape, device = draft_logits.shape, draft_logits.device
    check_tensor("target_logits", target_logits, shape, FLOATS, device, contiguous_last=True)
    target_sampling = target_sampling or draft_sampling
    check_rows(target_logits, target_sampling, None, "target_logits", "target_sampling")
    check_keys(keys, offset, stream, draft_logits)
    check_int("top_f", top_f, 0, MAX_LIST)
    log_row = residual(
        target_logits, draft_logits, target_sampling=target_sampling,
        draft_sampling=draft_sampling, impl=implementation,
    ).probs  # fmt: skip
    stats = row_stats(draft_logits, draft_sampling, impl=implementation)
    call(
        "geometric_row",
        draft_logits, draft_sampling.temperature, stats.cutoff, stats.cutoff_id, stats.max,
        stats.log_sum, implementation, log_row,
    )  # fmt: skip
    plain = Sampling(torch.ones_like(stats.max))
    sample = saguaro_sample(
        log_row, plain, keys, offset=offset, stream=stream, top_f=top_f, impl=implementation
    )
    log_row -= sample.lse[:, None]
    shifted = {
        "lse": torch.zeros_like(sample.lse),
        "top_logits": sample.top_logits - sample.lse[:, None],
        "status": torch.maximum(sample.status, stats.status),
    }
    return dataclasses.replace(sample, **shifted), log_row


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """See bench.compile."""
    pointers = {"row_ptr": "*fp32", "logits_ptr": "*bf16", "cutoff_id_ptr": "*i64"}
    pointers |= dict.fromkeys(("temperature_ptr", "cutoff_ptr", "max_ptr", "log_sum_ptr"), "*fp32")
    integers = dict.fromkeys(("vocab", "stride", "row_stride"), "i32")
    signature = pointers | integers
    config = geometric_config()
    constexprs = {"ALIGNED": True, "BLOCK": config.block}
    return [
        ("geometric_row_kernel", _geometric_row_kernel, signature, constexprs, config.num_warps)
    ]
