"""Which implementation runs, and the checks every public op makes before any work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import triton

from .errors import ConfigError, DeviceError, DTypeError, ShapeError

Impl = Literal["auto", "triton", "reference"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True when TRITON_INTERPRET=1 was set before the import: Triton kernels then take CPU tensors."""
LARGE = 1e30
"""Numbers beyond it act as it does, or are refused: their inverses are still float32."""


def resolve_impl(impl: str, device: torch.device) -> Literal["triton", "reference"]:
    """Return the implementation for tensors on `device`: CUDA -> triton, CPU -> reference.

    With TRITON_INTERPRET=1, "auto" is triton everywhere. An explicit `impl` is never replaced.

    Raises:
        ConfigError: `impl` is not a known name.
        DeviceError: "triton" was asked for on CPU tensors without the interpreter.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" or INTERPRETED else "reference"
    if impl not in ("triton", "reference"):
        raise ConfigError(f"impl: got {impl!r}, want 'auto', 'triton' or 'reference'")
    if impl == "triton" and device.type != "cuda" and not INTERPRETED:
        raise DeviceError(
            f"impl='triton': got tensors on {device}, want CUDA tensors; "
            "on a CPU use impl='reference', or set TRITON_INTERPRET=1 before the import"
        )
    return impl  # type: ignore[return-value]


def check_out(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless `tensor` is what an op would have made to write to: contiguous as well."""
    check_tensor(name, tensor, shape, dtype, device)
    if tensor.requires_grad:
        raise ConfigError(f"{name}: got a tensor that requires grad, want one to write; detach it")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name}: got strides {list(tensor.stride())}, want a contiguous tensor")


def check_workspace(
    tensor: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless `tensor` has room for `size` elements in one piece."""
    check_out("workspace", tensor, (None,), dtype, device)
    if tensor.numel() < size:
        raise ShapeError(f"workspace: got {tensor.numel()} elements, want at least {size}")


def check_int(name: str, value: int, low: int, high: int = 2**31 - 1) -> None:
    """Raise unless `value` is an integer in low..high: a kernel would take the rest of its bits."""
    if not isinstance(value, (int, np.integer, torch.SymInt)):
        raise DTypeError(f"{name}: got {value!r}, want an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name}: got {value}, want {low}..{high}")


def check_number(name: str, value: float, low: float, high: float = LARGE) -> None:
    """Raise unless `value` is a number in low..high; NaN is in no range."""
    if not isinstance(value, (int, float, np.number, torch.SymInt, torch.SymFloat)):
        raise DTypeError(f"{name}: got {value!r}, want a number")
    if not low <= value <= high:
        raise ConfigError(f"{name}: got {value}, want {low:g}..{high:g}")


def check_sizes(name: str, tensor: torch.Tensor, **sizes: int) -> None:
    """Raise if one of the named sizes of `tensor` is 0."""
    for size, value in sizes.items():
        if value < 1:
            raise ShapeError(f"{name}: got shape {list(tensor.shape)}, want {size} >= 1")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current: Triton launches on the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _differ(wanted: int | None, got: int) -> bool:
    return wanted is not None and wanted != got


def check_tensor(
    name: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    contiguous_last: bool = False,
) -> None:
    """Raise unless `tensor` has this shape (None = any), one of these dtypes and this device."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name}: got {type(tensor).__name__}, want a torch.Tensor")
    got = tensor.shape
    if len(got) != len(shape) or any(map(_differ, shape, got)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name}: got shape {list(got)}, want [{wanted}]")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        names = " | ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise DTypeError(f"{name}: got {tensor.dtype}, want {names}; convert with .to()")
    if device is not None and tensor.device != device:
        raise DeviceError(f"{name}: got a tensor on {tensor.device}, want {device}")
    if contiguous_last and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise ShapeError(f"{name}: the last dimension must be contiguous; call .contiguous()")
