"""Launchers of the row kernels: `row_cutoff_launch`, and the scan behind row_stats and sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .._launch import on_device
from .contract import Sampling
from .cutoff import _row_cutoff_kernel
from .scan import _row_merge_kernel, _row_scan_kernel

MAX_LIST = 128
"""Largest ids that a scan keeps; a larger scaled set is found by a search before the scan."""

_GRAIN = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class CutoffConfig:
    """Block sizes of the search for a row's cut: one program per row, 2^log_bins bins a pass."""

    block: int = 8192
    log_bins: int = 8
    num_warps: int = 16


@dataclass(frozen=True)
class ScanConfig:
    """Block sizes of a scan: a row is split over at most max_splits programs of whole blocks."""

    block: int
    max_splits: int
    num_warps: int
    merge_warps: int


def scan_config(list_size: int) -> ScanConfig:
    """Splits as fine as the partials allow: at F <= 32 they are 4 % of a row of 128k in bfloat16.

    Nothing depends on the number of rows, so that a row's result does not depend on its batch.
    """
    if list_size == 0:
        return ScanConfig(block=4096, max_splits=32, num_warps=8, merge_warps=1)
    return ScanConfig(
        block=4096,
        max_splits=max(16 * 32 // list_size, 4) if list_size > 32 else 16,
        num_warps=8,
        merge_warps=4,
    )


def list_size_of(top_f: int, scale_f: int) -> int:
    """Ids a scan has to list: a power of two, 0 for none; a scaled set above MAX_LIST is not listed."""
    wanted = max(top_f, scale_f if scale_f <= MAX_LIST else 0)
    return 0 if wanted == 0 else max(8, triton.next_power_of_2(wanted))


def num_splits_of(vocab: int, config: ScanConfig) -> tuple[int, int]:
    """Programs per row, and tiles per program."""
    blocks = triton.cdiv(vocab, config.block)
    tiles = triton.cdiv(blocks, config.max_splits)
    return triton.cdiv(blocks, tiles), tiles


def _units(*strides: int) -> tuple[bool, tuple[int, ...]]:
    """Whether all strides are multiples of 16, and the strides in those units."""
    aligned = all(stride % 16 == 0 for stride in strides)
    return aligned, tuple(stride // 16 if aligned else stride for stride in strides)


def row_cutoff_launch(
    logits: torch.Tensor,
    sampling: Sampling,
    cutoff: torch.Tensor,
    cutoff_id: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    num_draft: torch.Tensor | None = None,
    top_k: int = 0,
    config: CutoffConfig | None = None,
) -> None:
    """Write a bound (cutoff, cutoff_id) of the kept ids of every row; (-inf, -1) without a filter.

    `cutoff` may lie between two logits. One program per row: it reads the row twice for most rows
    of a model, and at most 8 times.

    Args:
        logits: [B, L, V], with one entry of `sampling` per request b; or [N, V] with row_index.
        sampling: per request. `top_k`: one k for all rows instead of sampling.top_k.
        cutoff, cutoff_id: out, contiguous [B * L], or [N] with row_index; float32 and int64.
        bias: [B, L, V].
        row_index: [B, L] int64, the row of `logits` and of the outputs.
        num_draft: [B] int32; rows i > num_draft are neither read nor written.
    """
    config = config or CutoffConfig()
    shape = logits.shape[:2] if row_index is None else row_index.shape
    if shape[0] == 0 or shape[1] == 0:
        return
    strides = (logits.stride(0), logits.stride(1)) if row_index is None else (0, logits.stride(0))
    bias_strides = (0, 0) if bias is None else (bias.stride(0), bias.stride(1))
    aligned, (stride_b, stride_i, bias_b, bias_i) = _units(*strides, *bias_strides)
    with on_device(logits.device):
        _row_cutoff_kernel[(shape[1], shape[0])](
            cutoff_ptr=cutoff,
            cutoff_id_ptr=cutoff_id,
            logits_ptr=logits,
            row_index_ptr=row_index,
            num_draft_ptr=num_draft,
            bias_ptr=bias,
            temperature_ptr=sampling.temperature,
            top_k_ptr=None if top_k else sampling.top_k,
            top_p_ptr=None if top_k else sampling.top_p,
            min_p_ptr=None if top_k else sampling.min_p,
            vocab=logits.shape[-1],
            default_k=top_k,
            num_rows=shape[1],
            stride_b=stride_b,
            stride_i=stride_i,
            bias_stride_b=bias_b,
            bias_stride_i=bias_i,
            HAS_K=top_k > 0 or sampling.top_k is not None,
            ALIGNED=aligned,
            GRAIN=_GRAIN.get(logits.dtype, 0) if bias is None else 0,
            BLOCK=config.block,
            LOG_BINS=config.log_bins,
            num_warps=config.num_warps,
        )


@dataclass(frozen=True)
class ScanOutputs:
    """Tensors a scan writes, [R] unless said otherwise; None is not written."""

    tokens: torch.Tensor
    lse: torch.Tensor
    cutoff: torch.Tensor
    cutoff_id: torch.Tensor
    status: torch.Tensor
    logq: torch.Tensor | None = None
    scale_logit: torch.Tensor | None = None
    scale_id: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None  # [R, F]
    top_logits: torch.Tensor | None = None  # [R, F]
    max: torch.Tensor | None = None
    log_sum: torch.Tensor | None = None


def scan_workspace_size(
    rows: int, vocab: int, top_f: int, scale_f: int, config: ScanConfig | None = None
) -> int:
    """int64 elements that a scan needs at most, whatever its filters."""
    list_size = list_size_of(top_f, scale_f)
    splits, _ = num_splits_of(vocab, config or scan_config(list_size))
    groups = 2 if scale_f > MAX_LIST else 1
    return rows * (splits * (list_size + 2 + 2 * groups) + 4)


def row_scan_launch(
    logits: torch.Tensor,
    sampling: Sampling,
    out: ScanOutputs,
    *,
    seed: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    offset: int = 0,
    stream: int = 0,
    scale_f: int = 0,
    downweight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: ScanConfig | None = None,
) -> None:
    """Scan the rows [R, V] and write `out`; with `seed` the token is drawn, else the argmax.

    2 launches, each row read once; filters and a scaled set above MAX_LIST take a launch more each.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    top_f = 0 if out.top_ids is None else out.top_ids.shape[1]
    scale_f = 0 if downweight is None else scale_f
    if scale_f == 0:
        downweight = None
    list_size = list_size_of(top_f, scale_f)
    config = config or scan_config(list_size)
    num_splits, tiles = num_splits_of(vocab, config)
    if workspace is None:
        size = scan_workspace_size(rows, vocab, top_f, scale_f, config)
        workspace = torch.empty(size, dtype=torch.int64, device=logits.device)
    take = _Workspace(workspace)

    cutoff = cutoff_id = scale_logit = scale_id = None
    if any(value is not None for value in (sampling.top_k, sampling.top_p, sampling.min_p)):
        cutoff, cutoff_id = take(rows, torch.float32), take(rows, torch.int64)
        row_cutoff_launch(
            logits[:, None],
            sampling,
            cutoff,
            cutoff_id,
            bias=None if bias is None else bias[:, None],
        )
    if scale_f > MAX_LIST:
        scale_logit, scale_id = take(rows, torch.float32), take(rows, torch.int64)
        row_cutoff_launch(
            logits[:, None], sampling, scale_logit, scale_id,
            bias=None if bias is None else bias[:, None], top_k=scale_f,
        )  # fmt: skip
    partials = rows * num_splits
    groups = 1 if scale_logit is None else 2
    keys = take(
        partials * (list_size + (cutoff is not None) + (scale_logit is not None)), torch.int64
    )
    floats = take(partials * groups * 2, torch.float32)
    ints = take(partials * groups * 2, torch.int32)
    aligned, (stride, bias_stride) = _units(logits.stride(0), 0 if bias is None else bias.stride(0))
    # What both kernels take.
    shared = {
        "keys_ptr": keys, "floats_ptr": floats, "ints_ptr": ints, "logits_ptr": logits,
        "bias_ptr": bias, "temperature_ptr": sampling.temperature, "cutoff_ptr": cutoff,
        "scale_logit_ptr": scale_logit, "seed_ptr": seed, "base_ptr": base, "offset_ptr": offsets, "num_splits": num_splits, "stride": stride,
        "bias_stride": bias_stride, "offset": offset, "LIST": list_size, "STREAM": int(stream),
        "ALIGNED": aligned,
    }  # fmt: skip
    with on_device(logits.device):
        _row_scan_kernel[(num_splits, rows)](
            **shared,
            cutoff_id_ptr=cutoff_id,
            scale_id_ptr=scale_id,
            vocab=vocab,
            tiles=tiles,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
        _row_merge_kernel[(rows,)](
            **shared,
            token_ptr=out.tokens,
            logq_ptr=out.logq,
            lse_ptr=out.lse,
            cutoff_out_ptr=out.cutoff,
            cutoff_id_out_ptr=out.cutoff_id,
            status_ptr=out.status,
            scale_logit_out_ptr=out.scale_logit,
            scale_id_out_ptr=out.scale_id,
            top_ids_ptr=out.top_ids if top_f else None,
            top_logits_ptr=out.top_logits if top_f else None,
            max_ptr=out.max,
            log_sum_ptr=out.log_sum,
            downweight_ptr=downweight,
            top_f=top_f,
            scale_f=scale_f,
            BLOCK_S=triton.next_power_of_2(config.max_splits),
            num_warps=config.merge_warps,
        )


class _Workspace:
    """Hands out parts of one int64 buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.used = buffer, 0

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self.used
        self.used += count if dtype == torch.int64 else (count + 1) // 2
        return self.buffer[start : self.used].view(dtype)[:count]
