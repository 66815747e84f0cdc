"""Torch reference of the speculation cache: the CPU path, and the specification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..distribution import PAD

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Lookup:
    """hit [B] bool, slot [B] int32 (-1 on a miss), tokens [B, K] int64 (PAD on a miss)."""

    hit: torch.Tensor
    slot: torch.Tensor
    tokens: torch.Tensor


def _mix_reference(keys: np.ndarray) -> np.ndarray:
    """64 bits from the fields [N, 5]; each one passes the finaliser, so swapped fields differ."""
    mixed = np.zeros(len(keys), dtype=np.uint64)
    for field in keys.astype(np.uint64).T:
        mixed = (mixed ^ field) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _home_reference(keys: np.ndarray, capacity: int) -> np.ndarray:
    return (_mix_reference(keys) & np.uint64(capacity - 1)).astype(np.int64)


def _keys_reference(
    fields: list[torch.Tensor], generation: torch.Tensor | int
) -> tuple[np.ndarray, np.ndarray]:
    """The keys [N, 5], and the word of each one's bucket without the slot [N]."""
    uid, base, accepted, extra = fields
    generation = torch.as_tensor(generation).to(uid.device).expand_as(uid)
    columns = (uid, generation, base, accepted, extra)
    keys = np.stack([column.cpu().numpy().astype(np.int64) for column in columns], axis=1)
    return keys, keys[:, 1] << 32


def _probe_reference(
    table: np.ndarray, rows: np.ndarray, bucket: np.ndarray, keys: np.ndarray, stamp: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slot in each bucket, whether it is live, and whether it is that of the key."""
    word = table[bucket]
    slot = word & _LOW
    live = (word - slot == stamp) & (slot < len(rows))
    return slot, live, live & (rows[np.where(live, slot, 0)] == keys).all(1)


def insert_reference(
    buckets: torch.Tensor,
    key_rows: torch.Tensor,
    dropped: torch.Tensor,
    fields: list[torch.Tensor],
    generation: torch.Tensor | int,
    slot: torch.Tensor,
    max_probes: int,
) -> None:
    """See `SpeculationCache.insert`. All keys probe together."""
    table, rows = buckets.cpu().numpy(), key_rows.cpu().numpy()
    keys, stamp = _keys_reference(fields, generation)
    slots = slot.cpu().numpy().astype(np.int64)
    probe = _home_reference(keys, len(table))
    last = probe + max_probes
    left = np.flatnonzero((keys[:, 3] >= 0) & (slots >= 0) & (slots < len(rows)))
    rows[slots[left]] = keys[left]
    while left.size:
        bucket, word = probe[left] & (len(table) - 1), stamp[left] | slots[left]
        _, live, same = _probe_reference(table, rows, bucket, keys[left], stamp[left])
        np.minimum.at(table, bucket[same], word[same])
        # Of several claims of one bucket one stays; all of them look at it again.
        table[bucket[~live]] = word[~live]
        probe[left] += live
        left = left[~same]
        full = probe[left] == last[left]
        dropped += int(full.sum())
        left = left[~full]
    if buckets.device.type != "cpu":
        buckets.copy_(torch.from_numpy(table))
        key_rows.copy_(torch.from_numpy(rows))


def lookup_reference(
    buckets: torch.Tensor,
    key_rows: torch.Tensor,
    tokens: torch.Tensor,
    fields: list[torch.Tensor],
    generation: torch.Tensor | int,
    max_probes: int,
) -> Lookup:
    """See `SpeculationCache.lookup`."""
    table, rows = buckets.cpu().numpy(), key_rows.cpu().numpy()
    keys, stamp = _keys_reference(fields, generation)
    home = _home_reference(keys, len(table))
    found = np.full(len(keys), -1, dtype=np.int32)
    left = np.arange(len(keys))
    for probe in range(max_probes):
        bucket = (home[left] + probe) & (len(table) - 1)
        slot, live, same = _probe_reference(table, rows, bucket, keys[left], stamp[left])
        found[left[same]] = slot[same]
        left = left[live & ~same]
        if not left.size:
            break
    where = torch.from_numpy(found).to(buckets.device)
    hit = where >= 0
    return Lookup(hit, where, torch.where(hit[:, None], tokens[where.clamp(min=0)], PAD))
