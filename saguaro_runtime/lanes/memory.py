"""Memory that two processes share and that no name keeps alive: it ends with the last of them."""

from __future__ import annotations

import math
import mmap
import os

import torch

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
