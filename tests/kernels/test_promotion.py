"""Promotion against copying position by position in Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.promotion import promote_branch, promote_pages

IMPLS = ("reference", "triton")


def _case(batch, page, draft_len, branches, trunk, *, shape=(2, 2), heads=2, head_dim=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = max(trunk) + (draft_len + 1) * (branches + 1)
    pages = -(-slots // page)
    count = batch * pages + 1
    kv = torch.randn(*shape, count, page, heads, head_dim, generator=generator)
    table = torch.randperm(count, generator=generator)[: batch * pages].view(batch, pages).int()
    return kv, table


def _by_hand(kv, table, trunk, depth, branch, draft_len, branches):
    page, result = kv.shape[-3], kv.clone()
    for b, i in enumerate(branch):
        for s in range(draft_len + 1) if i >= 0 else ():
            source = trunk[b] + draft_len + 1 + s * branches + i
            target = trunk[b] + depth[b] + 1 + s
            result[..., table[b, target // page], target % page, :, :] = kv[
                ..., table[b, source // page], source % page, :, :
            ]
    return result


def _promote(kv, table, trunk, depth, branch, draft_len, branches, impl, device):
    moved = kv.to(device, copy=True)
    promote_branch(
        moved,
        table.to(device),
        trunk_len=torch.tensor(trunk, dtype=torch.int32, device=device),
        depth=torch.tensor(depth, device=device),
        branch=torch.tensor(branch, dtype=torch.int32, device=device),
        draft_len=draft_len,
        branches=branches,
        impl=impl,
    )
    return moved.cpu()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hits_move_and_nothing_else(page, dtype, impl, device):
    draft_len, branches = 3, 5
    trunk, depth, branch = [0, 9, 17, 4], [2, 0, 3, 1], [4, -1, 0, 2]
    kv, table = _case(4, page, draft_len, branches, trunk)
    kv = kv.to(dtype)
    got = _promote(kv, table, trunk, depth, branch, draft_len, branches, impl, device)
    assert torch.equal(got, _by_hand(kv, table, trunk, depth, branch, draft_len, branches))


@pytest.mark.parametrize("impl", IMPLS)
def test_every_overlap_of_source_and_target(impl, device):
    for draft_len, branches in itertools.product(range(4), range(1, 4)):
        pairs = list(itertools.product(range(draft_len + 1), range(branches)))
        depth, branch = (list(column) for column in zip(*pairs, strict=True))
        trunk = [1] * len(pairs)
        kv, table = _case(
            len(pairs), 4, draft_len, branches, trunk, shape=(1,), heads=1, head_dim=4
        )
        got = _promote(kv, table, trunk, depth, branch, draft_len, branches, impl, device)
        assert torch.equal(got, _by_hand(kv, table, trunk, depth, branch, draft_len, branches))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_hit_moves_nothing_and_reads_no_length(impl, device):
    kv, table = _case(2, 4, 2, 3, [1, 1])
    got = _promote(kv, table, [1 << 30, 1 << 30], [0, 0], [-1, -1], 2, 3, impl, device)
    assert torch.equal(got, kv)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_view_of_one_tensor_and_a_wide_row(impl, device):
    # Keys alone, as a strided view; rows wider than one block of elements.
    kv, table = _case(1, 4, 1, 2, [3], shape=(2, 2), heads=9, head_dim=300)
    expected = kv.clone()
    expected[:, 0] = _by_hand(kv[:, 0], table, [3], [1], [1], 1, 2)
    pages = kv.to(device, copy=True)
    promote_branch(
        pages[:, 0],
        table.to(device),
        trunk_len=torch.tensor([3], device=device),
        depth=torch.tensor([1], device=device),
        branch=torch.tensor([1], device=device),
        draft_len=1,
        branches=2,
        impl=impl,
    )
    assert torch.equal(pages.cpu(), expected)


def _swap(table, trunk, depth, branch, draft_len, branches, impl, device):
    # A part of a wider table, as an engine's rows are.
    wide = torch.full((len(table), table.shape[1] + 3), -9, dtype=torch.int32, device=device)
    wide[:, :-3] = table.to(device)
    promote_pages(
        wide[:, :-3],
        trunk_len=torch.tensor(trunk, device=device),
        depth=torch.tensor(depth, dtype=torch.int32, device=device),
        branch=torch.tensor(branch, device=device),
        draft_len=draft_len,
        branches=branches,
        impl=impl,
    )
    assert (wide[:, -3:] == -9).all()
    return wide[:, :-3].cpu()


def test_pages_of_one_slot_change_places_instead(device):
    """Every overlap of chain and branch: the chain reads what a copy would have given it, no page
    is lost or doubled, and no entry before the chain or of another branch changes."""
    for draft_len, branches in itertools.product(range(4), range(1, 4)):
        pairs = list(itertools.product(range(draft_len + 1), range(-1, branches)))
        depth, branch = (list(column) for column in zip(*pairs, strict=True))
        trunk = [1 + b % 3 for b in range(len(pairs))]
        kv, table = _case(
            len(pairs), 1, draft_len, branches, trunk, shape=(1,), heads=1, head_dim=4
        )
        copied = _by_hand(kv, table, trunk, depth, branch, draft_len, branches)
        tables = [
            _swap(table, trunk, depth, branch, draft_len, branches, impl, device) for impl in IMPLS
        ]
        assert torch.equal(*tables)
        assert torch.equal(tables[0].sort(1).values, table.sort(1).values)
        for b, (k, i) in enumerate(pairs):
            end = trunk[b] + (k + 1 + draft_len + 1 if i >= 0 else 0)
            for slot in range(end):
                assert torch.equal(kv[0, tables[0][b, slot]], copied[0, table[b, slot]])
            own = {trunk[b] + draft_len + 1 + s * branches + i for s in range(draft_len + 1)}
            changed = (tables[0][b] != table[b]).nonzero()[:, 0].tolist()
            allowed = own | set(range(trunk[b] + k + 1, end))
            assert set(changed) <= (allowed if i >= 0 else set())


def test_wrong_arguments_are_named(device):
    kv, table = (tensor.to(device) for tensor in _case(2, 4, 2, 3, [1, 1]))
    one = torch.ones(2, dtype=torch.int32, device=device)
    lengths = {"trunk_len": one, "depth": one, "branch": one}
    with pytest.raises(ShapeError, match="kv_pages"):
        promote_branch(kv[0, 0, 0], table, **lengths, draft_len=2, branches=3)
    with pytest.raises(ShapeError, match="contiguous"):
        promote_branch(kv.transpose(-1, -2), table, **lengths, draft_len=2, branches=3)
    with pytest.raises(DTypeError, match="page_table"):
        promote_branch(kv, table.long(), **lengths, draft_len=2, branches=3)
    with pytest.raises(ShapeError, match="depth"):
        promote_branch(kv, table, **lengths | {"depth": one[:1]}, draft_len=2, branches=3)
    with pytest.raises(ConfigError, match="branches"):
        promote_branch(kv, table, **lengths, draft_len=2, branches=0)
    with pytest.raises(DTypeError, match="page_table"):
        promote_pages(table.long(), **lengths, draft_len=2, branches=3)
    with pytest.raises(ShapeError, match="branch"):
        promote_pages(table, **lengths | {"branch": one[:1]}, draft_len=2, branches=3)
    with pytest.raises(ConfigError, match="draft_len"):
        promote_pages(table, **lengths, draft_len=-1, branches=3)
