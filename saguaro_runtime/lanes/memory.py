"""Anonymous memory that two processes share; it is freed when the last of them ends."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError

_ALIGN = 64


class Arena:
    """Hands out tensors from one anonymous shared mapping.

    Two processes that open one arena and allocate in the same order see the same tensors.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Make an arena of `size` bytes, or open the one behind the inherited descriptor `fd`."""
        self.size = max(size, _ALIGN)
        self.fd = os.memfd_create("saguaro") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._used = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        offset, self._used = self._used, self._used + padded_bytes(shape, dtype)
        count = math.prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes a tensor takes in an arena."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN


def file_of(model: Any) -> int:
    """The model in an anonymous file; its descriptor.

    Raises:
        ConfigError: the model cannot be pickled.
    """
    fd = os.memfd_create("saguaro-draft")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            torch.save(model, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        os.close(fd)
        raise ConfigError(
            f"draft {type(model).__name__}: cannot be sent to another process ({error}); "
            "define its class in a module, or use EngineConfig(lane='inline')"
        ) from error
    return fd
