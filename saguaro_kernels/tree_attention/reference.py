"""Torch reference of tree attention: the CPU path, and what the kernels are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_QUERY_BLOCK = 128
_STORED_MASK = 1 << 20


@dataclass(frozen=True)
class _Block:
    """Queries first..last-1 of one request: the cache rows they read and what each sees of them."""

    request: int
    first: int
    last: int
    rows: slice | torch.Tensor
    """Rows of pages.flatten(0, 1) that some query sees; a slice where they are contiguous."""
    slots: np.ndarray
    mask: torch.Tensor | None
    """[queries, rows] added to the scores; None: large, made when needed."""


@dataclass(frozen=True)
class AttentionPlan:
    """What follows from the lengths alone: made once per forward, used by every layer."""

    trunk: list[int]
    depth: np.ndarray
    draft_len: int
    step: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    blocks: list[_Block]

    def visible(self, request: int, first: int, last: int, slots: np.ndarray) -> np.ndarray:
        """Which slots the queries see: [queries, slots] bool."""
        trunk, branches = self.trunk[request], self.depth.shape[1]
        depth = self.depth[request, first:last, None]
        seen = slots < trunk + depth + 1
        position = slots
        if self.step >= 0:
            own = slots - (trunk + self.draft_len + 1)
            owner = np.where((own >= 0) & (own < (self.step + 1) * branches), own % branches, -1)
            mine = owner == np.arange(first, last)[:, None]
            seen |= mine
            if self.window is not None:
                position = np.where(mine, trunk + depth + 1 + own // branches, slots)
        if self.window is not None:
            seen &= position > trunk + depth + 1 + self.step - self.window
        return seen & (depth >= 0)

    def mask(self, block: _Block) -> torch.Tensor:
        """The mask of a block that does not store its own."""
        seen = self.visible(block.request, block.first, block.last, block.slots)
        return self.additive(seen)

    def additive(self, seen: np.ndarray) -> torch.Tensor:
        """0 where seen, else -inf; an unused query may as well see everything."""
        hidden = ~seen & seen.any(1, keepdims=True)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self.device), float("-inf"))


def attention_plan(
    page_table: torch.Tensor,
    page_size: int,
    *,
    trunk_len: torch.Tensor,
    depth: torch.Tensor,
    draft_len: int,
    step: int | torch.Tensor,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionPlan:
    """Plan the reference's reads for queries of `dtype`; all layers of a forward share it."""
    depths, table = depth.cpu().numpy().astype(np.int64), page_table.cpu().numpy().astype(np.int64)
    plan = AttentionPlan(
        trunk_len.tolist(), depths, draft_len, int(step), window, dtype, depth.device, blocks=[]
    )
    width = depths.shape[1]
    for request, trunk in enumerate(plan.trunk):
        for first in range(0, width, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, width)
            deepest = int(depths[request, first:last].max())
            if deepest < 0:
                continue
            end = trunk + deepest + 1
            if plan.step >= 0:
                end = trunk + draft_len + 1 + (plan.step + 1) * width
            slots = np.arange(end)
            seen = plan.visible(request, first, last, slots)
            anyone = seen.any(0)
            slots = slots[anyone]
            row = table[request, slots // page_size] * page_size + slots % page_size
            rows: slice | torch.Tensor = slice(int(row[0]), int(row[0]) + len(row))
            if (np.diff(row) != 1).any():
                rows = torch.from_numpy(row).to(depth.device)
            stored = width * end <= _STORED_MASK
            mask = plan.additive(seen[:, anyone]) if stored else None
            plan.blocks.append(_Block(request, first, last, rows, slots, mask))
    return plan


@torch.no_grad()
def tree_attention_reference(
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
) -> torch.Tensor:
    if plan is None:
        plan = attention_plan(
            page_table,
            key_pages.shape[1],
            trunk_len=trunk_len,
            depth=depth,
            draft_len=draft_len,
            step=step,
            window=window,
            dtype=query.dtype,
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    keys, values = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    for block in plan.blocks:
        mask = plan.mask(block) if block.mask is None else block.mask
        rows = query[block.request, block.first : block.last].transpose(0, 1)
        part = _attend(
            rows,
            keys[block.rows].transpose(0, 1),
            values[block.rows].transpose(0, 1),
            mask,
            scale,
            softcap,
        )
        out[block.request, block.first : block.last] = part.transpose(0, 1)
    if (plan.depth < 0).any():
        out.masked_fill_((depth < 0)[:, :, None, None], 0.0)
    return out


def _attend(query, key, value, mask, scale: float, softcap: float | None) -> torch.Tensor:
    """query [Hq, Q, D], key and value [Hkv, S, D], mask [Q, S] -> [Hq, Q, D]."""
    if torch.is_autocast_enabled(query.device.type):  # it would multiply in another dtype
        with torch.autocast(query.device.type, enabled=False):
            return _attend(query, key, value, mask, scale, softcap)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], mask[None, None], scale=scale, enable_gqa=True
        )[0]
    group = query.shape[0] // key.shape[0]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    score = query.to(wide) @ key.to(wide).transpose(1, 2) * scale
    score = softcap * torch.tanh(score / softcap) + mask
    return (score.softmax(-1) @ value.to(wide)).to(query.dtype)
