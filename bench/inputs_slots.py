"""Inputs of the kernel cases that work on slots: pages of keys and values, tables, histories; and
the calls that run each op on them: `op(impl)(inputs)`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from saguaro_kernels import Impl
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.ngram import ngram_propose
from saguaro_kernels.outcomes import allocate_fan_out
from saguaro_kernels.promotion import promote_branch, promote_pages
from saguaro_kernels.tree import chain_layout, tree_layout
from saguaro_kernels.tree_attention import tree_attention

from .inputs import Run
from .registry import Shape

PAGE = 16


def _pages(shape: Shape, slots: int, device: str) -> tuple[torch.Tensor, int]:
    """A page table whose pages are not in order, as in a cache that has lived."""
    per_request = -(-slots // shape.get("page", PAGE))
    order = torch.randperm(shape["B"] * per_request, generator=torch.Generator().manual_seed(0))
    return order.view(shape["B"], per_request).to(torch.int32).to(device), len(order)


def _depths(B: int, M: int, K: int, device: str) -> torch.Tensor:
    """Accepted lengths of M branches of B requests, one after the other: [B, M] int32."""
    return (torch.arange(M, device=device, dtype=torch.int32) % (K + 1)).repeat(B, 1)


def attention_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """M branches of B requests at the last tree step, over a trunk of L keys."""
    B, M, K, D = shape["B"], shape["M"], shape["K"], shape["D"]
    heads, kv_heads = shape["Hq"], shape["Hkv"]
    table, pages = _pages(shape, shape["L"] + K + 1 + (K + 1) * M, device)
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    return SimpleNamespace(
        query=random(B, M, heads, D),
        keys=random(pages, shape.get("page", PAGE), kv_heads, D),
        values=random(pages, shape.get("page", PAGE), kv_heads, D),
        table=table,
        trunk=torch.full((B,), shape["L"], dtype=torch.int32, device=device),
        depth=_depths(B, M, K, device),
        draft_len=K,
    )


def attention_op(impl: Impl) -> Run:
    return lambda x: tree_attention(
        x.query,
        x.keys,
        x.values,
        x.table,
        trunk_len=x.trunk,
        depth=x.depth,
        draft_len=x.draft_len,
        step=x.draft_len,
        impl=impl,
    )


def chain_attention_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The K + 1 queries that a verification asks of B requests, over L keys before them."""
    B, K = shape["B"], shape["K"]
    inputs = attention_inputs({"M": K + 1, **shape}, dtype, device)
    inputs.depth = torch.arange(K + 1, device=device, dtype=torch.int32).repeat(B, 1)
    return inputs


def chain_attention_op(impl: Impl) -> Run:
    return lambda x: tree_attention(
        x.query,
        x.keys,
        x.values,
        x.table,
        trunk_len=x.trunk,
        depth=x.depth,
        draft_len=x.draft_len,
        step=-1,
        impl=impl,
    )


