"""A hash table of one round's prepared outcomes: (uid, generation, base, accepted, extra) -> slot.

Open addressing with linear probing. A bucket is one word, stamp << 32 | slot, where stamp is the
low half of the generation; the full key lies in a row of its own, found by the slot. So
- a bucket of another stamp counts as empty: the last round is forgotten without a write;
- a bucket is only a hint and the key row decides: a collision, a stale or a corrupted bucket can
  make a lookup miss, never make it return another outcome's slot;
- of equal keys the lowest slot stays: one atomic minimum over the word;
- a live bucket is never given to another key, so equal keys always meet in the same bucket and the
  slots found do not depend on the order of inserts.
Nothing is deleted, so there are no tombstones: a probe stops at the first empty bucket. An insert
that finds only live buckets is dropped and counted. The mix is SplitMix64 (Steele et al., 2014).
"""

from __future__ import annotations

import torch

from .._call import call
from .._launch import Impl, check_int, check_out, check_tensor, resolve_impl
from .kernels import compile_cases
from .reference import Lookup, insert_reference, lookup_reference
from .sizing import KEY_FIELDS, CacheSize, fit_cache_size, optimal_cache_size

__all__ = [
    "CacheSize",
    "Lookup",
    "SpeculationCache",
    "compile_cases",
    "fit_cache_size",
    "insert_reference",
    "lookup_reference",
    "optimal_cache_size",
]

_INTEGERS = (torch.int32, torch.int64)


class SpeculationCache:
    """Prepared chains by outcome, for one generation (a round of the engine) at a time.

    Args:
        capacity: buckets, rounded up to a power of two; 2 * rows keeps probes short, drops nothing.
        rows: chains, one per slot 0..rows - 1.
        device: where the table lies.
        draft_len: K, tokens per chain.
        tokens: [rows, K] int64 contiguous, bound instead of allocated: the drafter's own buffer.
        max_probes: buckets an insert or a lookup may look at. Default: all.
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
        check_int("capacity", capacity, 1, 1 << 30)
        check_int("rows", rows, 1)
        check_int("draft_len", draft_len, 0)
        if max_probes is not None:
            check_int("max_probes", max_probes, 1)
        self.capacity = 1 << (capacity - 1).bit_length()
        self.rows = rows
        self.max_probes = min(max_probes or self.capacity, self.capacity)
        whole = lambda *shape: torch.full(shape, -1, dtype=torch.int64, device=device)  # noqa: E731
        self.buckets, self.key_rows = whole(self.capacity), whole(rows, KEY_FIELDS)
        self.tokens = whole(rows, draft_len) if tokens is None else tokens
        """[rows, K] int64: the chain of each slot, written by the drafter at any time."""
        width = draft_len if draft_len or tokens is None else None
        check_out("tokens", self.tokens, (rows, width), torch.int64, self.buckets.device)
        self.dropped = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] int64: inserts that found no room, since the cache was made."""

    def insert(
        self,
        uid: torch.Tensor,
        generation: torch.Tensor | int,
        base: torch.Tensor,
        accepted: torch.Tensor,
        extra: torch.Tensor,
        slot: torch.Tensor,
        *,
        impl: Impl = "auto",
    ) -> None:
        """Add N outcomes; those with a negative `accepted` or a slot out of range are ignored.

        Args:
            uid, base, extra: [N] int64. uid names a request, over all engines that share the cache.
            generation: an int, or int64 [1] or [N]. Buckets of other generations count as empty.
            accepted, slot: [N] int32 | int64. A slot may be used once per generation.
        Cost:
            1 launch; 0 host syncs.
        """
        self._check(uid, base, accepted, extra, generation)
        check_tensor("slot", slot, uid.shape, _INTEGERS, uid.device)
        call(
            "cache_insert",
            self.buckets, self.key_rows, self.dropped,
            *(value.contiguous() for value in (uid, base, accepted, extra, slot)),
            *_split_generation(generation),
            self.max_probes, resolve_impl(impl, self.buckets.device),
        )  # fmt: skip

    def lookup(
        self,
        uid: torch.Tensor,
        generation: torch.Tensor | int,
        base: torch.Tensor,
        accepted: torch.Tensor,
        extra: torch.Tensor,
        *,
        out: Lookup | None = None,
        impl: Impl = "auto",
    ) -> Lookup:
        """Find B outcomes, arguments as in `insert`; `out` is overwritten and returned.

        Cost:
            48 bytes a probe (1.5 on average in a half-full table), B*K tokens; 1 launch; 0 syncs.
        """
        self._check(uid, base, accepted, extra, generation)
        batch, width = uid.shape[0], self.tokens.shape[1]
        fields = {
            "hit": ((batch,), torch.bool),
            "slot": ((batch,), torch.int32),
            "tokens": ((batch, width), torch.int64),
        }
        if out is None:
            made = (
                torch.empty(*shape, dtype=dtype, device=uid.device)
                for shape, dtype in fields.values()
            )
            out = Lookup(*made)
        else:
            for name, (shape, dtype) in fields.items():
                check_out(f"out.{name}", getattr(out, name), shape, dtype, uid.device)
        call(
            "cache_lookup",
            self.buckets, self.key_rows, self.tokens,
            *(value.contiguous() for value in (uid, base, accepted, extra)),
            *_split_generation(generation),
            self.max_probes, resolve_impl(impl, self.buckets.device),
            out.hit, out.slot, out.tokens,
        )  # fmt: skip
        return out

    def _check(self, uid, base, accepted, extra, generation) -> None:
        device = self.buckets.device
        check_tensor("uid", uid, (None,), torch.int64, device)
        for name, value in (("base", base), ("extra", extra)):
            check_tensor(name, value, uid.shape, torch.int64, device)
        check_tensor("accepted", accepted, uid.shape, _INTEGERS, device)
        if isinstance(generation, torch.Tensor):
            size = (1,) if generation.numel() == 1 else uid.shape
            check_tensor("generation", generation, size, torch.int64, device)
        else:
            check_int("generation", generation, -(2**63), 2**63 - 1)


def _split_generation(generation: torch.Tensor | int) -> tuple[torch.Tensor | None, int]:
    if isinstance(generation, torch.Tensor):
        return generation.contiguous(), 0
    return None, generation
