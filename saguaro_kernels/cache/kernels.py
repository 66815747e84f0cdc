"""Kernels of the speculation cache: one program per key."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._launch import on_device
from .reference import insert_reference, lookup_reference


@triton.jit
def _mix_field(mixed, field):
    mixed = (mixed ^ field.to(tl.int64).to(tl.uint64)) + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _home_bucket(uid, generation, base, accepted, extra, capacity):
    mixed = _mix_field(_mix_field(tl.full([], 0, tl.uint64), uid), generation)
    mixed = _mix_field(_mix_field(_mix_field(mixed, base), accepted), extra)
    return (mixed & (capacity - 1).to(tl.uint64)).to(tl.int64)


@triton.jit
def _is_key(row_ptr, uid, generation, base, accepted, extra):
    """Compares a stored key; volatile, as another program may just have written it."""
    same = tl.load(row_ptr, volatile=True) == uid
    same &= tl.load(row_ptr + 1, volatile=True) == generation
    same &= tl.load(row_ptr + 2, volatile=True) == base
    same &= tl.load(row_ptr + 3, volatile=True) == accepted
    return same & (tl.load(row_ptr + 4, volatile=True) == extra)


@triton.jit
def _load_generation(generation, index, KIND: tl.constexpr):
    """KIND 0: an int; 1: a pointer to one; 2: a pointer to one per key."""
    if KIND == 0:
        return generation.to(tl.int64)
    else:
        return tl.load(generation + index * (KIND - 1)).to(tl.int64)


@triton.jit(do_not_specialize=["generation", "capacity", "rows", "max_probes"])
def _cache_insert_kernel(
    buckets_ptr,  # [capacity] int64
    key_rows_ptr,  # [rows, 5] int64
    dropped_ptr,  # [1] int64
    uid_ptr,  # [N] int64
    base_ptr,  # [N] int64
    accepted_ptr,  # [N]
    extra_ptr,  # [N] int64
    slot_ptr,  # [N]
    generation,
    capacity,
    rows,
    max_probes,
    GENERATION: tl.constexpr,
):
    """Grid (N,): one key. Writes its key row, then claims a bucket for it."""
    index = tl.program_id(0)
    accepted = tl.load(accepted_ptr + index).to(tl.int64)
    slot = tl.load(slot_ptr + index).to(tl.int64)
    if (accepted >= 0) & (slot >= 0) & (slot < rows):
        uid, base = tl.load(uid_ptr + index), tl.load(base_ptr + index)
        extra = tl.load(extra_ptr + index)
        stamped = _load_generation(generation, index, GENERATION)
        row_ptr = key_rows_ptr + slot * 5
        tl.store(row_ptr, uid)
        tl.store(row_ptr + 1, stamped)
        tl.store(row_ptr + 2, base)
        tl.store(row_ptr + 3, accepted)
        tl.store(row_ptr + 4, extra)
        tl.debug_barrier()
        word = (stamped << 32) | slot
        home = _home_bucket(uid, stamped, base, accepted, extra, capacity)
        probe = 0
        searching = True
        while searching & (probe < max_probes):
            bucket_ptr = buckets_ptr + ((home + probe) & (capacity - 1))
            # An atomic read acquires: the key row behind a live word is complete.
            seen = tl.atomic_or(bucket_ptr, 0)
            other = seen & 0xFFFFFFFF
            if (seen - other == word - slot) & (other < rows):
                if _is_key(key_rows_ptr + other * 5, uid, stamped, base, accepted, extra):
                    tl.atomic_min(bucket_ptr, word)
                    searching = False
                else:
                    probe += 1
            else:
                # If another program was faster, the same bucket is looked at again.
                searching = tl.atomic_cas(bucket_ptr, seen, word) != seen
        if searching:
            tl.atomic_add(dropped_ptr, 1)


@triton.jit(do_not_specialize=["generation", "capacity", "rows", "max_probes", "width"])
def _cache_lookup_kernel(
    buckets_ptr,  # [capacity] int64
    key_rows_ptr,  # [rows, 5] int64
    tokens_ptr,  # [rows, K] int64
    uid_ptr,  # [B] int64
    base_ptr,  # [B] int64
    accepted_ptr,  # [B]
    extra_ptr,  # [B] int64
    hit_ptr,  # [B] bool
    slot_ptr,  # [B] int32
    out_ptr,  # [B, K] int64
    generation,
    capacity,
    rows,
    max_probes,
    width,  # K
    GENERATION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (B,): one outcome. Writes hit, slot and the chain's tokens."""
    index = tl.program_id(0)
    uid, base = tl.load(uid_ptr + index), tl.load(base_ptr + index)
    accepted = tl.load(accepted_ptr + index).to(tl.int64)
    extra = tl.load(extra_ptr + index)
    stamped = _load_generation(generation, index, GENERATION)
    home = _home_bucket(uid, stamped, base, accepted, extra, capacity)
    found = tl.full([], -1, tl.int64)
    probe = 0
    while probe < max_probes:
        seen = tl.load(buckets_ptr + ((home + probe) & (capacity - 1)))
        other = seen & 0xFFFFFFFF
        probe += 1
        if (seen - other == stamped << 32) & (other < rows):
            if _is_key(key_rows_ptr + other * 5, uid, stamped, base, accepted, extra):
                found = other
                probe = max_probes
        else:
            probe = max_probes
    k = tl.arange(0, BLOCK_K)
    tl.store(hit_ptr + index, found >= 0)
    tl.store(slot_ptr + index, found.to(tl.int32))
    chain = tl.load(tokens_ptr + found * width + k, mask=(k < width) & (found >= 0), other=-1)
    tl.store(out_ptr + index.to(tl.int64) * width + k, chain, mask=k < width)


