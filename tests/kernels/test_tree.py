"""Layouts of trees and chains against their definitions; registration of the ops of the tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.traffic import Meter
from saguaro_kernels._launch import INTERPRETED
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.distribution import PAD, Sampling
from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.ngram import ngram_propose
from saguaro_kernels.outcomes import allocate_fan_out, predict_outcomes
from saguaro_kernels.promotion import promote_branch
from saguaro_kernels.rng import Keys
from saguaro_kernels.tree import Layout, chain_layout, tree_layout
from saguaro_kernels.tree_attention import tree_attention

IMPLS = ("reference", "triton")
POISON = -(1 << 60)


def _poisoned(steps: int, batch: int, width: int, device: str) -> Layout:
    wide = torch.full((3, steps, batch, width), POISON, device=device)
    ids = torch.full((batch, width), POISON, device=device)
    return Layout(ids, *wide, torch.full_like(ids, -12345, dtype=torch.int32))


def _tree_by_hand(depth, tokens, trunk_len, draft_len, table, page):
    batch, width = depth.shape
    ids, positions, slots, physical = [], [], [], []
    for b in range(batch):
        ids.append([tokens[b, i] if depth[b, i] >= 0 else 0 for i in range(width)])
    for s in range(draft_len + 1):
        for b in range(batch):
            n = int(trunk_len[b]) + 1  # committed tokens; the extra of depth k stands at n + k
            chain_end = n - 1 + draft_len + 1
            for i in range(width):
                k = int(depth[b, i])
                positions.append(n + k + s if k >= 0 else 0)
                slot = chain_end + s * width + i
                slots.append(slot)
                row = slot
                if table is not None:
                    row = int(table[b, slot // page]) * page + slot % page
                physical.append(row)
    shape = (draft_len + 1, batch, width)
    as_tensor = lambda values: torch.tensor(values).view(shape)  # noqa: E731
    return torch.tensor(ids), as_tensor(positions), as_tensor(slots), as_tensor(physical)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize(
    ("batch", "width", "draft_len"), [(1, 1, 0), (3, 5, 3), (2, 33, 7), (2, 130, 1)]
)
def test_tree_is_its_definition(batch, width, draft_len, page, impl, device):
    generator = torch.Generator().manual_seed(width)
    depth = torch.randint(-1, draft_len + 1, (batch, width), generator=generator, dtype=torch.int32)
    tokens = torch.randint(0, 99, (batch, width), generator=generator).masked_fill(depth < 0, PAD)
    trunk = torch.randint(0, 40, (batch,), generator=generator, dtype=torch.int32)
    table = None
    if page is not None:
        pages = (40 + draft_len + 1 + (draft_len + 1) * width) // page + 1
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
    out = _poisoned(draft_len + 1, batch, width, device)
    given = [depth.to(device), tokens.to(device), trunk.to(device)]
    kept = [tensor.clone() for tensor in given]
    layout = tree_layout(
        *given,
        draft_len=draft_len,
        page_table=None if table is None else table.to(device),
        page_size=page or 1,
        out=out,
        impl=impl,
    )
    expected = _tree_by_hand(depth, tokens, trunk, draft_len, table, page)
    for name, want in zip(("ids", "positions", "slots", "physical"), expected, strict=True):
        assert torch.equal(getattr(layout, name).cpu(), want), name
        assert getattr(layout, name) is getattr(out, name)
    assert layout.depth is given[0]
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_the_worked_example(device):
    # n = 5, K = 2: branch (1, x) feeds x at 6, its drafts at 7 and 8; the chain takes slots 4..6.
    layout = tree_layout(
        torch.tensor([[1]], dtype=torch.int32, device=device),
        torch.tensor([[77]], device=device),
        torch.tensor([4], device=device),
        draft_len=2,
    )
    assert layout.positions.flatten().tolist() == [6, 7, 8]
    assert layout.slots.flatten().tolist() == [7, 8, 9]
    assert layout.ids.tolist() == [[77]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [None, 4])
def test_chain_is_its_definition(page, impl, device):
    width, count, trunk = 1300 if page is None else 6, [4, 0, 6], [7, 3, 0]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 99, (3, width), generator=generator)
    table = torch.randperm(3 * 5, generator=generator).view(3, 5).int()
    out = _poisoned(1, 3, width, device)
    layout = chain_layout(
        tokens.to(device),
        torch.tensor(count, device=device),
        torch.tensor(trunk, device=device),
        page_table=None if page is None else table.to(device),
        page_size=page or 1,
        out=out,
        impl=impl,
    )
    for b in range(3):
        for i in range(width):
            used, slot = i < count[b], trunk[b] + i
            assert layout.ids[b, i] == (tokens[b, i] if used else 0)
            assert layout.depth[b, i] == (i if used else PAD)
            assert layout.positions[0, b, i] == (slot if used else 0)
            assert layout.slots[0, b, i] == slot
            want = slot if page is None else table[b, slot // page] * page + slot % page
            assert layout.physical[0, b, i] == want


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_batches_and_trees(impl, device):
    for batch, width in ((0, 4), (2, 0)):
        layout = tree_layout(
            torch.zeros(batch, width, dtype=torch.int32, device=device),
            torch.zeros(batch, width, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            draft_len=2,
            impl=impl,
        )
        assert layout.slots.shape == (3, batch, width)


def test_wrong_arguments_are_named(device):
    depth = torch.zeros(2, 3, dtype=torch.int32, device=device)
    tokens, trunk = depth.long(), torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(DTypeError, match="depth"):
        tree_layout(depth.long(), tokens, trunk, draft_len=1)
    with pytest.raises(ShapeError, match="tokens"):
        tree_layout(depth, tokens[:, :2], trunk, draft_len=1)
    with pytest.raises(ShapeError, match="trunk_len"):
        tree_layout(depth, tokens, trunk[:1], draft_len=1)
    with pytest.raises(ConfigError, match="draft_len"):
        tree_layout(depth, tokens, trunk, draft_len=-1)
    with pytest.raises(ConfigError, match="page_size"):
        chain_layout(tokens, trunk, trunk, page_size=0)
    with pytest.raises(DTypeError, match="page_table"):
        chain_layout(tokens, trunk, trunk, page_table=tokens, page_size=1)


def _calls(device: str) -> dict[str, tuple[Callable[[str], object], int]]:
    """A small call of each op used by the tree, by name, and its launches."""
    depth = torch.tensor([[0, 1, -1], [2, 0, 1]], dtype=torch.int32, device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    trunk = torch.tensor([3, 5], dtype=torch.int32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    kv = torch.ones(1, 2, 8, 8, 1, 16, device=device)
    query = torch.ones(2, 3, 2, 16, device=device)
    logits = torch.arange(240.0, device=device).view(2, 3, 40)
    two = torch.tensor([2, 1], device=device)
    sampling = Sampling(torch.tensor([1.0, 0.0], device=device))
    cache = SpeculationCache(16, 6, device, draft_len=2)
    hit = {"trunk_len": trunk, "depth": two, "branch": two, "draft_len": 2, "branches": 3}
    return {
        "tree_layout": (
            lambda impl: tree_layout(
                depth, tokens, trunk, draft_len=2, page_table=table, page_size=8, impl=impl
            ).slots,
            1,
        ),
        "chain_layout": (lambda impl: chain_layout(tokens, trunk, trunk, impl=impl).slots, 1),
        "tree_attention": (
            lambda impl: tree_attention(
                query, kv[0, 0], kv[0, 1], table,
                trunk_len=trunk, depth=depth, draft_len=2, step=1, impl=impl,
            ),
            1,
        ),
        "promote_branch": (lambda impl: promote_branch(kv, table, **hit, impl=impl), 1),
        "cache_insert": (lambda impl: cache.insert(two, 1, two, two, two, two, impl=impl), 1),
        "cache_lookup": (lambda impl: cache.lookup(two, 1, two, two, two, impl=impl).slot, 1),
        "predict_outcomes": (
            lambda impl: predict_outcomes(
                logits, tokens[:, :2], two, sampling, Keys(two, two), branches=4, impl=impl
            ).tokens,
            2,
        ),
        "allocate_fan_out": (lambda impl: allocate_fan_out(logits[0], 5, 0.5, impl=impl), 1),
        "ngram_propose": (lambda impl: ngram_propose(tokens, two, num_tokens=2, impl=impl)[0], 1),
    }  # fmt: skip


class _Captured(TorchDispatchMode):
    """Keeps the registered ops that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "saguaro":
            self.ops.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(_calls("cpu")))
def test_ops_are_registered_compile_and_never_wait(name, device):
    call, launches = _calls(device)[name]
    with _Captured() as captured:
        eager = call("reference")
    [(op, arguments)] = captured.ops
    assert op.name() == f"saguaro::{name}"
    torch.library.opcheck(op, arguments)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")("reference")
    assert eager is None or torch.equal(compiled, eager)
    with Meter() as meter:
        call("triton")
    assert meter.syncs == 0
    if INTERPRETED:  # the meter counts the interpreter's launches
        assert meter.launches <= launches + (name == "predict_outcomes")  # a slice made contiguous
