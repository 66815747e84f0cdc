"""A hash table of one round's prepared outcomes: (uid, generation, base, accepted, extra) -> slot.

The table is open addressing with linear probing. A bucket holds one word, stamp << 32 | slot, where stamp is
the low half of the generation, and the full key lies in a row of its own, found by the slot. So
- a bucket whose stamp is not the current one counts as empty: the last round is forgotten without a write;
- a bucket is only a hint, and the key row decides: a collision, a stale or a corrupted bucket can make a
  lookup miss, never make it return another outcome's slot;
- of equal keys the lowest slot stays, as one atomic minimum over the word.
There are no deletions and so no tombstones: a probe stops at the first empty bucket. A table whose probed
buckets are all live drops the insert and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .errors import ConfigError

PAD = -1
_FIELDS = 5
_EMPTY = -1


@dataclass(frozen=True)
class Lookup:
    """hit [B] bool, slot [B] int32 (-1 on a miss), tokens [B, K] int64 (PAD on a miss)."""

    hit: torch.Tensor
    slot: torch.Tensor
    tokens: torch.Tensor


class SpeculationCache:
    """Prepared chains by outcome. Lives for one generation (a round of the engine).

    Args:
        capacity: buckets, rounded up to a power of two; twice `rows` keeps probes short and drops nothing.
        rows: chains, one per slot 0..rows-1.
        device: where the table lies.
        draft_len: tokens per chain, the width K of `tokens`.
        tokens: [rows, K] int64, bound instead of allocated; the drafter writes its chains there.
        max_probes: buckets an insert or a lookup may look at; default: all.
    """

    def __init__(
        self,
        capacity: int,
        rows: int,
        device: torch.device | str,
        *,
        draft_len: int = 0,
        tokens: torch.Tensor | None = None,
        max_probes: int | None = None,
    ) -> None:
        if capacity < 1 or rows < 1:
            raise ConfigError(f"capacity, rows: got {capacity}, {rows}, want both >= 1")
        self.capacity = 1 << (capacity - 1).bit_length()
        self.rows = rows
        self.max_probes = min(max_probes or self.capacity, self.capacity)
        self.tokens = tokens
        if tokens is None:
            self.tokens = torch.full((rows, draft_len), PAD, dtype=torch.int64, device=device)
        self.buckets = torch.full((self.capacity,), _EMPTY, dtype=torch.int64, device=device)
        self.key_rows = torch.full((rows, _FIELDS), PAD, dtype=torch.int64, device=device)
        self.dropped = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] int64: inserts that found no room, since the cache was made."""

    def insert(self, uid, generation, base, accepted, extra, slot, *, impl: str = "auto") -> None:
        insert_reference(
            self.buckets, self.key_rows, self.dropped,
            uid, generation, base, accepted, extra, slot, max_probes=self.max_probes,
        )  # fmt: skip

    def lookup(self, uid, generation, base, accepted, extra, *, impl: str = "auto") -> Lookup:
        return Lookup(
            *lookup_reference(
                self.buckets, self.key_rows, self.tokens,
                uid, generation, base, accepted, extra, max_probes=self.max_probes,
            )
        )  # fmt: skip


def _mix_reference(key: np.ndarray) -> np.ndarray:
    """64 bits from the five fields [N, 5]; every field passes the finaliser, so swapped ones differ."""
    mixed = np.zeros(len(key), dtype=np.uint64)
    for field in key.astype(np.uint64).T:
        mixed = (mixed ^ field) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _as_keys(uid, generation, base, accepted, extra) -> np.ndarray:
    columns = (uid, torch.as_tensor(generation).expand_as(uid), base, accepted, extra)
    return np.stack([column.cpu().numpy().astype(np.int64) for column in columns], axis=1)


def _words(generation: np.ndarray) -> list[int]:
    """The bucket word of slot 0, per key: stamp << 32, as a signed 64-bit number."""
    return (generation << 32).tolist()