def _generation_argument(
    device_generation: torch.Tensor | None, generation: int, count: int
) -> tuple[torch.Tensor | int, int]:
    if device_generation is None:
        return generation, 0
    return device_generation, 2 if device_generation.numel() == count > 1 else 1


def _cache_insert(
    buckets: torch.Tensor, key_rows: torch.Tensor, dropped: torch.Tensor, uid: torch.Tensor,
    base: torch.Tensor, accepted: torch.Tensor, extra: torch.Tensor, slot: torch.Tensor,
    device_generation: torch.Tensor | None, generation: int, max_probes: int, impl: str,
) -> None:  # fmt: skip
    fields, count = [uid, base, accepted, extra], uid.shape[0]
    value, kind = _generation_argument(device_generation, generation, count)
    if impl != "triton":
        insert_reference(buckets, key_rows, dropped, fields, value, slot, max_probes)
    elif count:
        with on_device(buckets.device):
            _cache_insert_kernel[(count,)](
                buckets, key_rows, dropped, *fields, slot,
                generation=value, capacity=buckets.shape[0], rows=key_rows.shape[0],
                max_probes=max_probes, GENERATION=kind, num_warps=1,
            )  # fmt: skip


def _cache_lookup(
    buckets: torch.Tensor, key_rows: torch.Tensor, tokens: torch.Tensor, uid: torch.Tensor,
    base: torch.Tensor, accepted: torch.Tensor, extra: torch.Tensor,
    device_generation: torch.Tensor | None, generation: int, max_probes: int, impl: str,
    hit: torch.Tensor, slot: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    fields, count = [uid, base, accepted, extra], uid.shape[0]
    value, kind = _generation_argument(device_generation, generation, count)
    if impl != "triton":
        result = lookup_reference(buckets, key_rows, tokens, fields, value, max_probes)
        hit.copy_(result.hit), slot.copy_(result.slot), out.copy_(result.tokens)
    elif count:
        width = tokens.shape[1]
        with on_device(buckets.device):
            _cache_lookup_kernel[(count,)](
                buckets, key_rows, tokens, *fields, hit, slot, out,
                generation=value, capacity=buckets.shape[0], rows=key_rows.shape[0],
                max_probes=max_probes, width=width, GENERATION=kind,
                BLOCK_K=triton.next_power_of_2(max(1, width)), num_warps=1,
            )  # fmt: skip


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps) of insert and lookup."""
    wide = ("buckets_ptr", "key_rows_ptr", "uid_ptr", "base_ptr", "extra_ptr", "generation")
    common = {**dict.fromkeys(wide, "*i64"), "accepted_ptr": "*i32", "slot_ptr": "*i32"}
    common |= dict.fromkeys(("capacity", "rows", "max_probes"), "i32")
    insert = {**common, "dropped_ptr": "*i64"}
    lookup = {**common, "tokens_ptr": "*i64", "out_ptr": "*i64", "hit_ptr": "*i1", "width": "i32"}
    return [
        ("cache_insert", _cache_insert_kernel, insert, {"GENERATION": 1}, 1),
        ("cache_lookup-K5", _cache_lookup_kernel, lookup, {"GENERATION": 1, "BLOCK_K": 8}, 1),
    ]
