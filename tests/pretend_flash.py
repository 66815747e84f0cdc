"""A stand-in for flash-attn, which is not here: `flash_attn_with_kvcache` of 2.8.3.

It takes what that takes, under the same names, refuses what that refuses, and computes in float64.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

CALLS: list[tuple[int, ...]] = []
"""Shapes of the queries it was called with."""
ALSO: list[torch.dtype] = []
"""Types that it takes here beside its own: in float32 texts are equal, in bfloat16 nearly."""


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    CALLS.append(tuple(q.shape))
    batch, width, heads, head_dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    assert q.dtype in (torch.float16, torch.bfloat16, *ALSO)
    assert k_cache.dtype == v_cache.dtype == q.dtype
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert page % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert head_dim <= 256 and heads % kv_heads == 0
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert block_table.shape[0] == batch
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert list(cache_seqlens.shape) == [batch]
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    assert all(its is None for its in unused) and not num_splits and not return_softmax_lse

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        rows = cache.double()[block_table.long()].flatten(1, 2)  # [B, S, Hkv, D]
        return rows.repeat_interleave(heads // kv_heads, 2).transpose(1, 2)

    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    score = q.double().transpose(1, 2) @ gathered(k_cache).transpose(2, 3) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    left, right = window_size
    # "Query at position i attends to keys between i + seqlen_k - seqlen_q - left and .. + right."
    at = torch.arange(width, device=q.device)[:, None] + cache_seqlens[:, None, None] - width
    slot = torch.arange(score.shape[-1], device=q.device)
    seen = (slot < cache_seqlens[:, None, None]) & (slot <= at + (0 if causal else right + 2**30))
    if left >= 0:
        seen = seen & (slot >= at - left)
    if right >= 0:
        seen = seen & (slot <= at + right)
    weights = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (weights @ gathered(v_cache)).transpose(1, 2).to(q.dtype)


def install(monkeypatch: Any) -> None:
    """Let `import flash_attn` find it."""
    module: Any = ModuleType("flash_attn")
    module.flash_attn_with_kvcache, module.__version__ = flash_attn_with_kvcache, "2.8.3"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    CALLS.clear()
    ALSO.clear()
