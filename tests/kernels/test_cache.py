"""The speculation cache against a Python dict, and against everything that could fool a hash table.

The interpreter runs programs one after another, so what is tested of races is that no order of
inserts changes a result; a stress run on a GPU is the only test of simultaneous ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.traffic import Meter
from saguaro_kernels.cache import Lookup, SpeculationCache, optimal_cache_size
from saguaro_kernels.cache.reference import _home_reference
from saguaro_kernels.distribution import PAD
from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError

IMPLS = ("reference", "triton")


def _columns(keys, device) -> tuple[torch.Tensor, ...]:
    """(uid, base, accepted, extra) of tuples (uid, base, accepted, extra)."""
    uid, base, accepted, extra = torch.tensor(keys, dtype=torch.int64).view(-1, 4).unbind(1)
    return tuple(c.to(device) for c in (uid, base, accepted.int(), extra))


def _insert(cache, keys, slots, generation, impl, device):
    uid, base, accepted, extra = _columns(keys, device)
    slot = torch.tensor(slots, dtype=torch.int32, device=device)
    cache.insert(uid, generation, base, accepted, extra, slot, impl=impl)


def _slots(cache, keys, generation, impl, device) -> list[int]:
    uid, base, accepted, extra = _columns(keys, device)
    found = cache.lookup(uid, generation, base, accepted, extra, impl=impl)
    assert torch.equal(found.hit, found.slot >= 0)
    return found.slot.tolist()


def _random_keys(count, generator, spread=1 << 40):
    high = torch.tensor([spread, spread, 9, 128256])
    return (torch.rand(count, 4, generator=generator, dtype=torch.float64) * high).long()


def _oracle(keys, slots) -> dict:
    table: dict = {}
    for key, slot in zip(map(tuple, keys), slots, strict=True):
        if key[2] >= 0:
            table[key] = min(slot, table.get(key, slot))
    return table


@pytest.mark.parametrize(("impl", "rounds", "count"), [("reference", 40, 2048), ("triton", 2, 40)])
def test_random_keys_against_a_dict(impl, rounds, count, device):
    generator = torch.Generator().manual_seed(3)
    cache = SpeculationCache(2 * count, count, device)
    for generation in range(rounds):
        # Small values in half of the rounds: many duplicates and near misses.
        keys = _random_keys(count, generator, spread=4 if generation % 2 else 1 << 40)
        keys[:, 3] %= 50 if generation % 2 else 1 << 30
        slots = torch.randperm(count, generator=generator)
        asked = torch.cat((keys[: count // 2], keys[count // 2 :] + 1))
        columns = keys.to(device).unbind(1)
        uid, base, accepted, extra = columns
        cache.insert(uid, generation, base, accepted, extra, slots.to(device), impl=impl)
        uid, base, accepted, extra = asked.to(device).unbind(1)
        found = cache.lookup(uid, generation, base, accepted, extra, impl=impl)
        table = _oracle(keys.tolist(), slots.tolist())
        assert found.slot.tolist() == [table.get(tuple(key), -1) for key in asked.tolist()]
    assert cache.dropped.item() == 0


def test_a_million_random_keys(device):
    generator = torch.Generator().manual_seed(8)
    count, rounds = 1 << 16, 16
    cache = SpeculationCache(4 * count, count, device)
    for generation in range(rounds):
        keys = _random_keys(count, generator)
        uid, base, accepted, extra = keys.to(device).unbind(1)
        slot = torch.arange(count, device=device)
        cache.insert(uid, generation, base, accepted, extra, slot, impl="reference")
        found = cache.lookup(uid, generation, base, accepted, extra, impl="reference")
        tuples = list(zip(*keys.t().tolist(), strict=True))
        table = dict(zip(reversed(tuples), reversed(range(count)), strict=True))
        assert found.slot.tolist() == [table[key] for key in tuples]
    assert cache.dropped.item() == 0


def test_what_a_lookup_of_a_round_moves(device):
    """32 requests of 24 branches: one launch, no wait, and what is probed at most four times."""
    batch, branches, width = 32, 24, 4
    generator = torch.Generator().manual_seed(4)
    keys = _random_keys(batch * branches, generator)
    tokens = torch.randint(1000, (len(keys), width), generator=generator).to(device)
    cache = SpeculationCache(2 * len(keys), len(keys), device, tokens=tokens)
    uid, base, accepted, extra = keys.to(device).unbind(1)
    slots = torch.arange(len(keys), device=device)
    cache.insert(uid, 7, base, accepted, extra, slots, impl="reference")
    asked = keys[::branches].clone()
    asked[1::4, 3] += 1  # a quarter misses
    uid, base, accepted, extra = asked.to(device).t().contiguous()
    with Meter() as meter:
        found = cache.lookup(uid, 7, base, accepted, extra, impl="triton")
    assert found.hit.tolist() == [index % 4 != 1 for index in range(batch)]
    words = cache.buckets.tolist()
    probed = 0
    for key, home in zip(asked.tolist(), _homes(asked, 7, len(words)), strict=True):
        while words[home] >= 0:
            probed += 1
            if keys[words[home] & 0xFFFFFFFF].tolist() == key:
                break
            home = (home + 1) % len(words)
        else:
            probed += 1
    assert (meter.launches, meter.syncs) == (1, 0)
    answers = batch * (1 + 4 + 2 * 8 * width)  # hit, slot, and the tokens read and written
    assert meter.bytes_moved - answers <= 4 * 48 * probed


def _homes(keys: torch.Tensor, generation: int, capacity: int) -> list[int]:
    rows = keys.numpy()
    fields = np.insert(rows, 1, generation, axis=1)
    return _home_reference(fields, capacity).tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_all_keys_in_one_bucket(impl, device):
    # The home bucket is forced by searching keys that share it, so nothing is patched on a device.
    capacity, wanted = 64, 24
    rows = np.array([(u, 0, 7, 1, x) for u in range(40) for x in range(64)])
    chosen = rows[_home_reference(rows, capacity) == 63][:wanted]  # probes wrap around the end
    keys = [(int(u), int(b), int(k), int(x)) for u, _, b, k, x in chosen]
    assert len(keys) == wanted
    cache = SpeculationCache(capacity, wanted, device)
    _insert(cache, keys, range(wanted), 0, impl, device)
    assert _slots(cache, keys, 0, impl, device) == list(range(wanted))
    assert (
        _slots(cache, [(k[0], k[1], k[2], k[3] + 64) for k in keys[:4]], 0, impl, device)
        == [-1] * 4
    )
    assert cache.dropped.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_full_table_drops_and_counts(impl, device):
    cache = SpeculationCache(4, 8, device)
    keys = [(u, 5, 1, 2) for u in range(8)]
    _insert(cache, keys[:4], range(4), 0, impl, device)
    _insert(cache, keys[4:], range(4, 8), 0, impl, device)
    assert cache.dropped.item() == 4
    assert _slots(cache, keys, 0, impl, device) == [0, 1, 2, 3, -1, -1, -1, -1]
    # The next generation has the whole table; which of too many are kept is not promised.
    _insert(cache, keys, range(8), 1, impl, device)
    slots = _slots(cache, keys, 1, impl, device)
    assert all(slot in (-1, index) for index, slot in enumerate(slots))
    assert slots.count(-1) == 4
    assert cache.dropped.item() == 8


@pytest.mark.parametrize("impl", IMPLS)
def test_probes_are_bounded(impl, device):
    cache = SpeculationCache(16, 16, device, max_probes=1)
    keys = [(u, 5, 1, 2) for u in range(16)]
    _insert(cache, keys, range(16), 0, impl, device)
    homes = _home_reference(np.array([(u, 0, 5, 1, 2) for u in range(16)]), 16).tolist()
    slots = _slots(cache, keys, 0, impl, device)
    assert all(slot in (-1, index) for index, slot in enumerate(slots))
    kept = [homes[slot] for slot in slots if slot >= 0]
    assert sorted(kept) == sorted(set(homes))  # one of each home bucket
    assert cache.dropped.item() == 16 - len(kept)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_field_counts_and_swapped_fields_differ(impl, device):
    cache = SpeculationCache(32, 8, device)
    key = (11, 22, 3, 44)
    _insert(cache, [key], [5], 9, impl, device)
    others = [key[:i] + (key[i] + 1,) + key[i + 1 :] for i in range(4)]
    others += [(22, 11, 3, 44), (44, 22, 3, 11), (11, 44, 3, 22), (11, 3, 22, 44), (3, 22, 11, 44)]
    others += [(key[i] + (1 << 32) if i == j else key[i] for i in range(4)) for j in (0, 1, 3)]
    others = [tuple(other) for other in others]
    assert _slots(cache, [key, *others], 9, impl, device) == [5] + [-1] * len(others)
    assert _slots(cache, [(key[0], key[1], key[2], key[3])], 10, impl, device) == [-1]


@pytest.mark.parametrize("impl", IMPLS)
def test_generations_forget_and_wrap(impl, device):
    cache = SpeculationCache(8, 4, device)
    keys = [(1, 10, 0, 5), (2, 10, 0, 5), (3, 10, 1, 6), (4, 10, 2, 7)]
    for generation in (0, 1, 1 << 32, (1 << 32) + 1, -1, (1 << 63) - 1, -(1 << 63)):
        assert _slots(cache, keys, generation, impl, device) == [-1] * 4
        _insert(cache, keys, range(4), generation, impl, device)
        assert _slots(cache, keys, generation, impl, device) == [0, 1, 2, 3]
    assert cache.dropped.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_reused_uid_of_a_newer_generation_misses(impl, device):
    cache = SpeculationCache(8, 4, device)
    generation = torch.tensor([7], device=device)
    _insert(cache, [(1, 10, 0, 5)], [2], generation, impl, device)
    assert _slots(cache, [(1, 10, 0, 5)], generation, impl, device) == [2]
    generation += 1
    assert _slots(cache, [(1, 10, 0, 5)], generation, impl, device) == [-1]
    # One generation per key, as several engines of one cache have.
    per_key = torch.tensor([8, 9], device=device)
    _insert(cache, [(1, 10, 0, 5), (1, 10, 0, 5)], [3, 0], per_key, impl, device)
    assert _slots(cache, [(1, 10, 0, 5)] * 2, per_key, impl, device) == [3, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_order_of_inserts_does_not_matter(impl, device):
    generator = torch.Generator().manual_seed(5)
    keys = [tuple(key) for key in _random_keys(12, generator, spread=3).tolist()]
    keys += keys[:6]  # duplicates: the lowest slot wins whichever comes first
    slots = torch.randperm(len(keys), generator=generator).tolist()
    table = _oracle(keys, slots)
    for seed in range(3):
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed)).tolist()
        cache = SpeculationCache(32, len(keys), device)
        shuffled = [keys[i] for i in order], [slots[i] for i in order]
        split = 7 * seed
        for part in (slice(0, split), slice(split, None)):
            _insert(cache, shuffled[0][part], shuffled[1][part], 0, impl, device)
        assert _slots(cache, keys, 0, impl, device) == [table[key] for key in keys]


def test_many_duplicates_at_once(device):
    # On a GPU these inserts race for the same buckets; in the interpreter they only take turns.
    rounds, distinct, copies = (200, 4096, 16) if device == "cuda" else (1, 6, 4)
    generator = torch.Generator().manual_seed(9)
    count = distinct * copies
    cache = SpeculationCache(2 * distinct, count, device)
    keys = _random_keys(distinct, generator).repeat(copies, 1)
    for generation in range(rounds):
        order = torch.randperm(count, generator=generator)
        uid, base, accepted, extra = keys[order].to(device).unbind(1)
        cache.insert(
            uid, generation, base, accepted, extra, order.to(device), impl="triton"
        )  # slot = index of the copy, so the lowest is below `distinct`
        uid, base, accepted, extra = keys[:distinct].to(device).unbind(1)
        found = cache.lookup(uid, generation, base, accepted, extra, impl="triton")
        assert torch.equal(found.slot.cpu(), torch.arange(distinct, dtype=torch.int32))
    assert cache.dropped.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_unused_branches_and_bad_slots_are_ignored(impl, device):
    cache = SpeculationCache(8, 2, device)
    keys = [(1, 10, PAD, PAD), (1, 10, 0, 5), (1, 10, 0, 6), (1, 10, 1, 6)]
    _insert(cache, keys, [0, 1, 2, -1], 0, impl, device)
    assert _slots(cache, keys, 0, impl, device) == [-1, 1, -1, -1]
    assert cache.dropped.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_corrupted_table_can_only_miss(impl, device):
    keys = [(u, 10, 0, 5) for u in range(6)]
    for word in (0, 3, (0 << 32) | 99, -1, (1 << 32) | 1, 1 << 62):
        cache = SpeculationCache(16, 6, device)
        _insert(cache, keys, range(6), 0, impl, device)
        cache.buckets.fill_(word)
        slots = _slots(cache, keys, 0, impl, device)
        assert all(slot in (-1, index) for index, slot in enumerate(slots))
        cache.key_rows.fill_(12345)
        assert _slots(cache, keys, 0, impl, device) == [-1] * 6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [0, 1, 5])
def test_lookup_gathers_the_chains(width, impl, device):
    tokens = torch.arange(4 * width, device=device).view(4, width)
    cache = SpeculationCache(8, 4, device, tokens=tokens)
    _insert(cache, [(1, 10, 0, 5), (2, 10, 1, 6)], [3, 1], 0, impl, device)
    uid, base, accepted, extra = _columns([(2, 10, 1, 6), (9, 10, 1, 6), (1, 10, 0, 5)], device)
    out = Lookup(
        torch.ones(3, dtype=torch.bool, device=device),
        torch.full((3,), -77, dtype=torch.int32, device=device),
        torch.full((3, width), -77, device=device),
    )
    found = cache.lookup(uid, 0, base, accepted, extra, out=out, impl=impl)
    assert found is out
    assert out.hit.tolist() == [True, False, True]
    assert out.slot.tolist() == [1, -1, 3]
    assert torch.equal(out.tokens[[0, 2]], tokens[[1, 3]])
    assert (out.tokens[1] == PAD).all()
    tokens.add_(100)  # bound, not copied: what the drafter writes later is what a lookup gives
    assert torch.equal(cache.lookup(uid, 0, base, accepted, extra).tokens[0], tokens[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_no_keys(impl, device):
    cache = SpeculationCache(8, 4, device, draft_len=3)
    _insert(cache, [], [], 0, impl, device)
    assert _slots(cache, [], 0, impl, device) == []


def test_wrong_arguments_are_named(device):
    cache = SpeculationCache(8, 4, device)
    uid, base, accepted, extra = _columns([(1, 2, 3, 4)], device)
    with pytest.raises(DTypeError, match="uid"):
        cache.lookup(uid.int(), 0, base, accepted, extra)
    with pytest.raises(ShapeError, match="base"):
        cache.lookup(uid, 0, base[:0], accepted, extra)
    with pytest.raises(DTypeError, match="accepted"):
        cache.insert(uid, 0, base, accepted.float(), extra, accepted)
    with pytest.raises(DTypeError, match="generation"):
        cache.lookup(uid, accepted, base, accepted, extra)
    with pytest.raises(ShapeError, match="tokens"):
        SpeculationCache(8, 4, device, tokens=torch.zeros(3, 2, dtype=torch.int64, device=device))
    for bad in ({"capacity": 0}, {"rows": 0}, {"max_probes": 0}):
        with pytest.raises(ConfigError):
            SpeculationCache(**{"capacity": 8, "rows": 4, "device": device} | bad)


class TestSize:
    def test_branches_reach_the_hit_rate(self):
        size = optimal_cache_size(8, 0.8, None, draft_len=4, vocab=1000, power=1.0)
        assert (size.branches, size.rows, size.entries) == (25, 200, 512)
        assert size.row_bytes == 200 * 4 * 1000 * 2
        assert not size.limited

    def test_entries_are_twice_the_rows_rounded_up(self):
        for hit_rate in (0.0, 0.3, 0.9):
            size = optimal_cache_size(3, hit_rate, None, draft_len=2, vocab=10)
            assert 2 * size.rows <= size.entries < 4 * size.rows
            assert size.entries & (size.entries - 1) == 0

    def test_memory_shrinks_the_branches_and_says_so(self):
        free = optimal_cache_size(4, 0.9, None, draft_len=4, vocab=49152)
        limit = (free.row_bytes + free.table_bytes) // 2
        size = optimal_cache_size(4, 0.9, limit, draft_len=4, vocab=49152)
        assert size.limited and size.branches < free.branches
        assert size.row_bytes + size.table_bytes <= limit
        exact = optimal_cache_size(
            4, 0.9, size.row_bytes + size.table_bytes, draft_len=4, vocab=49152
        )
        assert exact == size

    def test_a_limit_below_one_branch_names_the_bytes(self):
        with pytest.raises(ConfigError, match="memory_limit: got 1000 bytes, want >= "):
            optimal_cache_size(2, 0.5, 1000, draft_len=4, vocab=49152)
        with pytest.raises(ConfigError, match="hit_rate"):
            optimal_cache_size(2, 1.0, None, draft_len=4, vocab=49152)
