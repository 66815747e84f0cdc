"""The keys and values of the branch that was hit become the next round's chain; nothing is recomputed.

    for s = 0..draft_len:    slot trunk_len + draft_len + 1 + s*M + i   ->   slot trunk_len + k + 1 + s

i is the branch, k = depth[b] the accepted length it was drafted for. Copying in ascending s is safe in
place: k <= draft_len, so the slot written at s is at most trunk_len + draft_len + 1 + s, below every
source of a later s' (trunk_len + draft_len + 1 + s'*M + i, and M >= 1).
"""

from __future__ import annotations

import torch


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
    page_size = kv_pages.shape[-3]
    row = (branch >= 0).nonzero()[:, 0]
    if not row.numel():
        return
    step = torch.arange(draft_len + 1, device=kv_pages.device)
    trunk = trunk_len[row].long()[:, None]
    source = trunk + draft_len + 1 + step * branches + branch[row].long()[:, None]
    target = trunk + depth[row].long()[:, None] + 1 + step
    table = page_table[row].long()

    source_page, target_page = (table.gather(1, slot // page_size) for slot in (source, target))
    # An indexed read makes a copy, so overlapping slots cannot disturb one another.
    moved = kv_pages[..., source_page, source % page_size, :, :]
    kv_pages[..., target_page, target % page_size, :, :] = moved


def promote_branch(
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    branch: torch.Tensor,
    draft_len: int,
    branches: int,
    impl: str = "auto",
) -> None:
    promote_branch_reference(
        kv_pages,
        page_table,
        trunk_len=trunk_len,
        depth=depth,
        branch=branch,
        draft_len=draft_len,
        branches=branches,
    )
