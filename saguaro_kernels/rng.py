"""Random numbers as a pure function of (seed, round base, offset, stream, token id).

    counter = (id // 4, base, offset | stream << 24, 0), key = seed, lane = id % 4      Philox4x32-10
    w = (r + 1/2) * 2^-32,  E = -log1p(-w),  g = -log E                                 g ~ Gumbel(0, 1)

The same key gives the same number on any device, in any batch and under any block size; no state is
kept. Small w are the winners of an argmax, so the noise has its precision there: a 24-bit uniform
could not reach ids of probability below 1e-7. w is held below 1, so g is finite.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WORD = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24


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


@dataclass(frozen=True)
class Keys:
    """Per row: seed [R] int64 of the request and base [R] int64, committed tokens at the round's start."""

    seed: torch.Tensor
    base: torch.Tensor


def philox_reference(
    seed: torch.Tensor,
    c0: torch.Tensor,
    c1: torch.Tensor,
    c2: torch.Tensor,
    c3: torch.Tensor,
    rounds: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32 over broadcastable int64 tensors holding 32-bit words; returns four such words."""
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        # A 32 x 32 bit product wraps in int64, but both of its halves survive the mask.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((product1 >> 32) & _WORD) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _words(keys: Keys, offset: torch.Tensor, stream: Stream, vocab: int) -> torch.Tensor:
    """The 32-bit words of ids 0..vocab-1: [R, vocab] int64. The coupled stream adds offset to base."""
    base = keys.base
    if stream is Stream.COUPLED:
        base, offset = base + offset, torch.zeros_like(offset)
    column = lambda word: word.to(torch.int64)[:, None]  # noqa: E731
    counter = torch.arange((vocab + 3) // 4, device=base.device)[None, :]
    lanes = philox_reference(
        column(keys.seed),
        counter,
        column(base) & _WORD,
        column(offset) | (int(stream) << 24),
        torch.zeros_like(counter),
    )
    return torch.stack(torch.broadcast_tensors(*lanes), dim=-1).flatten(1)[:, :vocab]


def _as_offsets(keys: Keys, offset: torch.Tensor | int) -> torch.Tensor:
    if isinstance(offset, torch.Tensor):
        return offset.to(torch.int64).expand_as(keys.base)
    return torch.full_like(keys.base, offset)


def uniform_reference(keys: Keys, offset: torch.Tensor | int, stream: Stream) -> torch.Tensor:
    """One uniform per row in (0, 1), from id 0: [R] float32. `offset`: an int or [R]."""
    word = _words(keys, _as_offsets(keys, offset), stream, 1)[:, 0]
    return ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=_BELOW_ONE)


def gumbel_reference(
    keys: Keys, offset: torch.Tensor | int, stream: Stream, vocab: int
) -> torch.Tensor:
    """Gumbel noise of ids 0..vocab-1: [R, vocab] float32. Rows with equal keys are drawn once."""
    offsets = _as_offsets(keys, offset)
    distinct, row = torch.unique(
        torch.stack((keys.seed, keys.base, offsets), dim=1), dim=0, return_inverse=True
    )
    seed, base, offsets = distinct.unbind(1)
    words = _words(Keys(seed, base), offsets, stream, vocab)
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    noise = uniform.neg_().log1p_().neg_().log_().neg_()
    return noise[row]


@triton.jit
def _log1p(x):
    # Core Triton has no log1p and libdevice's fails in the interpreter; Kahan's correction is exact to 2 ulp.
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def _words_to_uniform(words):
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def _uniform_to_gumbel(uniform):
    return -tl.log(-_log1p(-uniform))


@triton.jit
def _philox_key(base, offset, STREAM: tl.constexpr):
    # COUPLED (3) is keyed by absolute position.
    if STREAM == 3:
        return (base + offset).to(tl.uint32), (base * 0).to(tl.uint32) + (STREAM << 24)
    else:
        return base.to(tl.uint32), (base * 0 + offset).to(tl.uint32) | (STREAM << 24)


@triton.jit
def _uniform(seed, base, offset, STREAM: tl.constexpr):
    """The row's uniform in (0, 1); scalars, or tensors of one shape."""
    c1, c2 = _philox_key(base, offset, STREAM)
    words, _, _, _ = tl.philox(seed, c1 * 0, c1, c2, c1 * 0)
    return _words_to_uniform(words)


@triton.jit
def _gumbel_block(seed, base, offset, first_id, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Noise of ids first_id .. first_id + BLOCK - 1; first_id a multiple of 4, BLOCK a power of two >= 4."""
    c1, c2 = _philox_key(base, offset, STREAM)
    counter = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + c1, zero + c2, zero)
    words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return _uniform_to_gumbel(_words_to_uniform(words))


@triton.jit
def _gumbel_at(seed, base, offset, ids, STREAM: tl.constexpr):
    """Noise of scattered ids, one Philox call each: [like ids] float32. For blocks use _gumbel_block."""
    c1, c2 = _philox_key(base, offset, STREAM)
    counter = (ids // 4).to(tl.uint32)
    zero = counter * 0
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + c1, zero + c2, zero)
    lane = ids % 4
    words = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
    return _uniform_to_gumbel(_words_to_uniform(words))
