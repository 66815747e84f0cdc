"""Tokens a request may repeat: what followed the longest earlier match of its last tokens.

    match(e) = the largest m <= max_n with history[e - t] = history[last - t] for t = 0..m-1
    e*       = the last e < last of the longest match;   period = last - e*;   last = length - 1
    tokens[i] = history[e* + 1 + i mod period]

The copy may run into the suffix it continues and then repeats with the period, as in LZ77, so a
loop of one token is proposed in full. Deterministic, so it is verified as a one-hot proposal.

Source: prompt lookup decoding (Saxena, 2023); Ziv and Lempel, 1977.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._call import call
from ._launch import Impl, check_int, check_tensor, on_device, resolve_impl
from .distribution import PAD


@dataclass(frozen=True)
class NgramConfig:
    """Positions of a history that a program looks at together, and its warps."""

    block: int
    num_warps: int


def ngram_config() -> NgramConfig:
    """One program per request walks its history: as wide as the loads of 4 warps are."""
    return NgramConfig(block=1024, num_warps=4)


@torch.no_grad()
def ngram_propose_reference(
    history: torch.Tensor,
    length: torch.Tensor,
    *,
    num_tokens: int,
    max_n: int = 3,
    min_n: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ngram_propose`."""
    batch, width = history.shape
    if not width:
        return history.new_full((batch, num_tokens), PAD), length.new_zeros(batch).int()
    end = torch.arange(width, device=history.device)[None, :]
    last = length.long().clamp(0, width)[:, None] - 1
    alive = (end < last).expand(batch, width)
    match = torch.zeros_like(history)
    for t in range(max_n):
        suffix = history.gather(1, (last - t).clamp(min=0))
        alive = alive & (end >= t) & (history.roll(t, 1) == suffix)
        match += alive
    # One maximum finds the longest match and the last of them.
    best = (match * width + end).amax(1, keepdim=True)
    longest, where = best // width, best % width
    period = (last - where).clamp(min=1)
    step = torch.arange(num_tokens, device=history.device)[None, :]
    tokens = history.gather(1, (where + 1 + step % period).clamp(max=width - 1))
    found = longest >= min_n
    count = torch.where(found[:, 0], num_tokens, 0).to(torch.int32)
    return torch.where(found, tokens, PAD), count


@triton.jit(do_not_specialize=["history_stride", "width", "num_tokens", "max_n", "min_n"])
def _ngram_propose_kernel(
    history_ptr,  # [B, N] int64
    length_ptr,  # [B]
    tokens_ptr,  # [B, K] int64, out
    count_ptr,  # [B] int32, out
    history_stride,
    width,  # N
    num_tokens,  # K
    max_n,
    min_n,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (B,): one request. Writes its tokens and their number."""
    request = tl.program_id(0).to(tl.int64)
    history_ptr += request * history_stride
    length = tl.load(length_ptr + request).to(tl.int64)
    last = tl.minimum(tl.maximum(length, 0), width) - 1
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        end = start + tl.arange(0, BLOCK)
        # Only ends that still match are read: about once per end.
        alive = end < last
        match = tl.zeros([BLOCK], tl.int64)
        for t in range(0, max_n):
            alive &= end >= t
            suffix = tl.load(history_ptr + tl.maximum(last - t, 0))
            alive &= tl.load(history_ptr + end - t, mask=alive, other=-1) == suffix
            match += alive.to(tl.int64)
        best = tl.maximum(best, tl.where(match > 0, (match << 32) | end, -1))
    found = tl.max(best, 0)
    longest = tl.where(found >= 0, found >> 32, 0)
    where = found & 0xFFFFFFFF
    proposed = longest >= min_n
    k = tl.arange(0, BLOCK_K)
    source = where + 1 + k % tl.maximum(last - where, 1)
    tokens = tl.load(history_ptr + source, mask=proposed & (k < num_tokens), other=-1)
    tl.store(tokens_ptr + request * num_tokens + k, tokens, mask=k < num_tokens)
    tl.store(count_ptr + request, tl.where(proposed, num_tokens, 0))


def _ngram_propose(
    history: torch.Tensor, length: torch.Tensor, max_n: int, min_n: int, impl: str,
    tokens: torch.Tensor, count: torch.Tensor,
) -> None:  # fmt: skip
    batch, num_tokens = tokens.shape
    if impl != "triton":
        proposal = ngram_propose_reference(
            history, length, num_tokens=num_tokens, max_n=max_n, min_n=min_n
        )
        tokens.copy_(proposal[0])
        count.copy_(proposal[1])
    elif batch:
        config = ngram_config()
        with on_device(history.device):
            _ngram_propose_kernel[(batch,)](
                history,
                length,
                tokens,
                count,
                history_stride=history.stride(0),
                width=history.shape[1],
                num_tokens=num_tokens,
                max_n=max_n,
                min_n=min_n,
                BLOCK=config.block,
                BLOCK_K=triton.next_power_of_2(max(1, num_tokens)),
                num_warps=config.num_warps,
            )


def ngram_propose(
    history: torch.Tensor,
    length: torch.Tensor,
    *,
    num_tokens: int,
    max_n: int = 3,
    min_n: int = 1,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what followed the longest earlier match of each request's last tokens.

    Args:
        history: [B, N] int64, last dimension contiguous.
        length: [B] int32 | int64, tokens of each row in use, clamped to 0..N.
        num_tokens: K.
        max_n, min_n: longest match that counts, and the shortest that is worth a proposal.
    Returns:
        tokens [B, K] int64 and count [B] int32: K, or 0 where nothing matches (tokens are PAD).
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        history read about once; 1 launch; 0 host syncs.
    """
    check_int("num_tokens", num_tokens, 0)
    check_int("max_n", max_n, 1)
    check_int("min_n", min_n, 1, max_n)
    check_tensor("history", history, (None, None), torch.int64, contiguous_last=True)
    batch, device = history.shape[0], history.device
    check_tensor("length", length, (batch,), (torch.int32, torch.int64), device)
    tokens = torch.empty(batch, num_tokens, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int32, device=device)
    call(
        "ngram_propose",
        history,
        length.contiguous(),
        max_n,
        min_n,
        resolve_impl(impl, device),
        tokens,
        count,
    )
    return tokens, count


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps)."""
    signature = {"history_ptr": "*i64", "length_ptr": "*i32", "tokens_ptr": "*i64"}
    signature |= {"count_ptr": "*i32"}
    signature |= dict.fromkeys(("history_stride", "width", "num_tokens", "max_n", "min_n"), "i32")
    config = ngram_config()
    constexprs = {"BLOCK": config.block, "BLOCK_K": 8}
    case = ("ngram_propose-K5", _ngram_propose_kernel, signature, constexprs, config.num_warps)
    return [case]
