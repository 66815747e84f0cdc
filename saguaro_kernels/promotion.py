"""The keys and values of the branch that was hit become the next round's chain.

    for s = 0..draft_len:   slot trunk_len + draft_len + 1 + s*M + i  ->  slot trunk_len + k + 1 + s

i is the branch, k = depth[b] the accepted length it was drafted for; trunk_len is that of the round
the branch was drafted in. Nothing is recomputed on a hit.

The slots may overlap (draft_len = 2, M = 2, k = 2, i = 1: step 1 is written where step 0 is read),
so a program reads all of its positions before it writes any. Copying one by one in ascending s is
safe too: the slot written at s is at most trunk_len + draft_len + 1 + s (as k <= draft_len), below
every source of a later step (trunk_len + draft_len + 1 + s'*M + i, as M >= 1).

With pages of one slot a branch owns whole pages, and `promote_pages` moves no key at all: the page
table's entries change places. The chain's slots get the branch's pages, and the pages they had go
to the branch's slots that are left, both in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._call import call
from ._launch import Impl, check_int, check_sizes, check_tensor, on_device, resolve_impl
from .errors import DTypeError, ShapeError

_LENGTHS = (torch.int32, torch.int64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PromotionConfig:
    """Elements that a program moves of each of its positions, all of which it holds at once."""

    block_e: int
    num_warps: int


def promotion_config(positions: int, inner: int) -> PromotionConfig:
    """About 4096 elements a program, of `inner` elements a position; rows of 64 at least."""
    held = triton.next_power_of_2(positions)
    block_e = min(triton.next_power_of_2(inner), max(64, 4096 // held))
    return PromotionConfig(block_e, num_warps=4)


def _hits(depth: torch.Tensor, branch: torch.Tensor, draft_len: int, branches: int) -> torch.Tensor:
    """Which requests have a hit: branch and depth both in range."""
    return (branch >= 0) & (branch < branches) & (depth >= 0) & (depth <= draft_len)


@torch.no_grad()
def promote_branch_reference(
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    draft_len: int,
    branches: int,
) -> None:
    """See `promote_branch`."""
    page_size = kv_pages.shape[-3]
    hit = _hits(depth, branch, draft_len, branches).nonzero()[:, 0]
    step = torch.arange(draft_len + 1, device=kv_pages.device)
    trunk, table = trunk_len[hit].long()[:, None], page_table[hit].long()
    source = trunk + draft_len + 1 + step * branches + branch[hit].long()[:, None]
    target = trunk + depth[hit].long()[:, None] + 1 + step
    source_page, target_page = (table.gather(1, slot // page_size) for slot in (source, target))
    # An indexed read makes a copy, so overlapping slots cannot disturb one another.
    moved = kv_pages[..., source_page, source % page_size, :, :]
    kv_pages[..., target_page, target % page_size, :, :] = moved


_INTEGERS = (
    *("plane_stride", "page_stride", "slot_stride", "table_stride_b"),
    *("draft_len", "branches", "page_size", "chunks"),
)


@triton.jit(do_not_specialize=_INTEGERS)
def _promote_branch_kernel(
    kv_ptr,  # [planes, P, page, Hkv * D]
    table_ptr,  # [B, pages] int32
    trunk_ptr,  # [B]
    depth_ptr,  # [B]
    branch_ptr,  # [B]
    plane_stride,
    page_stride,
    slot_stride,
    table_stride_b,
    draft_len,
    branches,
    page_size,
    chunks,
    INNER: tl.constexpr,  # Hkv * D
    UNIT: tl.constexpr,  # of the strides, in elements
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (B, planes * chunks): BLOCK_E elements of all draft_len + 1 positions. Moves them."""
    request = tl.program_id(0).to(tl.int64)
    plane = (tl.program_id(1) // chunks).to(tl.int64)
    branch = tl.load(branch_ptr + request).to(tl.int64)
    depth = tl.load(depth_ptr + request)
    if (branch >= 0) & (branch < branches) & (depth >= 0) & (depth <= draft_len):
        trunk = tl.load(trunk_ptr + request).to(tl.int64)
        step = tl.arange(0, BLOCK_S)
        element = tl.program_id(1) % chunks * BLOCK_E + tl.arange(0, BLOCK_E)
        source = trunk + draft_len + 1 + step * branches + branch
        target = trunk + depth + 1 + step
        kv_ptr += plane * plane_stride * UNIT
        table_ptr += request * table_stride_b
        moves = step <= draft_len
        mask = moves[:, None] & (element < INNER)[None, :]
        page = tl.load(table_ptr + source // page_size, mask=moves, other=0).to(tl.int64)
        row = kv_ptr + (page * page_stride + source % page_size * slot_stride) * UNIT
        moved = tl.load(row[:, None] + element[None, :], mask=mask)
        page = tl.load(table_ptr + target // page_size, mask=moves, other=0).to(tl.int64)
        row = kv_ptr + (page * page_stride + target % page_size * slot_stride) * UNIT
        tl.debug_barrier()
        tl.store(row[:, None] + element[None, :], moved, mask=mask)


def _promote_branch_launch(
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    *,
    draft_len: int,
    branches: int,
    config: PromotionConfig | None = None,
) -> None:
    planes, _, page_size, heads, head_dim = kv_pages.shape
    inner, batch = heads * head_dim, branch.shape[0]
    if not planes * batch * inner:
        return
    strides = kv_pages.stride()[:3]
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    config = config or promotion_config(draft_len + 1, inner)
    chunks = triton.cdiv(inner, config.block_e)
    with on_device(kv_pages.device):
        _promote_branch_kernel[(batch, planes * chunks)](
            kv_pages,
            page_table,
            trunk_len,
            depth,
            branch,
            *(stride // unit for stride in strides),
            table_stride_b=page_table.stride(0),
            draft_len=draft_len,
            branches=branches,
            page_size=page_size,
            chunks=chunks,
            INNER=inner,
            UNIT=unit,
            BLOCK_S=triton.next_power_of_2(draft_len + 1),
            BLOCK_E=config.block_e,
            num_warps=config.num_warps,
        )


def promote_branch(
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    draft_len: int,
    branches: int,
    impl: Impl = "auto",
) -> None:
    """Move the keys and values of each request's hit branch into its chain, in place.

    Args:
        kv_pages: [..., P, page, Hkv, D], any dtype of 1, 2, 4 or 8 bytes: all layers, keys and
            values at once, as [L, 2, P, page, Hkv, D]; the last two dimensions contiguous, the
            leading ones of one stride. Written.
        page_table: [B, pages] int32.
        trunk_len: [B] int32 | int64, of the round that drafted the branch.
        depth: [B] int32 | int64, 0..draft_len: accepted drafts.
        branch: [B] int32 | int64, 0..branches - 1. A branch or a depth outside its range, as -1, is
            no hit: nothing of this request moves.
        draft_len, branches: K and M of the layout of `tree_layout`.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        draft_len + 1 positions of the hit requests read and written once; 1 launch; 0 host syncs.
    Source:
        arXiv 2603.03251: a prepared chain is used at once, nothing of it is computed again; the
        layout is that of `tree_layout`. docs/theory.md, "One round".
    """
    if kv_pages.dim() < 4:
        raise ShapeError(f"kv_pages: got shape {list(kv_pages.shape)}, want [..., P, page, Hkv, D]")
    count, page_size, heads, head_dim = kv_pages.shape[-4:]
    check_sizes("kv_pages", kv_pages, P=count, page=page_size, Hkv=heads, D=head_dim)
    if kv_pages.element_size() not in _WORDS:
        raise DTypeError(f"kv_pages: got {kv_pages.dtype}, want a dtype of 1, 2, 4 or 8 bytes")
    device = kv_pages.device
    check_tensor("page_table", page_table, (None, None), torch.int32, device, contiguous_last=True)
    _check_lengths(page_table, trunk_len, depth, branch, draft_len, branches)
    try:
        planes = kv_pages.view(-1, *kv_pages.shape[-4:])
        planes.view(*planes.shape[:3], -1)
    except RuntimeError as error:
        raise ShapeError(
            f"kv_pages: got strides {kv_pages.stride()}, want the last two dimensions contiguous "
            "and leading ones that merge; pass one contiguous tensor"
        ) from error
    call(
        "promote_branch",
        planes, page_table, trunk_len.contiguous(), depth.contiguous(), branch.contiguous(),
        draft_len, branches, resolve_impl(impl, device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride_b", "draft_len", "branches"])
def _promote_pages_kernel(
    table_ptr,  # [B, slots] int32
    trunk_ptr,  # [B]
    depth_ptr,  # [B]
    branch_ptr,  # [B]
    table_stride_b,
    draft_len,
    branches,
    BLOCK_S: tl.constexpr,
):
    """Grid (B,): the table of one request. Reads all entries it changes before it writes any."""
    request = tl.program_id(0).to(tl.int64)
    branch = tl.load(branch_ptr + request).to(tl.int64)
    depth = tl.load(depth_ptr + request)
    if (branch >= 0) & (branch < branches) & (depth >= 0) & (depth <= draft_len):
        trunk = tl.load(trunk_ptr + request).to(tl.int64)
        step = tl.arange(0, BLOCK_S)
        moves = step <= draft_len
        target = trunk + depth + 1
        source = trunk + draft_len + 1 + branch
        table_ptr += request * table_stride_b
        kept = tl.load(table_ptr + source + step * branches, mask=moves, other=0)
        displaced = tl.load(table_ptr + target + step, mask=moves, other=0)
        # Chain slots that are no branch slot give up their page; branch slots that are no chain
        # slot get one.
        behind = target + step - source
        taken = (behind >= 0) & (behind % branches == 0) & (behind <= draft_len * branches)
        loses = moves & (taken == 0)
        ahead = source + step * branches - target
        needs = moves & ((ahead < 0) | (ahead > draft_len))
        place = tl.cumsum(loses.to(tl.int32), 0)
        wanted = tl.cumsum(needs.to(tl.int32), 0)
        same = (needs[:, None] & loses[None, :]) & (wanted[:, None] == place[None, :])
        given = tl.sum(tl.where(same, displaced[None, :], 0), 1)
        tl.debug_barrier()
        tl.store(table_ptr + target + step, kept, mask=moves)
        tl.store(table_ptr + source + step * branches, given, mask=needs)


@torch.no_grad()
def promote_pages_reference(
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    draft_len: int,
    branches: int,
) -> None:
    """See `promote_pages`."""
    hits = _hits(depth, branch, draft_len, branches).nonzero()[:, 0].tolist()
    for row in hits:
        trunk, k, i = int(trunk_len[row]), int(depth[row]), int(branch[row])
        steps = range(draft_len + 1)
        source = [trunk + draft_len + 1 + s * branches + i for s in steps]
        target = [trunk + k + 1 + s for s in steps]
        lost = [page_table[row, slot].item() for slot in target if slot not in source]
        page_table[row, target] = page_table[row, source]
        left = [slot for slot in source if slot not in target]
        page_table[row, left] = torch.tensor(lost, dtype=torch.int32, device=page_table.device)


def promote_pages(
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    draft_len: int,
    branches: int,
    impl: Impl = "auto",
) -> None:
    """Do what `promote_branch` does where a page is one slot, by the page table alone, in place.

    Args:
        page_table: [B, slots] int32, the page of each slot. Of each request the pages from its
            chain on must be its own: they change places. Written.
        trunk_len, depth, branch, draft_len, branches: as for `promote_branch`.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        4 * (draft_len + 1) integers per hit request; 1 launch; 0 host syncs. The reference reads
        the lengths on the host.
    """
    check_tensor("page_table", page_table, (None, None), torch.int32, contiguous_last=True)
    _check_lengths(page_table, trunk_len, depth, branch, draft_len, branches)
    call(
        "promote_pages",
        page_table, trunk_len.contiguous(), depth.contiguous(), branch.contiguous(),
        draft_len, branches, resolve_impl(impl, page_table.device),
    )  # fmt: skip


def _check_lengths(page_table, trunk_len, depth, branch, draft_len, branches) -> None:
    check_int("draft_len", draft_len, 0)
    check_int("branches", branches, 1)
    batch = page_table.shape[:1]
    if batch[0]:
        check_sizes("page_table", page_table, pages=page_table.shape[1])
    for name, value in (("trunk_len", trunk_len), ("depth", depth), ("branch", branch)):
        check_tensor(name, value, batch, _LENGTHS, page_table.device)


def _promote_pages(page_table, trunk_len, depth, branch, draft_len, branches, impl) -> None:
    lengths = {"trunk_len": trunk_len, "depth": depth, "branch": branch}
    if impl != "triton":
        promote_pages_reference(page_table, **lengths, draft_len=draft_len, branches=branches)
    elif branch.shape[0]:
        with on_device(page_table.device):
            _promote_pages_kernel[(branch.shape[0],)](
                page_table, *lengths.values(), table_stride_b=page_table.stride(0),
                draft_len=draft_len, branches=branches,
                BLOCK_S=triton.next_power_of_2(draft_len + 1), num_warps=1,
            )  # fmt: skip


def _promote_branch(
    kv_pages, page_table, trunk_len, depth, branch, draft_len, branches, impl
) -> None:  # fmt: skip
    # Words of their size: the kernels and the reference move dtypes that they cannot compute with.
    kv_pages = kv_pages.view(_WORDS[kv_pages.element_size()])
    if impl == "triton":
        _promote_branch_launch(
            kv_pages, page_table, trunk_len, depth, branch, draft_len=draft_len, branches=branches
        )
        return
    promote_branch_reference(
        kv_pages, page_table, trunk_len=trunk_len, depth=depth, branch=branch,
        draft_len=draft_len, branches=branches,
    )  # fmt: skip


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps): bfloat16 and float32 pages, a table."""
    pointers = ("table_ptr", "trunk_ptr", "depth_ptr", "branch_ptr")
    config = promotion_config(6, 1024)
    lengths = dict.fromkeys(("table_stride_b", "draft_len", "branches"), "i32")
    table = dict.fromkeys(pointers, "*i32") | lengths
    return [
        ("promote_pages-K5", _promote_pages_kernel, table, {"BLOCK_S": 8}, 1),
        *(
            (
                f"promote_branch-K5-{kind}",
                _promote_branch_kernel,
                {
                    "kv_ptr": f"*{word}",
                    **dict.fromkeys(pointers, "*i32"),
                    **dict.fromkeys(_INTEGERS, "i32"),
                },
                {"INNER": 1024, "UNIT": 16, "BLOCK_S": 8, "BLOCK_E": config.block_e},
                config.num_warps,
            )
            for kind, word in (("bf16", "i16"), ("fp32", "i32"))
        ),
    ]
