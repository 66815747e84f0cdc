"""The residual of a rejected draft as a row of probabilities, for users who want the row.

    residual[r, x] = max(a[r] p[r, x] - q[r, x], 0) / mass[r],   mass[r] = its sum over x

p and q are the rows' distributions after temperature and filters. `verify` draws from it without
ever writing it.

Source: Leviathan et al. 2211.17192; with a < 1, Sun et al. 2403.10444.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._call import call
from ._launch import FLOATS, LARGE, Impl, check_sizes, check_tensor, on_device, resolve_impl
from .distribution import Sampling, Status, clean_reference, log_prob_reference, row_stats_reference
from .distribution.launch import _units, row_cutoff_launch
from .distribution.reference import bounded_reference
from .distribution.rows import _NEG_INF, _at, _bounded, _finite_or_zero, _reciprocal, _row_start
from .verification.contract import MASS_FLOOR
from .verification.launch import VerifyConfig
from .verification.rows import _load_pair, _load_temperature, _log_sum, _scan_split

_NAN = tl.constexpr(int(Status.NAN))
_EMPTY = tl.constexpr(int(Status.EMPTY))
_MASS_FLOOR = tl.constexpr(MASS_FLOOR)
_LARGE = tl.constexpr(LARGE)


@dataclass(frozen=True)
class Residual:
    """probs [R, V] float32, each row sums to 1; mass [R] float32; status [R] int32 (`Status`)."""

    probs: torch.Tensor
    mass: torch.Tensor
    status: torch.Tensor


@torch.no_grad()
def residual_reference(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    *,
    target_sampling: Sampling,
    draft_sampling: Sampling,
    scale: torch.Tensor | None = None,
) -> Residual:
    """See `residual`."""
    p, target_status = _probabilities(target_logits, target_sampling)
    q, draft_status = _probabilities(draft_logits, draft_sampling)
    width = p.shape[1]
    q = torch.nn.functional.pad(q[:, :width], (0, max(0, width - q.shape[1])))
    excess = p if scale is None else p * bounded_reference(scale, LARGE).to(p.dtype)[:, None]
    excess = (excess - q).clamp(min=0)
    mass = excess.sum(1)
    probs = torch.where((mass > MASS_FLOOR)[:, None], excess / mass[:, None], p)
    return Residual(probs, mass, torch.maximum(target_status, draft_status))


def _probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R, V] and status [R]; a row that held NaN or +inf is one-hot on its argmax."""
    stats = row_stats_reference(logits, sampling)
    z, _ = clean_reference(logits)
    broken = stats.status == Status.NAN
    log_prob = log_prob_reference(
        z,
        torch.where(broken, 0.0, sampling.temperature),
        torch.where(broken, stats.max, stats.cutoff),
        torch.where(broken, stats.argmax, stats.cutoff_id),
        stats.log_sum,
        anchor=torch.where(stats.max == -torch.inf, 0.0, stats.max),
    )
    return log_prob.exp(), stats.status


