"""One drafter's cache for several verifiers, and any order of calls: properties against a dict.

On a GPU the two verifiers insert from streams of their own, so that their programs race; elsewhere
one comes after the other, in both orders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro_kernels.cache import SpeculationCache

Key = tuple[int, int, int, int]
IMPLS = ("reference", "triton")


def _columns(keys: Sequence[Key], device) -> list[torch.Tensor]:
    """uid, base, accepted, extra."""
    table = torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 4)
    return [column.contiguous() for column in table.unbind(1)]


def _insert(cache, keys, slots, generation, impl, device) -> None:
    uid, base, accepted, extra = _columns(keys, device)
    slot = torch.tensor(slots, dtype=torch.int64, device=device)
    cache.insert(uid, generation, base, accepted, extra, slot, impl=impl)


def _slots(cache, keys, generation, impl, device) -> list[int]:
    uid, base, accepted, extra = _columns(keys, device)
    return cache.lookup(uid, generation, base, accepted, extra, impl=impl).slot.tolist()


KEYS = st.tuples(*(st.integers(0, 3) for _ in range(2)), st.integers(-1, 2), st.integers(0, 3))
ROUND = st.tuples(st.integers(0, 2), st.lists(KEYS, max_size=10), st.lists(KEYS, max_size=4))


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([1, 4, 16]), st.sampled_from([None, 1, 3]), st.lists(ROUND, max_size=6))
def test_whatever_is_inserted_a_hit_is_right(capacity, probes, rounds):
    """Small tables, few probes, equal keys, unused branches, generations that go up by 0, 1, 2^32:
    a hit has the slot of an equal key of this generation. Where nothing was dropped, all of them
    are found, under the lowest slot; what was dropped is counted."""
    cache, generation = SpeculationCache(capacity, 64, "cpu", max_probes=probes), 0
    live: dict[Key, list[int]] = {}
    taken = 0
    for advance, keys, asked in rounds:
        if advance or taken + len(keys) > 64:  # a slot is used once per generation
            generation += 1 << 32 if advance == 2 else 1
            live, taken = {}, 0
        slots = list(range(taken, taken + len(keys)))[::-1]
        _insert(cache, keys, slots, generation, "reference", "cpu")
        taken += len(keys)
        for key, slot in zip(keys, slots, strict=True):
            if key[2] >= 0:
                live.setdefault(key, []).append(slot)
        everything = [*live, *asked]
        found = _slots(cache, everything, generation, "reference", "cpu")
        for key, slot in zip(everything, found, strict=True):
            assert slot == -1 or slot in live.get(key, ())
        lost = sum(slot == -1 for slot in found[: len(live)])
        if not lost:
            assert found[: len(live)] == [min(its) for its in live.values()]
        assert lost == 0 or cache.dropped.item() > 0


@contextlib.contextmanager
def _stream(device):
    """A stream of one's own where there are streams."""
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("first", [0, 1])
def test_verifiers_that_share_a_cache_find_their_own(first, impl, device):
    """Two verifiers in one round of the drafter, with outcomes that differ in the uid alone."""
    rounds, count = (200, 2048) if device == "cuda" else (2, 10)
    cache = SpeculationCache(4 * count, 2 * count, device)
    outcomes = [(30 + index % 3, index % 5, index) for index in range(count)]
    keys = [[(uid, *outcome) for outcome in outcomes] for uid in (1, 2)]
    slots = [list(range(count)), list(range(count, 2 * count))]
    for generation in range(rounds):
        for seat in (first, 1 - first):
            with _stream(device):
                _insert(cache, keys[seat], slots[seat], generation, impl, device)
        if device == "cuda":
            torch.cuda.synchronize()
        for seat in (0, 1):
            assert _slots(cache, keys[seat], generation, impl, device) == slots[seat]
        assert set(
            _slots(cache, [(3, *outcome) for outcome in outcomes], generation, impl, device)
        ) == {-1}
    assert cache.dropped.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_verifiers_of_different_rounds_never_find_anothers(impl, device):
    """A bucket of another round counts as empty, so one verifier may displace the other's entry:
    that is a miss, and never the other's chain."""
    cache = SpeculationCache(16, 16, device)
    keys = [(uid, 9, 1, extra) for uid in (1, 2) for extra in range(8)]
    rounds = torch.tensor([5] * 8 + [6] * 8, device=device)
    uid, base, accepted, extra = _columns(keys, device)
    cache.insert(uid, rounds, base, accepted, extra, torch.arange(16, device=device), impl=impl)
    found = cache.lookup(uid, rounds, base, accepted, extra, impl=impl).slot.tolist()
    assert all(slot in (-1, index) for index, slot in enumerate(found))
    assert any(slot >= 0 for slot in found)
    swapped = cache.lookup(uid, rounds.flip(0), base, accepted, extra, impl=impl)
    assert not bool(swapped.hit.any())