def promotion_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The hit branches of B requests in a cache of all layers."""
    M, K = shape["M"], shape["K"]
    table, pages = _pages(shape, 256 + K + 1 + (K + 1) * M, device)
    size = (2 * shape["layers"], pages, PAGE, shape["Hkv"], shape["D"])
    # Neighbours differ, and all are exact in every dtype: what is moved can be told.
    values = torch.arange(math.prod(size), dtype=torch.int32, device=device) % 251
    return SimpleNamespace(
        pages=values.to(dtype).view(size),
        changed=("pages",),
        table=table,
        hits=_hits(shape, device),
    )


def promote_op(impl: Impl) -> Run:
    return lambda x: promote_branch(x.pages, x.table, **x.hits, impl=impl)


def page_promotion_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The hit branches of B requests whose pages hold one slot each."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    slots = 256 + K + 1 + (K + 1) * M
    table = torch.arange(B * slots, dtype=torch.int32, device=device).view(B, slots)
    return SimpleNamespace(table=table, changed=("table",), hits=_hits(shape, device))


def promote_pages_op(impl: Impl) -> Run:
    return lambda x: promote_pages(x.table, **x.hits, impl=impl)


def _hits(shape: Shape, device: str) -> dict[str, Any]:
    """A branch in the middle of each request, after three accepted drafts or all of fewer."""
    whole = lambda value: torch.full((shape["B"],), value, dtype=torch.int32, device=device)  # noqa: E731
    lengths = {
        "trunk_len": whole(256),
        "depth": whole(min(3, shape["K"])),
        "branch": whole(shape["M"] // 2),
    }
    return lengths | {"draft_len": shape["K"], "branches": shape["M"]}


def cache_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """A full table of B * M chains; one outcome per request, half of them prepared."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    cache = SpeculationCache(2 * B * M, B * M, device, draft_len=K)
    uid = torch.arange(B, device=device).repeat_interleave(M)
    branch = torch.arange(M, device=device).repeat(B)
    base, accepted = torch.full_like(uid, 50), (branch % (K + 1)).to(torch.int32)
    slot = torch.arange(B * M, dtype=torch.int32, device=device)
    impl: Impl = "reference" if device == "cpu" else "auto"
    cache.insert(uid, 3, base, accepted, branch, slot, impl=impl)
    request = torch.arange(B, device=device)
    extra = torch.where(request < (B + 1) // 2, 0, 10**6)
    return SimpleNamespace(
        cache=cache,
        uid=request,
        base=base[:B],
        accepted=torch.zeros(B, dtype=torch.int32, device=device),
        extra=extra,
        inserted=(uid, base, accepted, branch, slot),
        # Where a key lands may depend on the order of arrival; what is stored for a slot may not.
        changed=("cache.key_rows", "cache.dropped"),
    )


def lookup_op(impl: Impl) -> Run:
    return lambda x: x.cache.lookup(x.uid, 3, x.base, x.accepted, x.extra, impl=impl)


def insert_op(impl: Impl) -> Run:
    def run(x: SimpleNamespace) -> None:
        uid, base, accepted, extra, slot = x.inserted
        # A new generation: the table counts as empty again.
        x.cache.insert(uid, 4, base, accepted, extra, slot, impl=impl)

    return run


def layout_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """M branches of B requests in pages."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    table, _ = _pages(shape, 256 + K + 1 + (K + 1) * M, device)
    return SimpleNamespace(
        depth=_depths(B, M, K, device),
        tokens=torch.arange(B * M, device=device).view(B, M),
        trunk=torch.full((B,), 256, dtype=torch.int32, device=device),
        table=table,
        draft_len=K,
    )


def layout_op(impl: Impl) -> Run:
    return lambda x: tree_layout(
        x.depth,
        x.tokens,
        x.trunk,
        draft_len=x.draft_len,
        page_table=x.table,
        page_size=PAGE,
        impl=impl,
    )


def chain_layout_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The last token of B requests and its drafts, of several lengths."""
    inputs = layout_inputs({"M": shape["K"] + 1, **shape}, dtype, device)
    inputs.count = 1 + torch.arange(shape["B"], device=device, dtype=torch.int32) % (shape["K"] + 1)
    return inputs


def chain_layout_op(impl: Impl) -> Run:
    return lambda x: chain_layout(
        x.tokens, x.count, x.trunk, page_table=x.table, page_size=PAGE, impl=impl
    )


def ngram_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """Histories of N tokens in which the last three occurred before."""
    B, N = shape["B"], shape["N"]
    history = torch.arange(N, device=device).repeat(B, 1) % 997
    return SimpleNamespace(
        history=history,
        length=torch.full((B,), N, dtype=torch.int32, device=device),
        num_tokens=shape["K"],
    )


def ngram_op(impl: Impl) -> Run:
    return lambda x: ngram_propose(x.history, x.length, num_tokens=x.num_tokens, impl=impl)


def fan_out_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """Histograms of accepted lengths of B requests."""
    counts = torch.tensor([round(1000 * 0.8**k) for k in range(shape["K"] + 1)], device=device)
    return SimpleNamespace(histogram=counts.repeat(shape["B"], 1), branches=shape["M"])


def fan_out_op(impl: Impl) -> Run:
    return lambda x: allocate_fan_out(x.histogram, x.branches, 0.5, impl=impl)