_INTEGERS = ("vocab", "draft_vocab", "num_splits", "tiles", "stride", "draft_stride")
_SMALL = (
    "part_ptr", "part_arg_ptr", "cutoff_ptr", "cutoff_id_ptr", "draft_cutoff_ptr",
    "draft_cutoff_id_ptr", "temperature_ptr", "draft_temperature_ptr", "mass_ptr", "total_ptr",
    "status_ptr", "scale_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL)
def _residual_stats_kernel(
    part_ptr,  # out [R, 2, 2, S] float32: max and log-sum, of p's row and of q's
    part_arg_ptr,  # out [R, 2, S] int32
    target_ptr,  # [R, V]
    draft_ptr,  # [R, V_draft]
    cutoff_ptr,  # [R] float32 | None
    cutoff_id_ptr,  # [R] int64
    draft_cutoff_ptr,  # [R] float32 | None
    draft_cutoff_id_ptr,  # [R] int64
    temperature_ptr,  # [R] float32
    draft_temperature_ptr,  # [R] float32
    vocab, draft_vocab, num_splits, tiles, stride, draft_stride,
    ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (R, S, 2): a program owns `tiles` tiles of p's or of q's row. Writes its partials."""
    r, split, side = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if side == 0:
        max_, total, arg = _scan_side(
            _row_start(target_ptr, r, stride, ALIGNED), cutoff_ptr, cutoff_id_ptr,
            _load_temperature(temperature_ptr + r), r, split, tiles, vocab, BLOCK_V,
        )  # fmt: skip
    else:
        max_, total, arg = _scan_side(
            _row_start(draft_ptr, r, draft_stride, ALIGNED), draft_cutoff_ptr, draft_cutoff_id_ptr,
            _load_temperature(draft_temperature_ptr + r), r, split, tiles, draft_vocab, BLOCK_V,
        )  # fmt: skip
    part = part_ptr + (r * 2 + side) * 2 * num_splits + split
    tl.store(part, max_)
    tl.store(part + num_splits, _log_sum(total))
    tl.store(part_arg_ptr + (r * 2 + side) * num_splits + split, arg)


@triton.jit
def _scan_side(
    row_ptr, cutoff_ptr, cutoff_id_ptr, temperature, r, split, tiles, vocab, BLOCK_V: tl.constexpr
):
    cutoff, cutoff_id = _load_edge(cutoff_ptr, cutoff_id_ptr, r)
    p = (row_ptr, r * 0, temperature, 0.0, 0.0, cutoff, cutoff_id)
    max_, total, _, arg = _scan_split(
        p, None, split, tiles, vocab, -1, (r, r, 0), False, 0, cutoff_ptr is not None, False,
        BLOCK_V,
    )  # fmt: skip
    return max_, total, arg


@triton.jit
def _load_edge(cutoff_ptr, cutoff_id_ptr, r):
    if cutoff_ptr is None:
        return r * 0.0 + _NEG_INF, r * 0 - 1
    else:
        return tl.load(cutoff_ptr + r), tl.load(cutoff_id_ptr + r)


@triton.jit
def _merge_side(
    part_ptr, part_arg_ptr, cutoff_ptr, cutoff_id_ptr, temperature, r, side, num_splits,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(temperature, max, log-sum, cutoff, cutoff_id, status) of one row."""
    split = tl.arange(0, BLOCK_S)
    mask = split < num_splits
    part = part_ptr + (r * 2 + side) * 2 * num_splits + split
    part_max = tl.load(part, mask=mask, other=_NEG_INF)
    part_sum = tl.load(part + num_splits, mask=mask, other=_NEG_INF)
    args = tl.load(part_arg_ptr + (r * 2 + side) * num_splits + split, mask=mask, other=0)
    max_ = tl.max(part_max, axis=0)
    arg = _at(args, tl.argmax(part_max, axis=0), BLOCK_S)
    part_sum += (part_max - _finite_or_zero(max_)) * _reciprocal(temperature)
    log_sum = _log_sum(tl.sum(tl.exp(part_sum), axis=0))
    cutoff, cutoff_id = _load_edge(cutoff_ptr, cutoff_id_ptr, r)
    # One-hot on the argmax: greedy rows, and those without a law.
    status = tl.where(log_sum == log_sum, tl.where(max_ == _NEG_INF, _EMPTY, 0), _NAN)
    point = (temperature <= 0) | (status != 0)
    return (
        tl.where(point, 0.0, temperature), max_, tl.where(point, 0.0, log_sum),
        tl.where(point, max_, cutoff), tl.where(point, arg.to(tl.int64), cutoff_id), status,
    )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_SMALL)
def _residual_kernel(
    mass_ptr,  # [R, S] float32 partial masses: out where probs is None, else in
    probs_ptr,  # out [R, V] float32 | None
    total_ptr,  # out [R] float32
    status_ptr,  # out [R] int32
    part_ptr,  # [R, 2, 2, S] float32
    part_arg_ptr,  # [R, 2, S] int32
    target_ptr,  # [R, V]
    draft_ptr,  # [R, V_draft]
    scale_ptr,  # [R] float32 | None
    cutoff_ptr,  # [R] float32 | None
    cutoff_id_ptr,  # [R] int64
    draft_cutoff_ptr,  # [R] float32 | None
    draft_cutoff_id_ptr,  # [R] int64
    temperature_ptr,  # [R] float32
    draft_temperature_ptr,  # [R] float32
    vocab, draft_vocab, num_splits, tiles, stride, draft_stride,
    ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (R, S): a program owns `tiles` tiles. Writes its mass, or its part of probs."""
    r, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, max_, log_sum, cutoff, cutoff_id, status = _merge_side(
        part_ptr, part_arg_ptr, cutoff_ptr, cutoff_id_ptr, _load_temperature(temperature_ptr + r),
        r, 0, num_splits, BLOCK_S,
    )  # fmt: skip
    row_ptr = _row_start(target_ptr, r, stride, ALIGNED)
    p = (row_ptr, r * 0, temperature, max_, log_sum, cutoff, cutoff_id)
    temperature, max_, log_sum, cutoff, cutoff_id, draft_status = _merge_side(
        part_ptr, part_arg_ptr, draft_cutoff_ptr, draft_cutoff_id_ptr,
        _load_temperature(draft_temperature_ptr + r), r, 1, num_splits, BLOCK_S,
    )  # fmt: skip
    row_ptr = _row_start(draft_ptr, r, draft_stride, ALIGNED)
    # An empty row is one-hot on id 0, the token that q's tuple names.
    q = (
        row_ptr, r * 0, temperature, 0, max_, log_sum, cutoff, cutoff_id, float("inf"), -1, 0.0
    )  # fmt: skip
    scale = 1.0
    if scale_ptr is not None:
        scale = _bounded(tl.load(scale_ptr + r), _LARGE)
    total = 0.0
    if probs_ptr is not None:
        column = tl.arange(0, BLOCK_S)
        mask = column < num_splits
        total = tl.sum(tl.load(mass_ptr + r * num_splits + column, mask=mask, other=0.0), axis=0)
        if split == 0:
            tl.store(total_ptr + r, total)
            tl.store(status_ptr + r, tl.maximum(status, draft_status))
    first = split * tiles
    full = tl.minimum(vocab, draft_vocab) // BLOCK_V
    full = tl.maximum(tl.minimum(full, first + tiles), first)
    end = tl.minimum(tl.cdiv(vocab, BLOCK_V), first + tiles)
    mass = 0.0
    for tile in range(first, full):
        mass += _residual_tile(
            probs_ptr, p, q, tile * BLOCK_V, r, vocab, draft_vocab, scale, total, False, BLOCK_V
        )
    for tile in range(full, end):
        mass += _residual_tile(
            probs_ptr, p, q, tile * BLOCK_V, r, vocab, draft_vocab, scale, total, True, BLOCK_V
        )
    if probs_ptr is None:
        tl.store(mass_ptr + r * num_splits + split, mass)


@triton.jit
def _residual_tile(
    probs_ptr, p, q, start, r, vocab, draft_vocab, scale, total, MASKED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Mass of a tile; with probs_ptr, writes its probabilities."""
    ids = start + tl.arange(0, BLOCK_V)
    log_p, log_q = _load_pair(p, q, None, None, None, ids, vocab, draft_vocab, False, False, MASKED)
    probs = tl.exp(log_p)
    excess = tl.maximum(scale * probs - tl.exp(log_q), 0.0)
    if probs_ptr is not None:
        probs = tl.where(total > _MASS_FLOOR, excess / total, probs)
        tl.store(probs_ptr + r * vocab + ids, probs, mask=ids < vocab)
    return tl.sum(excess, axis=0)


def _residual_launch(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    target_sampling: Sampling,
    draft_sampling: Sampling,
    scale: torch.Tensor | None,
    out: Residual,
    *,
    config: VerifyConfig | None = None,
) -> None:
    """Write `out`: 3 launches, and one per filtered side."""
    config = config or VerifyConfig()
    (rows, vocab), draft_vocab = target_logits.shape, draft_logits.shape[1]
    if rows == 0:
        return
    device = target_logits.device
    splits, tiles = config.split(max(vocab, draft_vocab))
    part = torch.empty((rows, 5, splits), dtype=torch.float32, device=device)
    arg = torch.empty((rows, 2, splits), dtype=torch.int32, device=device)
    mass, part = part.view(-1).split((rows * splits, rows * splits * 4))
    aligned, (stride, draft_stride) = _units(target_logits.stride(0), draft_logits.stride(0))
    edges = _edges(target_logits, target_sampling), _edges(draft_logits, draft_sampling)
    common = dict(
        part_ptr=part, part_arg_ptr=arg, target_ptr=target_logits, draft_ptr=draft_logits,
        cutoff_ptr=edges[0][0], cutoff_id_ptr=edges[0][1], draft_cutoff_ptr=edges[1][0],
        draft_cutoff_id_ptr=edges[1][1], temperature_ptr=target_sampling.temperature,
        draft_temperature_ptr=draft_sampling.temperature, vocab=vocab, draft_vocab=draft_vocab,
        num_splits=splits, tiles=tiles, stride=stride, draft_stride=draft_stride,
        ALIGNED=aligned, BLOCK_V=config.block_v, num_warps=config.num_warps,
    )  # fmt: skip
    with on_device(device):
        _residual_stats_kernel[(rows, splits, 2)](**common)
        for probs in (None, out.probs):
            _residual_kernel[(rows, splits)](
                mass_ptr=mass, probs_ptr=probs, total_ptr=out.mass, status_ptr=out.status,
                scale_ptr=scale, BLOCK_S=triton.next_power_of_2(config.max_splits), **common,
            )  # fmt: skip


def _edges(
    logits: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """(cutoff, cutoff_id) of filtered rows."""
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return None, None
    cutoff = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    cutoff_id = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    row_cutoff_launch(logits[:, None], sampling, cutoff, cutoff_id)
    return cutoff, cutoff_id


def residual(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    *,
    target_sampling: Sampling,
    draft_sampling: Sampling,
    scale: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Residual:
    """The normalised positive part of a p - q of each row, and its mass.

        probs[r, x] = max(scale[r] p[r, x] - q[r, x], 0) / mass[r]

    Args:
        target_logits: [R, V] float16 | bfloat16 | float32, rows contiguous. Unnormalised.
        draft_logits: [R, V_draft], likewise; ids at and beyond V_draft have q = 0.
        target_sampling, draft_sampling: temperature [R] float32, 0 is greedy, and filters [R].
        scale: [R] float32, a of the block rule; negative or NaN: 0. Default: ones.
    Returns:
        Residual: probs [R, V] float32, rows sum to 1; where the mass is below 2^-18, that is where
        p equals q to rounding, p. mass [R] float32. status [R] int32: a row with NaN or +inf counts
        as one-hot on its largest valid id, a row without a finite logit as one-hot on id 0.
    Raises:
        ShapeError, DTypeError, DeviceError: a tensor does not fit. Values are not checked.
    Cost:
        3 reads of both inputs, one write of probs; 3 launches, and one per filtered side; 0 syncs.
    Source:
        arXiv 2211.17192, section 2.3; scale: arXiv 2403.10444.
    """
    device = target_logits.device
    check_tensor("target_logits", target_logits, (None, None), FLOATS, contiguous_last=True)
    rows, vocab = target_logits.shape
    check_tensor("draft_logits", draft_logits, (rows, None), FLOATS, device, contiguous_last=True)
    check_sizes("target_logits", target_logits, V=vocab)
    check_sizes("draft_logits", draft_logits, V=draft_logits.shape[1])
    for name, sampling in (("target", target_sampling), ("draft", draft_sampling)):
        for field, value in vars(sampling).items():
            if value is not None or field == "temperature":
                dtype = torch.int32 if field == "top_k" else torch.float32
                check_tensor(f"{name}_sampling.{field}", value, (rows,), dtype, device)
    if scale is not None:
        check_tensor("scale", scale, (rows,), torch.float32, device)
    out = Residual(
        torch.empty((rows, vocab), device=device, dtype=torch.float32),
        torch.empty(rows, device=device, dtype=torch.float32),
        torch.empty(rows, device=device, dtype=torch.int32),
    )
    call(
        "residual",
        target_logits, draft_logits, *vars(target_sampling).values(),
        *vars(draft_sampling).values(), scale, resolve_impl(impl, device),
        out.probs, out.mass, out.status,
    )  # fmt: skip
    return out


def _residual(target_logits: torch.Tensor, draft_logits: torch.Tensor, *arguments: Any) -> None:
    """The registered op."""
    target, draft, (scale, impl, *out) = arguments[:4], arguments[4:8], arguments[8:]
    if impl == "reference":
        result = residual_reference(
            target_logits, draft_logits, target_sampling=Sampling(*target),
            draft_sampling=Sampling(*draft), scale=scale,
        )  # fmt: skip
        for value, tensor in zip(vars(result).values(), out, strict=True):
            tensor.copy_(value)
        return
    small: list[Any] = [t if t is None else t.contiguous() for t in (*target, *draft, scale)]
    both, scale = (Sampling(*small[:4]), Sampling(*small[4:8])), small[8]
    _residual_launch(target_logits, draft_logits, *both, scale, Residual(*out))


def compile_cases() -> list[tuple[str, object, dict, dict, int]]:
    """Binaries to compile ahead of time: (name, kernel, signature, constexprs, num_warps)."""
    edges = {
        "cutoff_ptr": "*fp32", "cutoff_id_ptr": "*i64", "draft_cutoff_ptr": "*fp32",
        "draft_cutoff_id_ptr": "*i64",
    }  # fmt: skip
    pointers = {
        "mass_ptr": "*fp32", "probs_ptr": "*fp32", "total_ptr": "*fp32", "status_ptr": "*i32",
        "part_ptr": "*fp32", "part_arg_ptr": "*i32", "target_ptr": "*bf16", "draft_ptr": "*bf16",
        "scale_ptr": "*fp32", "temperature_ptr": "*fp32", "draft_temperature_ptr": "*fp32",
        **{name: "i32" for name in _INTEGERS},
    }  # fmt: skip
    config, cases = VerifyConfig(), []
    values = {"ALIGNED": True, "BLOCK_V": config.block_v, "BLOCK_S": config.max_splits}
    for name, kernel, types in (
        ("stats", _residual_stats_kernel, pointers),
        ("stats-filtered", _residual_stats_kernel, {**pointers, **edges}),
        ("mass", _residual_kernel, {k: v for k, v in pointers.items() if k != "probs_ptr"}),
        ("probs-filtered", _residual_kernel, {**pointers, **edges}),
    ):
        signature = {n: types[n] for n in kernel.arg_names if n in types}
        constexprs = {n: values.get(n) for n in kernel.arg_names if n not in signature}
        cases.append((f"residual-{name}-bf16", kernel, signature, constexprs, config.num_warps))
    return cases
