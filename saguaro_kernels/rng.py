"""Random numbers as a pure function of (seed, round base, offset, stream, token id).

    Philox4x32-10:  counter = (id // 4, base, offset | stream << 24, 0), key = seed, lane = id % 4
    w = (r + 1/2) * 2^-32,  E = -log1p(-w),  g = -log E,    so that g ~ Gumbel(0, 1)

The same key gives the same number on any device, in any batch and under any block size; no state is
kept. Small w are the winners of an argmax, so the noise has its precision there: a 24-bit uniform
could not reach ids of probability below 1e-7. w is held below 1, so g is finite.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from ._launch import check_int
from .errors import ConfigError

_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER0, _MULTIPLIER1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL0, _WEYL1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_BELOW_ONE = 1.0 - 2.0**-24
_PART_WORDS = 1 << 16
_LONG_ROW = 1 << 15
_KEPT_ROWS = 128
OFFSET_BITS = 24
"""Bits of an offset, below those of the stream. Offsets on the device count by these bits alone."""
_OFFSET_MASK = tl.constexpr((1 << OFFSET_BITS) - 1)


class Stream(enum.IntEnum):
    """Disjoint families of random numbers; sharing one between two uses biases the output."""

    DRAFT = 0
    """Gumbel noise that draws the drafted tokens; offset i draws d_{i+1}."""
    ACCEPT = 1
    """The uniforms of the accept tests; offset i judges d_{i+1}."""
    EXTRA = 2
    """Gumbel noise of the extra token; offset = number of accepted drafts."""
    COUPLED = 3
    """Gumbel noise by absolute position (base + offset), on both sides of the coupled rule."""


_STREAMS = tuple(Stream)


@dataclass(frozen=True)
class Keys:
    """Per row: seed [R] int64, and base [R] int64, the tokens committed when the round began.

    All 64 bits of a seed count, and the lower 32 of a base.
    """

    seed: torch.Tensor
    base: torch.Tensor


def check_position(offset: torch.Tensor | int, stream: int) -> None:
    """Raise unless the stream is one, and an `offset` on the host has OFFSET_BITS."""
    if not isinstance(offset, torch.Tensor):
        check_int("offset", offset, 0, (1 << OFFSET_BITS) - 1)
    if stream not in _STREAMS:
        names = ", ".join(f"Stream.{stream.name}" for stream in Stream)
        raise ConfigError(f"stream: got {stream!r}, want one of {names}")


def philox_reference(
    seed: np.ndarray, c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, c3: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox4x32-10 over broadcastable uint64 arrays of 32-bit words; returns four such arrays.

    A round: (x0, x1, x2, x3) -> (hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0)).
    numpy, since torch has no unsigned arithmetic and its 64-bit integer ops are half as fast.
    """
    shape = np.broadcast_shapes(seed.shape, c0.shape, c1.shape, c2.shape, c3.shape)
    factor = np.empty((2, *shape), np.uint64)  # (x0, x2), then (x2, x0), ..
    factor[0], factor[1] = c0, c2
    added = np.empty_like(factor)  # what each will be xored with, kept in the high half: (x3, x1)
    added[0], added[1] = c3 << _HALF, c1 << _HALF
    one = np.ones_like(seed)
    multiplier = np.stack((one * _MULTIPLIER0, one * _MULTIPLIER1))
    key = np.stack((seed >> _HALF, seed & _WORD)) << _HALF
    weyl = np.stack((one * _WEYL1, one * _WEYL0)) << _HALF
    for _ in range(10):
        factor *= multiplier
        added ^= factor
        added ^= key
        added >>= _HALF
        factor <<= _HALF
        factor, added = added, factor[::-1]
        multiplier, key, weyl = multiplier[::-1], (key + weyl)[::-1], weyl[::-1]
    added >>= _HALF
    return factor[0], added[1], factor[1], added[0]


