"""Attention of many queries of one request over its shared trunk, and of each over its own branch.

    out[b, i, h] = sum_j w[j] * value[j, h // G],   w = softmax over visible j of scale * <q, k_j>

Slot j of request b lives at pages[page_table[b, j // page], j % page]. Branch i sees, at tree step
`step`,
    the trunk and its part of the chain:   j < trunk_len[b] + depth[b, i] + 1
    its own keys:                          j = trunk_len[b] + draft_len + 1 + s*M + i,  s = 0..step
With step = -1 there are no own keys, and depth = 0, 1, .. is causal attention of a chain whose keys
have just been written: verification, chunked prefill and single-token decode are the same op. A
negative depth marks an unused query; its output is 0. A sliding window keeps the keys less than
`window` positions back.

The branches and the query heads of one KV head share a tile, so the trunk is read once per KV head
and request, not once per branch; long trunks are split over programs and merged exactly by their
log-sums (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

import torch

from .._call import call
from .._launch import (
    FLOATS,
    LARGE,
    Impl,
    check_int,
    check_number,
    check_out,
    check_sizes,
    check_tensor,
    check_workspace,
    resolve_impl,
)
from ..errors import ConfigError, DTypeError, ShapeError
from .launch import (
    TreeAttentionConfig,
    _tree_attention_launch,
    compile_cases,
    tree_attention_workspace,
)
from .reference import AttentionPlan, attention_plan, tree_attention_reference

__all__ = [
    "AttentionPlan",
    "TreeAttentionConfig",
    "attention_plan",
    "compile_cases",
    "tree_attention",
    "tree_attention_reference",
    "tree_attention_workspace",
]


def tree_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    draft_len: int,
    step: int | torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return the attention of every branch over the trunk and its own keys (formula above).

    Args:
        query: [B, M, Hq, D] float16 | bfloat16 | float32 (reference: also float64), D <= 256; last
            dimension contiguous. Its keys and values already lie in the pages.
        key_pages, value_pages: [P, page, Hkv, D], dtype of query, Hq a multiple of Hkv; last
            dimension contiguous, any other strides. Slots that no branch sees may hold anything,
            even NaN; a NaN that one branch sees may reach the others of its request.
        page_table: [B, pages] int32: page of slots j*page .. j*page + page - 1. Entries past a
            request's last slot are not read.
        trunk_len: [B] int32 | int64: keys before the chain.
        depth: [B, M] int32: accepted drafts before the branch; negative: unused.
        draft_len: K; the chain holds K + 1 slots. An int, fixed for a captured graph.
        step: tree step, or -1 for a chain (draft_len is then not used). An int, or an int32 tensor
            of one element read on the device, so that one captured graph serves all steps.
        scale: a finite number. Default: D ** -0.5.
        softcap: > 0, scores become softcap * tanh(score / softcap). Default: off.
        window: keys at most window - 1 positions back are seen. Default: all.
        plan: from `attention_plan` for the same lengths, for the reference only: made once per
            forward instead of once per layer.
        out: [B, M, Hq, D] contiguous, dtype of query. Default: allocated.
        workspace: `tree_attention_workspace` float32 elements. Default: allocated.
    Returns:
        [B, M, Hq, D], dtype of query; 0 where unused. Accumulated in float32.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Lengths and pages are not checked.
    Cost:
        keys and values of every visible slot once per KV head while M * Hq/Hkv <= 256 (D <= 128, 16
        bits); <= 2 launches; 0 host syncs. The reference reads trunk_len and depth on the host.
    Source:
        Branches as in arXiv 2603.03251; one pass over a tree as in SpecInfer, 2305.09781; splits of
        the trunk as in Flash-Decoding.
    """
    _check(query, key_pages, value_pages, page_table, trunk_len, depth, draft_len, step)
    if scale is not None:
        check_number("scale", scale, -LARGE)
    if softcap is not None:
        check_number("softcap", softcap, 1 / LARGE)
    if window is not None:
        check_int("window", window, 1)
    if plan is not None:
        _check_plan(plan, query, depth, draft_len, step, window)
    if out is not None:
        check_out("out", out, query.shape, query.dtype, query.device)
    chosen = resolve_impl(impl, query.device)
    if chosen == "triton" and query.dtype not in FLOATS:
        raise DTypeError(f"query: got {query.dtype}, want float16 | bfloat16 | float32 for triton")
    if workspace is not None and chosen == "triton":
        least = tree_attention_workspace(query, key_pages, page_table)
        check_workspace(workspace, least, torch.float32, query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if chosen == "reference" and plan is not None:
        found = tree_attention_reference(
            query, key_pages, value_pages, page_table, trunk_len=trunk_len, depth=depth,
            draft_len=draft_len, step=step, scale=scale, softcap=softcap, window=window, plan=plan,
        )  # fmt: skip
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    on_host = not isinstance(step, torch.Tensor)
    call(
        "tree_attention",
        query, key_pages, value_pages, page_table, trunk_len.contiguous(), depth.contiguous(),
        None if on_host else step, draft_len, step if on_host else 0, scale, softcap or 0.0,
        window or 0, chosen, out, workspace,
    )  # fmt: skip
    return out


def _tree_attention(
    query, key_pages, value_pages, page_table, trunk_len, depth, device_step, draft_len, step,
    scale, softcap, window, impl, out, workspace,
) -> None:  # fmt: skip
    step = step if device_step is None else device_step
    if not query.numel():
        return
    if impl == "triton":
        _tree_attention_launch(
            query, key_pages, value_pages, page_table, trunk_len, depth, step, out, workspace,
            draft_len=draft_len, scale=scale, softcap=softcap, window=window,
        )  # fmt: skip
        return
    out.copy_(
        tree_attention_reference(
            query, key_pages, value_pages, page_table, trunk_len=trunk_len, depth=depth,
            draft_len=draft_len, step=step, scale=scale, softcap=softcap or None,
            window=window or None,
        )
    )  # fmt: skip


def _check(query, key_pages, value_pages, page_table, trunk_len, depth, draft_len, step) -> None:
    device, floats = query.device, (*FLOATS, torch.float64)
    check_tensor("query", query, (None,) * 4, floats, contiguous_last=True)
    batch, branches, heads, head_dim = query.shape
    if not 1 <= head_dim <= 256:
        raise ShapeError(f"query: got head dimension {head_dim}, want 1..256")
    pages = (None, None, None, head_dim)
    check_tensor("key_pages", key_pages, pages, query.dtype, device, contiguous_last=True)
    check_tensor(
        "value_pages", value_pages, key_pages.shape, query.dtype, device, contiguous_last=True
    )
    count, page, kv_heads, _ = key_pages.shape
    check_sizes("key_pages", key_pages, P=count, page=page, Hkv=kv_heads)
    if heads % kv_heads:
        raise ShapeError(f"query: got {heads} heads, want a multiple of the {kv_heads} KV heads")
    check_tensor("page_table", page_table, (batch, None), torch.int32, device, contiguous_last=True)
    if batch:
        check_sizes("page_table", page_table, pages=page_table.shape[1])
    check_tensor("trunk_len", trunk_len, (batch,), (torch.int32, torch.int64), device)
    check_tensor("depth", depth, (batch, branches), torch.int32, device)
    check_int("draft_len", draft_len, 0)
    if isinstance(step, torch.Tensor):
        if step.dtype != torch.int32 or step.numel() != 1 or step.device != device:
            raise ShapeError(
                f"step: got {step.dtype} {list(step.shape)} on {step.device}, want one int32 there"
            )
    else:
        check_int("step", step, -1, draft_len)


def _check_plan(
    plan: AttentionPlan,
    query: torch.Tensor,
    depth: torch.Tensor,
    draft_len: int,
    step: int | torch.Tensor,
    window: int | None,
) -> None:
    """Raise if the plan was made for another call, as far as the host can see."""
    pairs = [
        ("dtype", plan.dtype, query.dtype), ("window", plan.window, window),
        ("depth.shape", plan.depth.shape, tuple(depth.shape)),
    ]  # fmt: skip
    if not isinstance(step, torch.Tensor):
        pairs.append(("step", plan.step, step))
    if plan.step >= 0:
        pairs.append(("draft_len", plan.draft_len, draft_len))
    for name, made, wanted in pairs:
        if made != wanted:
            raise ConfigError(f"plan: got one made for {name}={made}, want {name}={wanted}")
