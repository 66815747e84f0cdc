"""Launchers of the row kernels: `row_cutoff_launch`, and the scan behind row_stats and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .._launch import check_int, on_device
from .contract import Sampling
from .cutoff import _row_cutoff_kernel
from .scan import _row_merge_kernel, _row_scan_kernel

MAX_LIST = 128
"""Largest ids that a scan keeps; a larger scaled set is found by a search before the scan."""

Plan = tuple[Any, tuple[int, ...], dict[str, Any]]
"""A launch: kernel, grid, arguments."""

_GRAIN = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class CutoffConfig:
    """Block sizes of the search for a row's cut: one program per row, 2^log_bins bins a pass."""

    block: int = 2048
    log_bins: int = 8
    num_warps: int = 8


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
    return ScanConfig(block=2048, max_splits=16, num_warps=8, merge_warps=4)


def list_size_of(top_f: int, scale_f: int) -> int:
    """Ids that a scan lists: a power of two, 0 for none; not a scaled set above MAX_LIST."""
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
    config: CutoffConfig | None = None,
) -> None:
    """Write a bound (cutoff, cutoff_id) of the kept ids of every row; (-inf, -1) without a filter.

    `cutoff` may lie between two logits. One program per row: a row of a model is read 2 or 3 times.

    Args:
        logits: [B, L, V], with one entry of `sampling` per request b; or [N, V] with row_index.
        sampling: contiguous tensors, per request.
        cutoff, cutoff_id: out, B * L contiguous elements; float32, and int32 or int64.
        bias: [B, L, V].
        row_index: [B, L] int64, the row of `logits`.
        num_draft: [B] int32; rows i > num_draft are neither read nor written.
    """
    shape = logits.shape[:2] if row_index is None else row_index.shape
    if 0 not in shape:
        with on_device(logits.device):
            _run(
                _cutoff_plan(
                    logits, sampling, cutoff, cutoff_id, bias, row_index, num_draft, 0,
                    config or CutoffConfig(),
                )
            )  # fmt: skip


def _cutoff_plan(
    logits: torch.Tensor,
    sampling: Sampling,
    cutoff: torch.Tensor,
    cutoff_id: torch.Tensor,
    bias: torch.Tensor | None,
    row_index: torch.Tensor | None,
    num_draft: torch.Tensor | None,
    top_k: int,
    config: CutoffConfig,
) -> Plan:
    """`top_k` > 0 is one k for all rows, instead of the filters of `sampling`."""
    shape = logits.shape[:2] if row_index is None else row_index.shape
    strides = (logits.stride(0), logits.stride(1)) if row_index is None else (0, logits.stride(0))
    bias_strides = (0, 0) if bias is None else (bias.stride(0), bias.stride(1))
    aligned, (stride_b, stride_i, bias_b, bias_i) = _units(*strides, *bias_strides)
    return _row_cutoff_kernel, (shape[0], shape[1]), {
        "cutoff_ptr": cutoff, "cutoff_id_ptr": cutoff_id, "logits_ptr": logits,
        "row_index_ptr": row_index, "num_draft_ptr": num_draft, "bias_ptr": bias,
        "temperature_ptr": sampling.temperature,
        "top_k_ptr": None if top_k else sampling.top_k,
        "top_p_ptr": None if top_k else sampling.top_p,
        "min_p_ptr": None if top_k else sampling.min_p,
        "vocab": logits.shape[-1], "default_k": top_k, "num_rows": shape[1],
        "stride_b": stride_b, "stride_i": stride_i, "bias_stride_b": bias_b,
        "bias_stride_i": bias_i, "HAS_K": top_k > 0 or sampling.top_k is not None,
        "ALIGNED": aligned, "GRAIN": _GRAIN.get(logits.dtype, 0) if bias is None else 0,
        "BLOCK": config.block, "LOG_BINS": config.log_bins, "num_warps": config.num_warps,
    }  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """Keys of the noise, as the kernels take them: seed, base [R] int64; offsets [R], or offset.

    ids [V] int64: by which noise and tokens go; None for the columns' numbers.
    """

    seed: torch.Tensor | None = None
    base: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    offset: int = 0
    stream: int = 0
    ids: torch.Tensor | None = None


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
    check_int("rows", rows, 0)
    check_int("vocab", vocab, 1)
    check_int("top_f", top_f, 0, MAX_LIST)
    check_int("scale_f", scale_f, 0)
    list_size = list_size_of(top_f, scale_f)
    splits, _ = num_splits_of(vocab, config or scan_config(list_size))
    groups = 2 if scale_f > MAX_LIST else 1
    return rows * (splits * (list_size + 2 + 2 * groups) + 4)


