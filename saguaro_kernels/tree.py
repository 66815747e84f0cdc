"""Where every branch stands: token ids, positions and KV slots of all tree steps, from device lengths.

    step s of branch i, depth k = depth[b, i]:    position = trunk_len + 1 + k + s
                                                  slot     = trunk_len + draft_len + 1 + s*M + i
    token i of a chain:                           position = slot = trunk_len + i

trunk_len is the number of keys in the cache before the round; the chain takes the next draft_len + 1
slots, the branches the slots after it, step-major, so one tree step writes M neighbouring slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._launch import check_tensor
from .errors import ConfigError

PAD = -1


@dataclass(frozen=True)
class Layout:
    """Of S steps of M branches: S = draft_len + 1 for a tree, and for a chain S = 1, M = its width."""

    ids: torch.Tensor
    """[B, M] int64: the token each branch starts with, 0 where unused."""
    positions: torch.Tensor
    """[S, B, M] int64: rotary positions, 0 where unused."""
    slots: torch.Tensor
    """[S, B, M] int64: slot in the request's own numbering; unused branches keep their own slot."""
    physical: torch.Tensor
    """[S, B, M] int64: row of pages.flatten(0, 1) that holds the slot; equal to slots without pages."""
    depth: torch.Tensor
    """[B, M] int32: depth of each branch, PAD where unused."""


def _to_physical(
    slots: torch.Tensor, page_table: torch.Tensor | None, page_size: int
) -> torch.Tensor:
    """Slots [S, B, M] through page_table [B, pages]."""
    if page_table is None:
        return slots.clone()
    page = (slots // page_size).clamp_(max=page_table.shape[1] - 1)
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
    branches = depth.shape[1]
    step = torch.arange(draft_len + 1, device=depth.device)[:, None, None]
    trunk, used = trunk_len.long()[:, None], depth != PAD
    positions = torch.where(used, trunk + 1 + depth + step, 0)
    branch = torch.arange(branches, device=depth.device)
    slots = trunk + (draft_len + 1) + step * branches + branch
    physical = _to_physical(slots, page_table, page_size)
    return Layout(torch.where(used, tokens, 0), positions, slots, physical, depth)


def chain_layout_reference(
    tokens: torch.Tensor,
    count: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
) -> Layout:
    index = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    used = index < count[:, None]
    slots = (trunk_len.long()[:, None] + index)[None]
    physical = _to_physical(slots, page_table, page_size)
    depth = torch.where(used, index, PAD).to(torch.int32)
    return Layout(torch.where(used, tokens, 0), torch.where(used, slots, 0), slots, physical, depth)


def tree_layout(
    depth: torch.Tensor,
    tokens: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    draft_len: int,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    impl: str = "auto",
) -> Layout:
    _check(depth, tokens, trunk_len, page_table, page_size)
    if draft_len < 0:
        raise ConfigError(f"draft_len: got {draft_len}, want >= 0")
    return tree_layout_reference(
        depth, tokens, trunk_len, draft_len=draft_len, page_table=page_table, page_size=page_size
    )


def chain_layout(
    tokens: torch.Tensor,
    count: torch.Tensor,
    trunk_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    impl: str = "auto",
) -> Layout:
    return chain_layout_reference(
        tokens, count, trunk_len, page_table=page_table, page_size=page_size
    )


def _check(depth, tokens, trunk_len, page_table, page_size) -> None:
    batch, branches = depth.shape
    check_tensor("depth", depth, (batch, branches), torch.int32)
    check_tensor("tokens", tokens, (batch, branches), torch.int64, depth.device)
    check_tensor("trunk_len", trunk_len, (batch,), (torch.int32, torch.int64), depth.device)
    if page_table is not None:
        check_tensor("page_table", page_table, (batch, None), torch.int32, depth.device)
    if page_size < 1:
        raise ConfigError(f"page_size: got {page_size}, want >= 1")
