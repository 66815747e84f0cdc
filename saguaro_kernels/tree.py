"""Where every branch stands: token ids, positions and KV slots of all tree steps.

    step s of branch i, depth k:    position = trunk_len + 1 + k + s
                                    slot     = trunk_len + draft_len + 1 + s*M + i
    token i of a chain:             position = slot = trunk_len + i

trunk_len is the number of keys in the cache before the round. The chain takes the next
draft_len + 1 slots and the branches the slots after it, step-major, so that one tree step writes M
neighbouring slots. All lengths are read on the device: one launch serves every step of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._call import call
from ._launch import (
    Impl,
    check_int,
    check_out,
    check_sizes,
    check_tensor,
    on_device,
    resolve_impl,
)
from .distribution import PAD


@dataclass(frozen=True)
class LayoutConfig:
    """Branches that a program lays out, and its warps."""

    block_m: int
    num_warps: int


def layout_config(branches: int) -> LayoutConfig:
    """All branches of a request's step in one program, up to 1024."""
    block_m = min(1024, triton.next_power_of_2(branches))
    return LayoutConfig(block_m, num_warps=1 if block_m <= 128 else 4)


@dataclass(frozen=True)
class Layout:
    """S steps of M branches: S = draft_len + 1 for a tree; a chain has S = 1 and M = its width."""

    ids: torch.Tensor
    """[B, M] int64: the token each branch starts with, 0 where unused."""
    positions: torch.Tensor
    """[S, B, M] int64: rotary positions, 0 where unused."""
    slots: torch.Tensor
    """[S, B, M] int64: the request's own numbering; unused branches keep their own slot."""
    physical: torch.Tensor
    """[S, B, M] int64: row of pages.flatten(0, 1) that holds the slot; slots without a table."""
    depth: torch.Tensor
    """[B, M] int32: depth of each branch (for a chain its index), PAD where unused."""