def row_scan_launch(
    logits: torch.Tensor,
    sampling: Sampling,
    out: ScanOutputs,
    *,
    draw: Draw | None = None,
    scale_f: int = 0,
    downweight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: ScanConfig | None = None,
) -> None:
    """Scan the rows [R, V] and write `out`; the token is drawn by `draw`, else the argmax.

    2 launches, each row read once; filters and a scaled set above MAX_LIST take one more each.
    """
    if logits.shape[0] == 0:
        return
    with on_device(logits.device):
        _run(
            *_scan_plans(logits, sampling, out, draw, scale_f, downweight, bias, workspace, config)
        )


def _scan_plans(
    logits: torch.Tensor,
    sampling: Sampling,
    out: ScanOutputs,
    draw: Draw | None,
    scale_f: int,
    downweight: torch.Tensor | None,
    bias: torch.Tensor | None,
    workspace: torch.Tensor | None,
    config: ScanConfig | None,
) -> list[Plan]:
    rows, vocab = logits.shape
    top_f = 0 if out.top_ids is None else out.top_ids.shape[1]
    if downweight is None or scale_f == 0:
        downweight, scale_f = None, 0
    list_size = list_size_of(top_f, scale_f)
    config = config or scan_config(list_size)
    num_splits, tiles = num_splits_of(vocab, config)
    if workspace is None:
        size = scan_workspace_size(rows, vocab, top_f, scale_f, config)
        workspace = torch.empty(size, dtype=torch.int64, device=logits.device)
    take = _Workspace(workspace)

    plans: list[Plan] = []

    def bound(top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge = take(rows, torch.float32), take(rows, torch.int64)
        biases = None if bias is None else bias[:, None]
        plans.append(
            _cutoff_plan(
                logits[:, None], sampling, *edge, biases, None, None, top_k, CutoffConfig()
            )
        )
        return edge

    cutoff = cutoff_id = scale_logit = scale_id = None
    if any(value is not None for value in (sampling.top_k, sampling.top_p, sampling.min_p)):
        cutoff, cutoff_id = bound(0)
    if scale_f > MAX_LIST:
        scale_logit, scale_id = bound(scale_f)
        scale_f = 0
    edges = (cutoff is not None) + (scale_logit is not None)
    groups = 1 if scale_logit is None else 2
    aligned, (stride, bias_stride) = _units(logits.stride(0), 0 if bias is None else bias.stride(0))
    draw = draw or Draw()
    # What both kernels take.
    shared = {
        "keys_ptr": take(rows * num_splits * (list_size + edges), torch.int64),
        "floats_ptr": take(rows * num_splits * groups * 2, torch.float32),
        "ints_ptr": take(rows * num_splits * groups * 2, torch.int32),
        "logits_ptr": logits, "bias_ptr": bias, "temperature_ptr": sampling.temperature,
        "cutoff_ptr": cutoff, "scale_logit_ptr": scale_logit, "seed_ptr": draw.seed,
        "base_ptr": draw.base, "offset_ptr": draw.offsets, "offset": draw.offset,
        "column_ids_ptr": draw.ids,
        "num_splits": num_splits, "stride": stride, "bias_stride": bias_stride,
        "LIST": list_size, "STREAM": draw.stream, "ALIGNED": aligned,
    }  # fmt: skip
    scan = {
        "cutoff_id_ptr": cutoff_id, "scale_id_ptr": scale_id, "vocab": vocab, "tiles": tiles,
        "BLOCK": config.block, "num_warps": config.num_warps,
    }  # fmt: skip
    merge = {
        "token_ptr": out.tokens, "logq_ptr": out.logq, "lse_ptr": out.lse,
        "cutoff_out_ptr": out.cutoff, "cutoff_id_out_ptr": out.cutoff_id,
        "status_ptr": out.status, "scale_logit_out_ptr": out.scale_logit,
        "scale_id_out_ptr": out.scale_id, "top_ids_ptr": out.top_ids if top_f else None,
        "top_logits_ptr": out.top_logits if top_f else None, "max_ptr": out.max,
        "log_sum_ptr": out.log_sum, "downweight_ptr": downweight, "top_f": top_f,
        "scale_f": scale_f, "BLOCK_S": triton.next_power_of_2(config.max_splits),
        "num_warps": config.merge_warps,
    }  # fmt: skip
    plans.append((_row_scan_kernel, (rows, num_splits), shared | scan))
    plans.append((_row_merge_kernel, (rows,), shared | merge))
    return plans


def _run(*plans: Plan) -> None:
    for kernel, grid, arguments in plans:
        kernel[grid](**arguments)


class _Workspace:
    """Hands out parts of one int64 buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.used = buffer, 0

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self.used
        self.used += count if dtype == torch.int64 else (count + 1) // 2
        return self.buffer[start : self.used].view(dtype)[:count]


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps) of variants that a launch can choose."""
    cases: dict[str, Any] = {}
    for name, dtype, vocab, filtered, top_f, scale_f, biased, mapped in (
        ("plain-bf16", torch.bfloat16, 128256, False, 0, 0, False, False),
        ("top32-bf16", torch.bfloat16, 128256, False, 32, 0, False, False),
        ("top32-bf16-unaligned", torch.bfloat16, 32003, False, 32, 0, False, False),
        ("top32-bf16-ids", torch.bfloat16, 32768, False, 32, 0, False, True),
        ("top32-fp16-filtered-C", torch.float16, 128256, True, 32, 8, False, False),
        ("top64-fp32-filtered-C1000-bias", torch.float32, 128256, True, 64, 1000, True, False),
    ):
        logits, sampling = _meta(4, vocab, dtype=dtype), Sampling(_meta(4))
        if filtered:
            sampling = Sampling(_meta(4), _meta(4, dtype=torch.int32), _meta(4), _meta(4))
        ids, floats = _meta(4, dtype=torch.int64), _meta(4)
        out = ScanOutputs(
            ids, floats, floats, ids, _meta(4, dtype=torch.int32), floats, floats, ids,
            _meta(4, top_f, dtype=torch.int64), _meta(4, top_f),
        )  # fmt: skip
        bias = _meta(4, vocab) if biased else None
        draw = Draw(ids, ids, ids=_meta(vocab, dtype=torch.int64) if mapped else None)
        plans = _scan_plans(logits, sampling, out, draw, scale_f, floats, bias, None, None)
        for kernel, _, arguments in plans:
            case = f"{kernel.fn.__name__.strip('_')}-{name}"
            cases.setdefault(case, _case(case, kernel, arguments))
    return list(cases.values())


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _case(
    name: str, kernel: Any, arguments: dict[str, Any]
) -> tuple[str, Any, dict[str, str], dict[str, Any], int]:
    """What triton.compile needs for a launch with these arguments."""
    arguments = dict(arguments)
    num_warps = arguments.pop("num_warps")
    types = {
        torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
        torch.int64: "i64", torch.int32: "i32",
    }  # fmt: skip
    signature, constexprs = {}, {}
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            signature[key] = f"*{types[value.dtype]}"
        elif value is None or key.isupper():
            constexprs[key] = value
        else:
            signature[key] = "i32"
    return name, kernel, signature, constexprs, num_warps
