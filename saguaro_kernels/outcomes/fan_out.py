"""How many branches each accepted length deserves.

    F_k proportional to P(k)^(1 / (1 + r)),   sum over k of F_k = M exactly

for a miss probability that falls as F^-r: Theorem 12 of arXiv 2603.03251 for any law P of the
accepted length (Lagrange: P(k) r F_k^-(1 + r) equal for all k). Shares are rounded down, and the
branches left over go to the largest remainders, of equal ones to the smallest k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._call import call
from .._launch import LARGE, Impl, check_int, check_number, check_tensor, on_device, resolve_impl
from ..distribution.reference import bounded_reference
from ..distribution.rows import _bounded
from ..errors import DTypeError, ShapeError

MOST_BRANCHES = 1 << 20
_LARGE = tl.constexpr(LARGE)


@torch.no_grad()
def allocate_fan_out_reference(
    accept_hist: torch.Tensor, branches: int, r: float | torch.Tensor
) -> torch.Tensor:
    """See `allocate_fan_out`."""
    hist = bounded_reference(accept_hist.double(), LARGE)
    hist = torch.where(hist.sum(-1, keepdim=True) > 0, hist, 1.0)
    r = torch.as_tensor(r, dtype=torch.float64, device=hist.device)
    power = 1.0 / (1.0 + bounded_reference(r, LARGE))
    share = (hist / hist.sum(-1, keepdim=True)) ** power[..., None]
    share = branches * share / share.sum(-1, keepdim=True)
    fan_out = share.floor()
    left = branches - fan_out.sum(-1, keepdim=True)
    order = (share - fan_out).sort(dim=-1, descending=True, stable=True).indices
    rank = order.sort(dim=-1).indices
    return (fan_out + (rank < left)).to(torch.int32)


@triton.jit(do_not_specialize=["lengths", "branches"])
def _allocate_fan_out_kernel(
    hist_ptr,  # [R, K+1]
    r_ptr,  # [R] float32
    r_value,
    out_ptr,  # [R, K+1] int32
    lengths,  # K + 1
    branches,
    R_IS_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R,): one histogram. Writes its fan-out."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < lengths
    hist = tl.load(hist_ptr + row * lengths + k, mask=inside, other=0).to(tl.float32)
    hist = _bounded(hist, _LARGE)
    hist = tl.where(tl.max(hist, 0) > 0.0, hist, inside.to(tl.float32))
    r = tl.load(r_ptr + row) if R_IS_TENSOR else r_value
    r = _bounded(r, _LARGE)
    # Relative to the largest: the same shares, and counts of any size stay in range.
    share = hist / tl.max(hist, 0)
    power = tl.exp2(tl.log2(tl.where(share > 0.0, share, 1.0)) / (1.0 + r))
    share = tl.where(share > 0.0, power, 0.0)
    share = branches * share / tl.sum(share, 0)
    whole = tl.floor(share)
    rest = tl.where(inside, share - whole, -1.0)
    left = branches - tl.sum(whole, 0).to(tl.int32)
    ahead = (rest[None, :] > rest[:, None]) | (
        (rest[None, :] == rest[:, None]) & (k[None, :] < k[:, None])
    )
    extra = tl.sum(ahead.to(tl.int32), 1) < left
    tl.store(out_ptr + row * lengths + k, whole.to(tl.int32) + extra.to(tl.int32), mask=inside)


def _allocate_fan_out(
    accept_hist: torch.Tensor, branches: int, device_r: torch.Tensor | None, r: float, impl: str,
    out: torch.Tensor,
) -> None:  # fmt: skip
    if impl != "triton":
        out.copy_(
            allocate_fan_out_reference(accept_hist, branches, r if device_r is None else device_r)
        )
        return
    rows, lengths = accept_hist.numel() // accept_hist.shape[-1], accept_hist.shape[-1]
    if not rows:
        return
    with on_device(out.device):
        _allocate_fan_out_kernel[(rows,)](
            accept_hist,
            accept_hist if device_r is None else device_r,
            r,
            out,
            lengths=lengths,
            branches=branches,
            R_IS_TENSOR=device_r is not None,
            BLOCK=triton.next_power_of_2(lengths),
            num_warps=1,
        )


def allocate_fan_out(
    accept_hist: torch.Tensor, branches: int, r: float | torch.Tensor, *, impl: Impl = "auto"
) -> torch.Tensor:
    """Return the fan-out of each accepted length; the module's docstring has the formula.

    Args:
        accept_hist: [..., K+1], any integer or float dtype, >= 0: counts or probabilities of
            accepting 0..K drafts. All zero: as if uniform. Negative or NaN: 0.
        branches: M, 0..2^20.
        r: >= 0, exponent of the miss probability; a float, or [...] float32, where what is negative
            or NaN counts as 0.
    Returns:
        [..., K+1] int32, rows sum to M.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        1 launch; 0 host syncs. Computed in float32 (reference: float64).
    """
    if accept_hist.dim() < 1 or not accept_hist.shape[-1]:
        raise ShapeError(f"accept_hist: got shape {list(accept_hist.shape)}, want [..., K+1]")
    if accept_hist.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise DTypeError(f"accept_hist: got {accept_hist.dtype}, want an integer or float dtype")
    check_int("branches", branches, 0, MOST_BRANCHES)
    device_r = None
    if isinstance(r, torch.Tensor):
        check_tensor("r", r, accept_hist.shape[:-1], torch.float32, accept_hist.device)
        device_r = r.contiguous()
    else:
        check_number("r", r, 0.0)
    out = torch.empty_like(accept_hist, dtype=torch.int32, memory_format=torch.contiguous_format)
    call(
        "allocate_fan_out",
        accept_hist.contiguous(), branches, device_r, 0.0 if device_r is not None else r,
        resolve_impl(impl, accept_hist.device), out,
    )  # fmt: skip
    return out