def _physical_reference(
    slots: torch.Tensor, page_table: torch.Tensor | None, page_size: int
) -> torch.Tensor:
    if page_table is None:
        return slots.clone()
    page = (slots // page_size).clamp_(0, page_table.shape[1] - 1)
    table = page_table.long()[None].expand(slots.shape[0], -1, -1)
    return table.gather(2, page) * page_size + slots % page_size


def tree_layout_reference(
    depth: torch.Tensor,
    tokens: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    draft_len: int,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
) -> Layout:
    """See `tree_layout`."""
    branches = depth.shape[1]
    step = torch.arange(draft_len + 1, device=depth.device)[:, None, None]
    trunk, used = trunk_len.long()[:, None], depth >= 0
    positions = torch.where(used, trunk + 1 + depth + step, 0)
    branch = torch.arange(branches, device=depth.device)
    slots = trunk + (draft_len + 1) + step * branches + branch
    physical = _physical_reference(slots, page_table, page_size)
    return Layout(torch.where(used, tokens, 0), positions, slots, physical, depth)


def chain_layout_reference(
    tokens: torch.Tensor,
    count: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
) -> Layout:
    """See `chain_layout`."""
    index = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    used = index < count[:, None]
    slots = (trunk_len.long()[:, None] + index)[None]
    physical = _physical_reference(slots, page_table, page_size)
    depth = torch.where(used, index, PAD).to(torch.int32)
    return Layout(torch.where(used, tokens, 0), torch.where(used, slots, 0), slots, physical, depth)


@triton.jit(do_not_specialize=["branches", "draft_len", "pages", "page_size", "table_stride_b"])
def _layout_kernel(
    tokens_ptr,  # [B, M] int64
    limit_ptr,  # CHAIN: count [B]; else depth [B, M] int32
    trunk_ptr,  # [B]
    table_ptr,  # [B, pages] int32
    ids_ptr,  # [B, M] int64
    positions_ptr,  # [S, B, M] int64
    slots_ptr,  # [S, B, M] int64
    physical_ptr,  # [S, B, M] int64
    depth_ptr,  # [B, M] int32, written by CHAIN only
    branches,
    draft_len,
    pages,
    page_size,
    table_stride_b,
    CHAIN: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (B, blocks of M, S): one step of BLOCK_M branches. Writes all fields of the layout."""
    request = tl.program_id(0).to(tl.int64)
    branch = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.program_id(2)
    inside = branch < branches
    here = request * branches + branch
    trunk = tl.load(trunk_ptr + request).to(tl.int64)
    if CHAIN:
        used = branch < tl.load(limit_ptr + request)
        slot = trunk + branch
        position = slot
        tl.store(depth_ptr + here, tl.where(used, branch, -1), mask=inside)
    else:
        depth = tl.load(limit_ptr + here, mask=inside, other=-1)
        used = depth >= 0
        slot = trunk + draft_len + 1 + step * branches + branch
        position = trunk + 1 + depth + step
    if step == 0:
        tokens = tl.load(tokens_ptr + here, mask=inside & used, other=0)
        tl.store(ids_ptr + here, tokens, mask=inside)
    physical = slot
    if PAGED:
        page = tl.maximum(tl.minimum(slot // page_size, pages - 1), 0)
        page = tl.load(table_ptr + request * table_stride_b + page, mask=inside, other=0)
        physical = page.to(tl.int64) * page_size + slot % page_size
    there = step.to(tl.int64) * tl.num_programs(0) * branches + here
    tl.store(positions_ptr + there, tl.where(used, position, 0), mask=inside)
    tl.store(slots_ptr + there, slot, mask=inside)
    tl.store(physical_ptr + there, physical, mask=inside)


def _layout_launch(
    tokens: torch.Tensor,
    limit: torch.Tensor,
    trunk_len: torch.Tensor,
    page_table: torch.Tensor | None,
    out: Layout,
    *,
    draft_len: int,
    page_size: int,
    chain: bool,
) -> None:
    steps, batch, branches = out.slots.shape
    if not out.ids.numel():
        return
    config = layout_config(branches)
    with on_device(tokens.device):
        _layout_kernel[(batch, triton.cdiv(branches, config.block_m), steps)](
            tokens,
            limit,
            trunk_len,
            trunk_len if page_table is None else page_table,
            out.ids,
            out.positions,
            out.slots,
            out.physical,
            out.depth,
            branches=branches,
            draft_len=draft_len,
            pages=0 if page_table is None else page_table.shape[1],
            page_size=page_size,
            table_stride_b=0 if page_table is None else page_table.stride(0),
            CHAIN=chain,
            PAGED=page_table is not None,
            BLOCK_M=config.block_m,
            num_warps=config.num_warps,
        )


def tree_layout(
    depth: torch.Tensor,
    tokens: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    draft_len: int,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    out: Layout | None = None,
    impl: Impl = "auto",
) -> Layout:
    """Return the ids, positions and slots of all branches for steps 0..draft_len.

    Args:
        depth: [B, M] int32, accepted drafts before the branch; negative: unused.
        tokens: [B, M] int64, the extra token of each branch.
        trunk_len: [B] int32 | int64, keys in the cache before the round.
        draft_len: K >= 0.
        page_table: [B, pages] int32, and its page_size, for `physical`. Slots past the table take
            its last page.
        out: a Layout of the same shapes, overwritten and returned (its depth is not touched).
    Returns:
        Layout with S = draft_len + 1; `depth` is the argument itself.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        1 launch; 0 host syncs.
    """
    check_int("draft_len", draft_len, 0)
    check_tensor("depth", depth, (None, None), torch.int32)
    _check(tokens, depth, trunk_len, page_table, page_size)
    out = _layout(out, tokens, draft_len + 1, depth)
    call(
        "tree_layout",
        depth.contiguous(), tokens.contiguous(), trunk_len.contiguous(), page_table, draft_len,
        page_size, resolve_impl(impl, tokens.device),
        out.ids, out.positions, out.slots, out.physical,
    )  # fmt: skip
    return Layout(out.ids, out.positions, out.slots, out.physical, depth)


def chain_layout(
    tokens: torch.Tensor,
    count: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    out: Layout | None = None,
    impl: Impl = "auto",
) -> Layout:
    """Return the layout of a chain: prefill, or the last token with its drafts for verification.

    Args:
        tokens: [B, M] int64; of row b the first count[b] are used.
        count: [B] int32 | int64.
        trunk_len, page_table, page_size, out: as for `tree_layout`; out.depth is written too.
    Returns:
        Layout with S = 1 and depth 0, 1, .. count - 1, PAD: what `tree_attention` takes at step -1.
        Slots of unused columns lie past the row's own tokens.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        1 launch; 0 host syncs.
    """
    check_tensor("tokens", tokens, (None, None), torch.int64)
    _check(tokens, tokens, trunk_len, page_table, page_size)
    check_tensor("count", count, trunk_len.shape, (torch.int32, torch.int64), tokens.device)
    depth = tokens.new_empty(tokens.shape, dtype=torch.int32) if out is None else out.depth
    check_out("out.depth", depth, tokens.shape, torch.int32, tokens.device)
    out = _layout(out, tokens, 1, depth)
    call(
        "chain_layout",
        tokens.contiguous(), count.contiguous(), trunk_len.contiguous(), page_table, page_size,
        resolve_impl(impl, tokens.device),
        out.ids, out.positions, out.slots, out.physical, out.depth,
    )  # fmt: skip
    return out


def _layout(out: Layout | None, tokens: torch.Tensor, steps: int, depth: torch.Tensor) -> Layout:
    """`out` if it can be written, or a new one."""
    if out is not None:
        check_out("out.ids", out.ids, tokens.shape, torch.int64, tokens.device)
        for name in ("positions", "slots", "physical"):
            shape = steps, *tokens.shape
            check_out(f"out.{name}", getattr(out, name), shape, torch.int64, tokens.device)
        return out
    ids = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    positions, slots, physical = (tokens.new_empty((steps, *tokens.shape)) for _ in range(3))
    return Layout(ids, positions, slots, physical, depth)


def _check(
    tokens: torch.Tensor,
    like: torch.Tensor,
    trunk_len: torch.Tensor,
    page_table: torch.Tensor | None,
    page_size: int,
) -> None:
    shape, device = like.shape, like.device
    check_tensor("tokens", tokens, shape, torch.int64, device)
    check_tensor("trunk_len", trunk_len, shape[:1], (torch.int32, torch.int64), device)
    if page_table is not None:
        wanted = shape[0], None
        check_tensor("page_table", page_table, wanted, torch.int32, device, contiguous_last=True)
        if shape[0]:
            check_sizes("page_table", page_table, pages=page_table.shape[1])
    check_int("page_size", page_size, 1)


def _tree_layout(
    depth, tokens, trunk_len, page_table, draft_len, page_size, impl,
    ids, positions, slots, physical,
) -> None:  # fmt: skip
    out = Layout(ids, positions, slots, physical, depth)
    if impl == "triton":
        _layout_launch(
            tokens, depth, trunk_len, page_table, out,
            draft_len=draft_len, page_size=page_size, chain=False,
        )  # fmt: skip
        return
    result = tree_layout_reference(
        depth, tokens, trunk_len, draft_len=draft_len, page_table=page_table, page_size=page_size
    )
    _copy(result, out)


def _chain_layout(
    tokens, count, trunk_len, page_table, page_size, impl, ids, positions, slots, physical, depth
) -> None:  # fmt: skip
    out = Layout(ids, positions, slots, physical, depth)
    if impl == "triton":
        _layout_launch(
            tokens, count, trunk_len, page_table, out, draft_len=0, page_size=page_size, chain=True
        )
        return
    result = chain_layout_reference(
        tokens, count, trunk_len, page_table=page_table, page_size=page_size
    )
    _copy(result, out)
    depth.copy_(result.depth)


def _copy(result: Layout, out: Layout) -> None:
    for name in ("ids", "positions", "slots", "physical"):
        getattr(out, name).copy_(getattr(result, name))


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps) of a tree's and of a chain's layout."""
    pointers = {
        **dict.fromkeys(("tokens_ptr", "ids_ptr", "positions_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("limit_ptr", "trunk_ptr", "table_ptr", "depth_ptr"), "*i32"),
        "physical_ptr": "*i64",
    }
    integers = ("branches", "draft_len", "pages", "page_size", "table_stride_b")
    signature = {**pointers, **dict.fromkeys(integers, "i32")}
    config = layout_config(24)
    return [
        (
            f"layout-{'chain' if chain else 'tree'}",
            _layout_kernel,
            signature,
            {"CHAIN": chain, "PAGED": True, "BLOCK_M": config.block_m},
            config.num_warps,
        )
        for chain in (False, True)
    ]