def insert_reference(
    buckets: torch.Tensor, key_rows: torch.Tensor, dropped: torch.Tensor,
    uid, generation, base, accepted, extra, slot, *, max_probes: int,
) -> None:  # fmt: skip
    table, rows = buckets.cpu().numpy(), key_rows.cpu().numpy()
    keys, slots = _as_keys(uid, generation, base, accepted, extra), slot.cpu().numpy()
    live = (keys[:, 3] >= 0) & (slots >= 0) & (slots < len(rows))
    keys, slots = keys[live], slots[live]
    rows[slots] = keys
    homes = (_mix_reference(keys) & np.uint64(len(table) - 1)).tolist()
    mask, lost = len(table) - 1, 0
    for home, stamp, key, where in zip(
        homes, _words(keys[:, 1]), keys, slots.tolist(), strict=True
    ):
        for probe in range(home, home + max_probes):
            word = int(table[probe & mask])
            other = word & 0xFFFFFFFF
            if word - other != stamp or other >= len(rows):
                table[probe & mask] = stamp | where
                break
            if (rows[other] == key).all():
                table[probe & mask] = stamp | min(other, where)
                break
        else:
            lost += 1
    dropped += lost
    if buckets.device.type != "cpu":
        buckets.copy_(torch.from_numpy(table))
        key_rows.copy_(torch.from_numpy(rows))


def lookup_reference(
    buckets: torch.Tensor, key_rows: torch.Tensor, tokens: torch.Tensor,
    uid, generation, base, accepted, extra, *, max_probes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    table, rows = buckets.cpu().numpy(), key_rows.cpu().numpy()
    keys = _as_keys(uid, generation, base, accepted, extra)
    homes = (_mix_reference(keys) & np.uint64(len(table) - 1)).tolist()
    mask, found = len(table) - 1, []
    for home, stamp, key in zip(homes, _words(keys[:, 1]), keys, strict=True):
        answer = -1
        for probe in range(home, home + max_probes):
            word = int(table[probe & mask])
            where = word & 0xFFFFFFFF
            if word - where != stamp or where >= len(rows):
                break
            if (rows[where] == key).all():
                answer = where
                break
        found.append(answer)
    slot = torch.tensor(found, dtype=torch.int32, device=buckets.device)
    hit = slot >= 0
    return hit, slot, torch.where(hit[:, None], tokens[slot.clamp(min=0)], PAD)


@dataclass(frozen=True)
class CacheSize:
    """What a cache of `branches` branches per request takes."""

    branches: int
    rows: int
    entries: int
    row_bytes: int
    """Of the draft logits of all branches: the part that grows with the vocabulary."""
    table_bytes: int
    limited: bool
    """True when the memory limit, not the wanted hit rate, decided `branches`."""


def optimal_cache_size(
    batch: int,
    hit_rate: float,
    memory_limit: int | None,
    *,
    draft_len: int,
    vocab: int,
    logit_bytes: int = 2,
    power: float = 0.6,
    max_branches: int = 64,
) -> CacheSize:
    """Return the smallest cache that reaches `hit_rate`, shrunk until it fits `memory_limit` bytes.

    branches M = (draft_len + 1) * (1 - hit_rate)^(-1/power)      the miss rate falls as fan_out^-power
    rows       = batch * M;    entries = 2 * rows, rounded up to a power of two
    bytes      = rows * draft_len * vocab * logit_bytes + the table (48 bytes a row, 8 an entry)
    """
    if not 0.0 <= hit_rate < 1.0:
        raise ConfigError(f"hit_rate: got {hit_rate}, want 0 <= hit_rate < 1")
    if batch < 1 or draft_len < 0 or vocab < 1 or power <= 0:
        raise ConfigError(
            f"got batch={batch}, draft_len={draft_len}, vocab={vocab}, power={power}; "
            "want batch, vocab >= 1, draft_len >= 0, power > 0"
        )
    fan_out = (1.0 - hit_rate) ** (-1.0 / power)
    wanted = min(max_branches, max(1, int(np.ceil((draft_len + 1) * fan_out - 1e-9))))
    for branches in range(wanted, 0, -1):
        rows = batch * branches
        entries = 1 << (2 * rows - 1).bit_length()
        row_bytes = rows * draft_len * vocab * logit_bytes
        table_bytes = 8 * entries + rows * 8 * (_FIELDS + draft_len)
        if memory_limit is None or row_bytes + table_bytes <= memory_limit:
            return CacheSize(branches, rows, entries, row_bytes, table_bytes, branches < wanted)
    raise ConfigError(
        f"memory_limit: got {memory_limit} bytes, want >= {row_bytes + table_bytes} for one branch of each "
        f"of {batch} requests (draft_len {draft_len}, vocab {vocab}, {logit_bytes} bytes a logit)"
    )
