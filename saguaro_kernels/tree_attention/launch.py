"""Launch of tree attention: sizes of tiles and shares, the partial results, and what to compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .._launch import INTERPRETED, check_sizes, on_device
from .kernels import LOG2E, SIZES, STRIDES, _tree_attention_kernel, _tree_attention_merge_kernel

_PROGRAMS = 264
"""Programs worth having: two per multiprocessor of a large GPU."""


@dataclass(frozen=True)
class TreeAttentionConfig:
    """Sizes of one launch; `splits` shares of the keys are merged by a second launch if > 1."""

    block_rows: int
    block_keys: int
    splits: int
    num_warps: int


def tree_attention_config(
    rows: int, programs: int, capacity: int, head_dim: int, dtype: torch.dtype
) -> TreeAttentionConfig:
    """For `rows` = M * group heads, `programs` = B * Hkv, and `capacity` slots a request may hold.

    All rows share one tile where registers allow it, as each tile reads the trunk once. A share has
    at least 4 keys a row, so that its partial result costs less than the keys it reads.
    """
    block_d = max(64, triton.next_power_of_2(head_dim))
    # float32 is computed without tensor cores, from registers: smaller tiles, more threads.
    wide = dtype == torch.float32
    most = 4096 // block_d if wide else 64 if block_d == 256 else 128 if rows > 256 else 256
    block_rows = min(max(32 if wide else 16, triton.next_power_of_2(rows)), most)
    # As many keys as registers hold beside the output: more spill on sm_80 and gfx942.
    block_keys = 16 if wide or block_d == 256 or block_rows * block_d >= 32768 else 64
    num_warps = 16 if wide else 8 if block_d == 256 or block_rows > 64 else 4
    row_blocks = triton.cdiv(rows, block_rows)
    least = max(128, triton.next_power_of_2(4 * min(rows, block_rows)))
    splits = min(_PROGRAMS // max(1, programs * row_blocks), capacity // least)
    return TreeAttentionConfig(block_rows, block_keys, max(1, splits), num_warps)


def _config(
    query: torch.Tensor, key_pages: torch.Tensor, page_table: torch.Tensor
) -> TreeAttentionConfig:
    batch, branches, heads, head_dim = query.shape
    _, page, kv_heads, _ = key_pages.shape
    check_sizes("key_pages", key_pages, page=page, Hkv=kv_heads)
    rows, capacity = branches * (heads // kv_heads), page_table.shape[1] * page
    return tree_attention_config(rows, batch * kv_heads, capacity, head_dim, query.dtype)


def tree_attention_workspace(
    query: torch.Tensor, key_pages: torch.Tensor, page_table: torch.Tensor
) -> int:
    """Elements of the float32 `workspace` of `tree_attention` for tensors of these shapes."""
    splits = _config(query, key_pages, page_table).splits
    return 0 if splits == 1 else splits * (query.numel() + query[..., 0].numel())


def _tree_attention_launch(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    step: int | torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    *,
    draft_len: int,
    scale: float,
    softcap: float,
    window: int,
    config: TreeAttentionConfig | None = None,
) -> None:
    batch, branches, heads, head_dim = query.shape
    _, page, kv_heads, _ = key_pages.shape
    config = config or _config(query, key_pages, page_table)
    rows, total = branches * (heads // kv_heads), query[..., 0].numel()
    if not total:
        return
    split = config.splits > 1
    partial, lse = out, out
    if split:
        size = config.splits * total
        if workspace is None:
            workspace = query.new_empty(size * (head_dim + 1), dtype=torch.float32)
        partial, lse = workspace[: size * head_dim], workspace[size * head_dim :]
    strides = (*query.stride()[:3], *key_pages.stride()[:3], *value_pages.stride()[:3])
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    row_blocks = triton.cdiv(rows, config.block_rows)
    block_d = max(16, triton.next_power_of_2(head_dim))
    with on_device(query.device):
        _tree_attention_kernel[(batch * kv_heads * row_blocks, config.splits)](
            query,
            key_pages,
            value_pages,
            page_table,
            trunk_len,
            depth,
            step,
            partial,
            lse,
            *(stride // unit for stride in strides),
            page_table.stride(0),
            draft_len=draft_len,
            branches=branches,
            kv_heads=kv_heads,
            row_blocks=row_blocks,
            splits=config.splits,
            scale_log2=scale / softcap if softcap > 0 else scale * LOG2E,
            softcap_log2=softcap * LOG2E,
            window=window,
            GROUP=heads // kv_heads,
            PAGE=page,
            HEAD_DIM=head_dim,
            BLOCK_R=config.block_rows,
            BLOCK_N=config.block_keys,
            BLOCK_D=block_d,
            UNIT=unit,
            TREE=isinstance(step, torch.Tensor) or step >= 0,
            DEVICE_STEP=isinstance(step, torch.Tensor),
            SOFTCAP=softcap > 0,
            WINDOW=window > 0,
            SPLIT=split,
            INTERPRETED=INTERPRETED,
            num_warps=config.num_warps,
        )
        if split:
            _tree_attention_merge_kernel[(total,)](
                partial,
                lse,
                out,
                rows=total,
                splits=config.splits,
                HEAD_DIM=head_dim,
                BLOCK_S=triton.next_power_of_2(config.splits),
                BLOCK_D=block_d,
                num_warps=1 if config.splits * block_d <= 1024 else 4,
            )


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps): a decode, a tree and a wide tree tile."""
    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    cases: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = []
    for name, branches, group, head_dim, dtype, tree, split, extra in (
        ("verify-G3-D64", 5, 3, 64, torch.bfloat16, False, False, False),
        ("tree-M20-G3-D64", 20, 3, 64, torch.bfloat16, True, True, False),
        ("tree-M24-G8-D128", 24, 8, 128, torch.bfloat16, True, True, False),
        ("tree-M24-G4-D256-softcap-window", 24, 4, 256, torch.float16, True, True, True),
        ("tree-M16-G1-D80", 16, 1, 80, torch.float16, True, False, False),
        ("tree-M20-G3-D64", 20, 3, 64, torch.float32, True, True, True),
        ("verify-G4-D128", 5, 4, 128, torch.float32, False, True, False),
        ("prefill-G4-D128", 512, 4, 128, torch.bfloat16, False, False, False),
    ):
        config = tree_attention_config(branches * group, 8, 8192, head_dim, dtype)
        kind = types[dtype]
        pointers = ("query_ptr", "key_ptr", "value_ptr")
        signature = dict.fromkeys(pointers, f"*{kind}")
        signature |= dict.fromkeys(("table_ptr", "trunk_ptr", "depth_ptr"), "*i32")
        signature["step"] = "*i32" if tree else "i32"
        signature |= {"out_ptr": "*fp32" if split else f"*{kind}", "lse_ptr": "*fp32"}
        signature |= dict.fromkeys(set((*STRIDES, *SIZES)) - {"step"}, "i32")
        signature |= {"scale_log2": "fp32", "softcap_log2": "fp32"}
        constexprs: dict[str, Any] = {
            "GROUP": group,
            "PAGE": 16,
            "HEAD_DIM": head_dim,
            "BLOCK_R": config.block_rows,
            "BLOCK_N": config.block_keys,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "UNIT": 16,
            "TREE": tree,
            "DEVICE_STEP": tree,
            "SOFTCAP": extra,
            "WINDOW": extra,
            "SPLIT": split,
            "INTERPRETED": False,
        }
        label = f"tree_attention-{name}-{kind}"
        cases.append((label, _tree_attention_kernel, signature, constexprs, config.num_warps))
    signature = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    signature |= {"rows": "i32", "splits": "i32"}
    constexprs = {"HEAD_DIM": 128, "BLOCK_S": 16, "BLOCK_D": 128}
    cases.append(
        ("tree_attention_merge-D128", _tree_attention_merge_kernel, signature, constexprs, 4)
    )
    return cases
