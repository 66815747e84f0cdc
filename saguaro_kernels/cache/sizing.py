"""How large a speculation cache should be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import ConfigError

KEY_FIELDS = 5


@dataclass(frozen=True)
class CacheSize:
    """What a cache of `branches` branches per request takes."""

    branches: int
    rows: int
    entries: int
    row_bytes: int
    """Draft logits of all branches: the part that grows with the vocabulary."""
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
    """Return the smallest cache that reaches `hit_rate`, shrunk until `memory_limit` bytes hold it.

        branches M = (draft_len + 1) * (1 - hit_rate)^(-1/power)    misses fall as fan_out^-power
        rows       = batch * M;    entries = 2 * rows, rounded up to a power of two
        bytes      = rows * draft_len * vocab * logit_bytes + the table (keys, tokens, buckets)

    `power` is the exponent of the miss rate, to be fitted on the pair in use.
    """
    if not 0.0 <= hit_rate < 1.0:
        raise ConfigError(f"hit_rate: got {hit_rate}, want 0 <= hit_rate < 1")
    if min(batch, vocab, logit_bytes, max_branches) < 1 or draft_len < 0 or power <= 0:
        raise ConfigError(
            f"got batch={batch}, vocab={vocab}, logit_bytes={logit_bytes}, max_branches="
            f"{max_branches}, draft_len={draft_len}, power={power}; want positive numbers"
        )
    fan_out = (1.0 - hit_rate) ** (-1.0 / power)
    wanted = min(max_branches, math.ceil((draft_len + 1) * fan_out - 1e-9))
    return fit_cache_size(
        batch, wanted, memory_limit, draft_len=draft_len, vocab=vocab, logit_bytes=logit_bytes
    )


def fit_cache_size(
    batch: int,
    branches: int,
    memory_limit: int | None,
    *,
    draft_len: int,
    vocab: int,
    logit_bytes: int = 2,
) -> CacheSize:
    """Return the size of a cache of `branches` branches per request, or of as many as fit.

    Raises:
        ConfigError: `memory_limit` bytes do not hold one branch of each request.
    """
    size = _size(batch, branches, draft_len, vocab, logit_bytes)
    for fewer in range(branches - 1, 0, -1):
        if memory_limit is None or size.row_bytes + size.table_bytes <= memory_limit:
            return size
        size = replace(_size(batch, fewer, draft_len, vocab, logit_bytes), limited=True)
    needed = size.row_bytes + size.table_bytes
    if memory_limit is not None and needed > memory_limit:
        raise ConfigError(
            f"memory_limit: got {memory_limit} bytes, want >= {needed}: one branch of {batch} "
            f"requests each (draft_len {draft_len}, vocab {vocab}, {logit_bytes} bytes a logit)"
        )
    return size


def _size(batch: int, branches: int, draft_len: int, vocab: int, logit_bytes: int) -> CacheSize:
    rows = batch * branches
    entries = 1 << (2 * rows - 1).bit_length()
    row_bytes = rows * draft_len * vocab * logit_bytes
    table_bytes = 8 * entries + rows * 8 * (KEY_FIELDS + draft_len)
    return CacheSize(branches, rows, entries, row_bytes, table_bytes, limited=False)
