"""A row's distribution: its logits, as the model wrote them, and a few scalars.

    z      = logits + bias                   invalid entries (NaN, +inf) count as -inf, see status
    kept   : z > cutoff, or z == cutoff and id <= cutoff_id
    scaled : z > scale_logit, or z == scale_logit and id <= scale_id         the F largest kept ids
    log q  = z / T - lse + [scaled] log C        for kept ids, else -inf

Filters apply in this order: temperature, top-k, top-p (smallest prefix of mass >= p), min-p
(relative to the maximum), then C. Equal logits rank by id, the lowest first, so that exactly k ids
are kept. Nothing of the vocabulary's size is ever written: an op that needs q reads the row again.

Temperature inf is uniform over the kept ids.

Temperature 0 is greedy: one-hot on the argmax (cutoff = max, cutoff_id = argmax, log q = 0 there);
filters do not matter, and lse is that of the unfiltered row at T = 1, which ranks the runners-up.
A row without a finite logit is one-hot on id 0, by the same formula: cutoff = -inf, cutoff_id = 0.

z / T - lse cancels at tiny temperatures (z = 30, T = 1e-5: half an ulp is 0.1). A caller that knows
the log-probability of one id near the top passes its logit as `anchor` and lse = -log q(id), as
z - anchor is exact. row_stats gives (max, log_sum), a drawn token (its logit, -logq + [scaled]
log C).

Source: top-p Holtzman et al. 1904.09751; min-p Nguyen et al. 2407.01082; C is Definition 14 of
"Speculative Speculative Decoding", 2603.03251.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._call import call
from .._launch import FLOATS, Impl, check_out, check_sizes, check_tensor, resolve_impl
from ..rng import Keys, check_position
from .contract import MAX_TEMPERATURE, MIN_TEMPERATURE, PAD, RowStats, Sampling, Status
from .launch import ScanOutputs, compile_cases, row_scan_launch
from .reference import (
    clean_reference,
    cutoff_reference,
    is_within_reference,
    log_prob_reference,
    row_stats_reference,
    sampling_reference,
)
from .rows import _clean, _is_within, _row_log_prob

__all__ = [
    "MAX_TEMPERATURE",
    "MIN_TEMPERATURE",
    "PAD",
    "RowStats",
    "Sampling",
    "Status",
    "_clean",
    "_is_within",
    "_row_log_prob",
    "clean_reference",
    "compile_cases",
    "cutoff_reference",
    "is_within_reference",
    "log_prob_reference",
    "row_stats",
    "row_stats_reference",
    "sampling_reference",
]


def row_stats(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    bias: torch.Tensor | None = None,
    impl: Impl = "auto",
    out: RowStats | None = None,
) -> RowStats:
    """Maximum, argmax, log-normaliser and cutoff of each row.

        lse = log sum over kept x of exp(z[x] / T),  z = logits + bias

    Args:
        logits: [R, V] float16 | bfloat16 | float32; last dimension contiguous. Natural log.
        sampling: temperature and filters, [R] each.
        bias: [R, V] float16 | bfloat16 | float32, added first; -inf forbids an id.
        out: tensors to write and return. Default: new ones.
    Returns:
        RowStats. `cutoff`, `cutoff_id` are the last kept logit and id, (-inf, -1) in rows without a
        filter; see the module's docstring for greedy rows, and `Status` for broken ones.
    Raises:
        ShapeError, DTypeError, DeviceError: of any argument. Values are not checked; see status.
    Cost:
        Each row read once in 2 launches. Filters: a launch more, and 2 or 3 reads more of rows as a
        model writes them (8 at most). 0 host syncs.
    """
    implementation = resolve_impl(impl, logits.device)
    check_rows(logits, sampling, bias)
    if out is None:
        row = logits.shape[:1]
        max_, lse, cutoff, log_sum = logits.new_empty((4, *row), dtype=torch.float32)
        argmax, cutoff_id = logits.new_empty((2, *row), dtype=torch.int64)
        status = logits.new_empty(row, dtype=torch.int32)
        out = RowStats(max_, lse, cutoff, argmax, cutoff_id, status, log_sum)
    else:
        kinds = {"argmax": torch.int64, "cutoff_id": torch.int64, "status": torch.int32}
        for name, tensor in vars(out).items():
            dtype = kinds.get(name, torch.float32)
            check_out(f"out.{name}", tensor, logits.shape[:1], dtype, logits.device)
    call(
        "row_stats",
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bias,
        implementation, out.max, out.lse, out.cutoff, out.argmax, out.cutoff_id, out.status,
        out.log_sum,
    )  # fmt: skip
    return out


def _row_stats(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    bias: torch.Tensor | None,
    impl: str,
    *out: torch.Tensor,
) -> None:
    """saguaro::row_stats."""
    sampling, written = Sampling(temperature, top_k, top_p, min_p), RowStats(*out)
    if impl == "reference":
        copy_fields(row_stats_reference(logits, sampling, bias=bias), written)
        return
    outputs = ScanOutputs(
        tokens=written.argmax, lse=written.lse, cutoff=written.cutoff,
        cutoff_id=written.cutoff_id, status=written.status, max=written.max,
        log_sum=written.log_sum,
    )  # fmt: skip
    row_scan_launch(logits, contiguous(sampling), outputs, bias=bias)


def check_rows(
    logits: torch.Tensor,
    sampling: Sampling,
    bias: torch.Tensor | None,
    name: str = "logits",
    of: str = "sampling",
) -> None:
    """Raise unless logits [R, V], the sampling of its rows and the bias fit together."""
    check_tensor(name, logits, (None, None), FLOATS, contiguous_last=True)
    rows, vocab = logits.shape
    check_sizes(name, logits, V=vocab)
    check_tensor(f"{of}.temperature", sampling.temperature, (rows,), torch.float32, logits.device)
    check_per_row(f"{of}.top_k", sampling.top_k, rows, torch.int32, logits)
    check_per_row(f"{of}.top_p", sampling.top_p, rows, torch.float32, logits)
    check_per_row(f"{of}.min_p", sampling.min_p, rows, torch.float32, logits)
    if bias is not None:
        check_tensor("bias", bias, (rows, vocab), FLOATS, logits.device, contiguous_last=True)


def check_per_row(
    name: str,
    tensor: torch.Tensor | None,
    rows: int,
    dtypes: torch.dtype | Iterable[torch.dtype],
    logits: torch.Tensor,
) -> None:
    """Raise unless `tensor` is None or [R] of this dtype on the device of the logits."""
    if tensor is not None:
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        check_tensor(name, tensor, (rows,), allowed, logits.device)


def check_keys(
    keys: Keys, offset: torch.Tensor | int, stream: int, logits: torch.Tensor
) -> torch.Tensor | None:
    """Raise unless keys, offset and stream name noise of each row; the offset if it is a tensor."""
    rows, device = logits.shape[0], logits.device
    check_tensor("keys.seed", keys.seed, (rows,), torch.int64, device)
    check_tensor("keys.base", keys.base, (rows,), torch.int64, device)
    check_position(offset, stream)
    if not isinstance(offset, torch.Tensor):
        return None
    check_tensor("offset", offset, (rows,), (torch.int64, torch.int32), device)
    return offset


def contiguous(sampling: Sampling) -> Sampling:
    """The kernels index one entry per row: expanded tensors are written out."""
    return Sampling(
        sampling.temperature.contiguous(),
        *(
            None if value is None else value.contiguous()
            for value in (sampling.top_k, sampling.top_p, sampling.min_p)
        ),
    )


def copy_fields(result: Any, out: Any) -> None:
    """Copy a reference's dataclass of tensors into the caller's, field by field."""
    for name, value in vars(result).items():
        getattr(out, name).copy_(value)