def _counters(
    keys: Keys, offset: torch.Tensor | int, stream: Stream
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed, base and offset of each row as Philox takes them: COUPLED adds the offset to the base.

    `offset`: an int or [R].
    """
    check_position(offset, stream)
    offset = torch.as_tensor(offset, device=keys.base.device).to(torch.int64).expand_as(keys.base)
    if stream is Stream.COUPLED:
        return keys.seed, keys.base + offset, torch.zeros_like(offset)
    return keys.seed, keys.base, offset & _OFFSET_MASK.value


def _words(
    seed: torch.Tensor, base: torch.Tensor, offset: torch.Tensor, stream: Stream, vocab: int
) -> torch.Tensor:
    """Words of ids 0..vocab-1 for [R] counters, rounded: [R, vocab] float32 on the CPU."""
    column = lambda word: word.cpu().numpy().astype(np.uint64)[:, None]  # noqa: E731
    lanes = philox_reference(
        column(seed),
        np.arange((vocab + 3) // 4, dtype=np.uint64)[None, :],
        column(base) & _WORD,
        column(offset) | np.uint64(int(stream) << OFFSET_BITS),
        np.zeros((1, 1), np.uint64),
    )
    words = np.empty((*lanes[0].shape, 4), np.float32)
    for i, lane in enumerate(lanes):
        words[..., i] = lane
    return torch.from_numpy(words.reshape(len(words), -1)[:, :vocab])


def uniform_reference(keys: Keys, offset: torch.Tensor | int, stream: Stream) -> torch.Tensor:
    """One uniform per row in (0, 1), from id 0: [R] float32. `offset`: an int or [R]."""
    words = _words(*_counters(keys, offset, stream), stream, 1)[:, 0]
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE).to(keys.base.device)


def _gumbel(counters: torch.Tensor, stream: Stream, vocab: int) -> torch.Tensor:
    seed, base, offset = counters.unbind(1)
    words = _words(seed, base, offset, stream, vocab)
    below = words.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-_BELOW_ONE)
    return below.log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=_KEPT_ROWS)
def _long_row(seed: int, base: int, offset: int, stream: Stream, vocab: int) -> torch.Tensor:
    """A row of noise, [vocab] float32, only to be read. Successive rounds share most of theirs."""
    counter = torch.tensor([[seed, base, offset]], device="cpu")
    return _gumbel(counter, stream, vocab)[0]


def distinct_gumbel_reference(
    keys: Keys, offset: torch.Tensor | int, stream: Stream, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise [D, vocab] float32 of the distinct keys, and which of them is each row's: [R] int64."""
    counters = torch.stack(_counters(keys, offset, stream), dim=1)
    distinct, row = torch.unique(counters, dim=0, return_inverse=True)
    if vocab < _LONG_ROW:
        # Parts small enough for a core's cache.
        parts = distinct.split(max(1, _PART_WORDS // max(vocab, 1)))
        rows = [_gumbel(part, stream, vocab) for part in parts]
    else:
        rows = [_long_row(*counter, stream, vocab)[None] for counter in distinct.tolist()]
    if not rows:
        return torch.empty((0, vocab), dtype=torch.float32, device=row.device), row
    return torch.cat(rows).to(row.device), row


def gumbel_reference(
    keys: Keys, offset: torch.Tensor | int, stream: Stream, vocab: int
) -> torch.Tensor:
    """Gumbel noise of ids 0..vocab-1: [R, vocab] float32. Rows with equal keys are drawn once."""
    noise, row = distinct_gumbel_reference(keys, offset, stream, vocab)
    return noise[row]


@triton.jit
def _log1p(x):
    # Core Triton has no log1p and libdevice's fails in the interpreter; Kahan's is exact to 2 ulp.
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def _words_to_uniform(words):
    return tl.minimum(
        (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375
    )


@triton.jit
def _uniform_to_gumbel(uniform):
    return -tl.log(-_log1p(-uniform))


@triton.jit
def _philox_key(base, offset, STREAM: tl.constexpr):
    # COUPLED (3) is keyed by absolute position.
    if STREAM == 3:
        return (base + offset).to(tl.uint32), (base * 0).to(tl.uint32) + (STREAM << 24)
    else:
        low = (base * 0 + offset).to(tl.uint32) & _OFFSET_MASK
        return base.to(tl.uint32), low | (STREAM << 24)


@triton.jit
def _uniform(seed, base, offset, STREAM: tl.constexpr):
    """The row's uniform in (0, 1); scalars, or tensors of one shape."""
    c1, c2 = _philox_key(base, offset, STREAM)
    words, _, _, _ = tl.philox(seed, c1 * 0, c1, c2, c1 * 0)
    return _words_to_uniform(words)


@triton.jit
def _gumbel_block(seed, base, offset, first_id, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Noise of ids first_id .. + BLOCK - 1; first_id a multiple of 4, BLOCK a power of two >= 4."""
    c1, c2 = _philox_key(base, offset, STREAM)
    counter = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + c1, zero + c2, zero)
    words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return _uniform_to_gumbel(_words_to_uniform(words))


@triton.jit
def _gumbel_at(seed, base, offset, ids, STREAM: tl.constexpr):
    """Noise of scattered ids, a Philox call each: [like ids] float32. For blocks: _gumbel_block."""
    c1, c2 = _philox_key(base, offset, STREAM)
    counter = (ids // 4).to(tl.uint32)
    zero = counter * 0
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + c1, zero + c2, zero)
    lane = ids % 4
    words = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
    return _uniform_to_gumbel(_words_to_uniform(words))
