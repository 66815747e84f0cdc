"""Kernels of tree attention: a tile of branches x group heads, split over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
STRIDES = (
    *("q_stride_b", "q_stride_m", "q_stride_h", "k_stride_p", "k_stride_s", "k_stride_h"),
    *("v_stride_p", "v_stride_s", "v_stride_h", "table_stride_b"),
)
SIZES = ("step", "draft_len", "branches", "kv_heads", "row_blocks", "splits", "window")


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """a @ b + acc in float32. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=[*STRIDES, *SIZES])
def _tree_attention_kernel(
    query_ptr,  # [B, M, Hq, D]
    key_ptr,  # [P, PAGE, Hkv, D]
    value_ptr,  # [P, PAGE, Hkv, D]
    table_ptr,  # [B, pages] int32
    trunk_ptr,  # [B]
    depth_ptr,  # [B, M] int32
    step,  # an int, or with DEVICE_STEP a pointer to one
    out_ptr,  # [B, M, Hq, D]; with SPLIT [splits, B, M, Hq, D] float32
    lse_ptr,  # with SPLIT [splits, B, M, Hq] float32, base 2
    q_stride_b,
    q_stride_m,
    q_stride_h,
    k_stride_p,
    k_stride_s,
    k_stride_h,
    v_stride_p,
    v_stride_s,
    v_stride_h,
    table_stride_b,
    draft_len,
    branches,  # M
    kv_heads,
    row_blocks,
    splits,
    scale_log2,  # scale * log2(e), or scale / softcap
    softcap_log2,  # softcap * log2(e)
    window,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,  # of the strides, in elements
    TREE: tl.constexpr,  # False: step is -1, no branch keys
    DEVICE_STEP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (B * Hkv * row_blocks, splits): BLOCK_R rows (branch, group head), a share of the keys.
    Writes their output; with SPLIT the share's own and its log-sum (-inf: nothing written)."""
    PADDED: tl.constexpr = HEAD_DIM != BLOCK_D
    block = tl.program_id(0) % row_blocks
    head = tl.program_id(0) // row_blocks % kv_heads
    request = (tl.program_id(0) // row_blocks // kv_heads).to(tl.int64)
    split = tl.program_id(1)

    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    branch = row // GROUP
    query_head = head * GROUP + row % GROUP
    depth = tl.load(depth_ptr + request * branches + branch, mask=branch < branches, other=-1)
    used = depth >= 0
    deepest = tl.max(depth, 0)
    trunk = tl.load(trunk_ptr + request).to(tl.int32)

    # Slots below `end` are trunk and chain; the branches' own are own_start .. last - 1.
    end = tl.where(deepest >= 0, trunk + deepest + 1, 0)
    own_start = trunk + draft_len + 1
    last = end
    steps = 0
    if TREE:
        steps = (tl.load(step) if DEVICE_STEP else step) + 1
        last = tl.where((deepest >= 0) & (steps > 0), own_start + steps * branches, end)
    first = 0
    position = trunk + depth + steps  # of the query
    if WINDOW:
        first = tl.min(tl.where(used, position, last), 0) - window + 1
        first = tl.maximum(tl.minimum(first, own_start) if TREE else first, 0)

    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    q_offset = (
        request * q_stride_b + branch.to(tl.int64) * q_stride_m + query_head * q_stride_h
    ) * UNIT
    q = tl.load(
        query_ptr + q_offset[:, None] + d[None, :], mask=used[:, None] & in_head[None, :], other=0.0
    )
    table_ptr += request * table_stride_b
    key_ptr += head.to(tl.int64) * k_stride_h * UNIT
    value_ptr += head.to(tl.int64) * v_stride_h * UNIT
    sight = tl.where(used, trunk + depth, -1)  # the last trunk or chain slot a row sees
    owned = tl.where(used, branch, -1)
    top = tl.full([BLOCK_R], -1e30, tl.float32)  # finite: no NaN while nothing has been seen
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)

    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
    share = tl.cdiv(tiles, splits)
    for tile in range(split * share, tl.minimum(split * share + share, tiles)):
        slot = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        needed = slot < end
        if TREE:
            own = slot - own_start
            is_own = (own >= 0) & (slot < last)
            owner = own % branches
            # Keys of unused branches may never have been written: not read.
            needed |= tl.load(depth_ptr + request * branches + owner, mask=is_own, other=-1) >= 0
        seen = slot[None, :] <= sight[:, None]
        key_position = slot[None, :]
        if TREE:
            mine = is_own[None, :] & (owner[None, :] == owned[:, None])
            seen |= mine
            if WINDOW:
                own_position = sight[:, None] + 1 + own[None, :] // branches
                key_position = tl.where(mine, own_position, key_position)
        if WINDOW:
            seen &= key_position > position[:, None] - window
            # Nor are slots between the windows: a weight of 0 would not make a NaN harmless.
            needed &= tl.max(seen.to(tl.int32), 0) > 0
        page = tl.load(table_ptr + slot // PAGE, mask=needed, other=0).to(tl.int64)
        k_row = key_ptr + (page * k_stride_p + slot % PAGE * k_stride_s) * UNIT
        k = tl.load(
            k_row[None, :] + d[:, None],
            mask=needed[None, :] & in_head[:, None] if PADDED else needed[None, :],
            other=0.0,
        )
        score = _dot(q, k, None, INTERPRETED) * scale_log2
        if SOFTCAP:
            score = softcap_log2 * (1.0 - 2.0 / (tl.exp(2.0 * score) + 1.0))

        score = tl.where(seen, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 1)
        v_row = value_ptr + (page * v_stride_p + slot % PAGE * v_stride_s) * UNIT
        v = tl.load(
            v_row[:, None] + d[None, :],
            mask=needed[:, None] & in_head[None, :] if PADDED else needed[:, None],
            other=0.0,
        )
        acc = _dot(weight.to(v.dtype), v, acc * fade[:, None], INTERPRETED)
        top = new_top

    # Who saw nothing is 0 even beside a NaN that others saw; a NaN that was seen stays one.
    blind = total == 0.0
    acc = tl.where(blind[:, None], 0.0, acc) / tl.where(blind, 1.0, total)[:, None]
    batch = tl.num_programs(0) // row_blocks // kv_heads
    out_row = (request * branches + branch) * (kv_heads * GROUP) + query_head
    written = branch < branches
    if SPLIT:
        out_row += split.to(tl.int64) * batch * branches * (kv_heads * GROUP)
        lse = tl.where(blind, float("-inf"), top + tl.log2(tl.where(blind, 1.0, total)))
        tl.store(lse_ptr + out_row, lse, mask=written)
        written &= total != 0.0
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=written[:, None] & in_head[None, :],
    )


@triton.jit(do_not_specialize=["rows", "splits"])
def _tree_attention_merge_kernel(
    partial_ptr,  # [splits, rows, D] float32
    lse_ptr,  # [splits, rows] float32, base 2
    out_ptr,  # [rows, D]
    rows,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (rows,): the softmax over all shares of one (request, branch, head). Writes out."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    lse = tl.load(
        lse_ptr + split * rows.to(tl.int64) + row, mask=split < splits, other=float("-inf")
    )
    filled = lse != float("-inf")
    top = tl.max(lse, 0)
    weight = tl.where(filled, tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    partial = tl.load(
        partial_ptr + (split * rows.to(tl.int64) + row)[:, None] * HEAD_DIM + d[None, :],
        mask=filled[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    merged = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + d, merged.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
