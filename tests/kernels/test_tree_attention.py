"""Tree attention, reference and kernel, against dense attention in float64.

What a query sees is built here from the text of its branch, not from the kernel's closed form: the
positions before the query in order, each one's slot looked up by who wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bench.traffic import Meter
from saguaro_kernels._launch import INTERPRETED
from saguaro_kernels.errors import ConfigError, DeviceError, DTypeError, ShapeError
from saguaro_kernels.tree import tree_layout
from saguaro_kernels.tree_attention import (
    attention_plan,
    tree_attention,
    tree_attention_workspace,
)
from saguaro_kernels.tree_attention import launch as launch_module

IMPLS = ("reference", "triton")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-9}


@dataclass
class Case:
    """Pages with NaN in every slot that nobody wrote, and the arguments of one call."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    trunk: list[int]
    depth: torch.Tensor
    draft_len: int
    step: int


def _text(case: Case, b: int, i: int) -> list[tuple[int, int]]:
    """(position, slot) of every token that query i of request b sees, itself included."""
    trunk, k, width = case.trunk[b], int(case.depth[b, i]), case.depth.shape[1]
    if k < 0:
        return []
    # The trunk, the last committed token and the k accepted drafts: one slot per position.
    text = [(position, position) for position in range(trunk + 1 + k)]
    chain_end = trunk + 1 + case.draft_len
    for s in range(case.step + 1):  # the branch's own tokens, written step by step
        text.append((len(text), chain_end + s * width + i))
    return text


def make_case(
    *,
    trunk,
    depth,
    draft_len=3,
    step=1,
    page=16,
    heads=3,
    kv_heads=1,
    head_dim=16,
    dtype=torch.float32,
    seed=0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    depth = torch.tensor(depth, dtype=torch.int32)
    batch, width = depth.shape
    longest = max(trunk) + draft_len + 1 + (draft_len + 1) * width
    if step < 0:
        longest = max(trunk) + int(depth.max().clamp(min=0)) + 1
    pages = -(-longest // page)
    count = batch * pages + 1
    table = torch.randperm(count, generator=generator)[: batch * pages].view(batch, pages).int()
    shape = (count, page, kv_heads, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(batch, width, heads, head_dim, generator=generator).to(dtype)
    case = Case(query, keys, values, table, trunk, depth, draft_len, step)
    written = torch.zeros(count, page, dtype=torch.bool)
    for b in range(batch):
        for i in range(width):
            for _, slot in _text(case, b, i):
                written[table[b, slot // page], slot % page] = True
    for tensor in (keys, values):
        tensor[~written] = float("nan")
    return case


def dense(case: Case, *, scale=None, softcap=None, window=None) -> torch.Tensor:
    batch, width, heads, head_dim = case.query.shape
    group, page = heads // case.keys.shape[2], case.keys.shape[1]
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    for b in range(batch):
        for i in range(width):
            text = _text(case, b, i)
            if not text:
                continue
            own = text[-1][0]
            slots = torch.tensor([s for p, s in text if window is None or own - p < window])
            where = case.table[b].long()[slots // page], slots % page
            key, value = (
                t[where].double().repeat_interleave(group, 1) for t in (case.keys, case.values)
            )
            score = torch.einsum("hd,shd->hs", case.query[b, i].double(), key)
            score *= head_dim**-0.5 if scale is None else scale
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            out[b, i] = torch.einsum("hs,shd->hd", score.softmax(-1), value)
    return out


def run(case: Case, impl: str, device: str, **options) -> torch.Tensor:
    given = [t.to(device) for t in (case.query, case.keys, case.values, case.table, case.depth)]
    kept = [t.clone() for t in given]
    query, keys, values, table, depth = given
    out = torch.full(query.shape, float("nan"), dtype=query.dtype, device=device)
    step = options.pop("step", case.step)
    result = tree_attention(
        query,
        keys,
        values,
        table,
        trunk_len=torch.tensor(case.trunk, dtype=torch.int32, device=device),
        depth=depth,
        draft_len=case.draft_len,
        step=step,
        out=out,
        impl=impl,
        **options,
    )
    assert result is out
    for before, after in zip(kept, given, strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))
    return out.cpu()


def check(case: Case, impl: str, device: str, run_options=None, **options) -> None:
    got = run(case, impl, device, **options, **(run_options or {}))
    difference = (got.double() - dense(case, **options)).abs().max().item()
    assert difference <= TOLERANCE[case.query.dtype], difference  # and so not NaN
    assert (got[case.depth < 0] == 0).all()


RAGGED = [[0, 0, 1, 3, -1], [0, 1, 2, 3, 3], [-1, 2, -1, -1, 0], [-1, -1, -1, -1, -1]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("step", [0, 3])
def test_trees_of_very_different_lengths(page, heads, kv_heads, step, impl, device):
    case = make_case(
        trunk=[1, 150, 17, 5], depth=RAGGED, step=step, page=page, heads=heads, kv_heads=kv_heads
    )
    check(case, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_every_draft_length_and_step(draft_len, impl, device):
    generator = torch.Generator().manual_seed(draft_len)
    depth = torch.randint(-1, draft_len + 1, (2, 7), generator=generator).tolist()
    step = draft_len if draft_len % 2 else draft_len // 2
    case = make_case(trunk=[draft_len, 33], depth=depth, draft_len=draft_len, step=step)
    check(case, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("width", "trunk"), [(1, [0, 40]), (5, [3, 130]), (70, [0, 9])])
def test_decode_verification_and_prefill(width, trunk, impl, device):
    depth = [list(range(width)), [i if i < 4 else -1 for i in range(width)]]
    case = make_case(trunk=trunk, depth=depth, step=-1, draft_len=0, heads=6, kv_heads=2)
    check(case, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("trunk", [1000, 4097])
def test_long_trunks(trunk, impl, device):
    depth = [[k % 5 for k in range(20)], [0] * 19 + [-1]]
    case = make_case(trunk=[trunk, 1], depth=depth, draft_len=4, step=4, heads=3, head_dim=64)
    check(case, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_dimensions_and_dtypes(head_dim, dtype, impl, device):
    case = make_case(
        trunk=[20, 70],
        depth=[[0, 1, 3], [2, -1, 0]],
        head_dim=head_dim,
        dtype=dtype,
        heads=4,
        kv_heads=2,
    )
    check(case, impl, device)


def test_the_reference_in_float64():
    case = make_case(trunk=[20, 70], depth=[[0, 1, 3], [2, -1, 0]], dtype=torch.float64)
    check(case, "reference", "cpu")
    check(case, "reference", "cpu", softcap=2.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"softcap": 1.5},
        {"window": 1},
        {"window": 4},
        {"window": 60, "softcap": 3.0, "scale": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [-1, 0, 3])
def test_scale_softcap_and_window(options, step, impl, device):
    depth = RAGGED[:3] if step >= 0 else [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1], [-1] * 5]
    case = make_case(trunk=[1, 90, 17], depth=depth, step=step, heads=4, kv_heads=2)
    check(case, impl, device, **options)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_step_may_lie_on_the_device(impl, device):
    for step in (-1, 0, 2):
        depth = [[0, 1, 3], [2, -1, 0]] if step >= 0 else [[0, 1, 2], [0, 1, -1]]
        case = make_case(trunk=[5, 30], depth=depth, step=step)
        there = torch.tensor(step, dtype=torch.int32, device=device)
        assert torch.equal(run(case, impl, device, step=there), run(case, impl, device))
        check(case, impl, device, run_options={"step": there})


def test_the_number_of_shares_does_not_matter(device, monkeypatch):
    case = make_case(trunk=[1, 130], depth=[[0, 1, 3, 2], [0, 3, -1, 1]], step=2)
    results = []
    for splits in (1, 2, 5):
        config = launch_module.TreeAttentionConfig(16, 32, splits, 4)
        monkeypatch.setattr(launch_module, "_config", lambda *_, config=config: config)
        results.append(run(case, "triton", device))
        assert (results[-1].double() - dense(case)).abs().max() < 2e-5
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-6, rtol=1e-5)


def test_rows_may_take_several_tiles(device, monkeypatch):
    depth = [[i % 4 for i in range(7)], [3, -1, 3, -1, -1, -1, 0]]
    case = make_case(trunk=[3, 40], depth=depth, step=3, heads=4)
    config = launch_module.TreeAttentionConfig(16, 32, 2, 4)
    monkeypatch.setattr(launch_module, "_config", lambda *_: config)
    check(case, "triton", device)
    check(case, "triton", device, window=9)


def test_the_trunk_is_read_once_for_all_branches_and_group_heads(device):
    trunk, draft_len, width, head_dim = 4096, 4, 24, 64
    depth = [[k % (draft_len + 1) for k in range(width)]]
    case = make_case(
        trunk=[trunk], depth=depth, draft_len=draft_len, step=draft_len, heads=3,
        head_dim=head_dim, dtype=torch.float16,
    )  # fmt: skip
    with Meter() as meter:
        check(case, "triton", device)
    slots = trunk + (draft_len + 1) * (1 + width)
    bound = 2 * (2 * slots * head_dim + case.query.numel())  # keys, values and queries once
    if INTERPRETED:  # the meter counts the interpreter's loads
        assert meter.kernels["_tree_attention_kernel"].bytes_read <= 1.1 * bound
        assert sum(name.startswith("_tree_attention") for name in meter.kernels) == 2


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_does_not_depend_on_its_batch(impl, device):
    case = make_case(trunk=[1, 150, 17, 5], depth=RAGGED, step=2, heads=6, kv_heads=2)
    whole = run(case, impl, device)
    order = [2, 0, 3, 1]
    shuffled = Case(
        case.query[order], case.keys, case.values, case.table[order],
        [case.trunk[b] for b in order], case.depth[order], case.draft_len, case.step,
    )  # fmt: skip
    assert torch.equal(run(shuffled, impl, device), whole[order])


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_views_and_unaligned_strides(impl, device):
    case = make_case(trunk=[9, 40], depth=[[0, 1, 3], [2, -1, 0]], heads=4, kv_heads=2, head_dim=20)
    expected = dense(case)
    # Keys and values interleaved in one tensor, as an engine keeps them; queries sliced out of qkv.
    both = torch.stack((case.keys, case.values), dim=2).to(device)
    qkv = torch.cat((case.query, case.query, case.query), dim=2).to(device)
    got = tree_attention(
        qkv[:, :, 4:8],
        both[:, :, 0],
        both[:, :, 1],
        case.table.to(device),
        trunk_len=torch.tensor(case.trunk, device=device),
        depth=case.depth.to(device),
        draft_len=3,
        step=1,
        impl=impl,
    )
    assert (got.cpu().double() - expected).abs().max() < 2e-5


@pytest.mark.parametrize("page", [1, 16])
def test_a_plan_changes_nothing_but_time(page):
    for step, window in ((2, None), (2, 9), (-1, None)):
        depth = (
            RAGGED
            if step >= 0
            else [[0, 1, 2, 3, 4], [0, -1, -1, -1, -1], [-1] * 5, [0, 1, 2, -1, -1]]
        )
        case = make_case(trunk=[1, 150, 17, 5], depth=depth, step=step, page=page)
        lengths = {
            "trunk_len": torch.tensor(case.trunk),
            "depth": case.depth,
            "draft_len": case.draft_len,
            "step": step,
            "window": window,
        }
        plan = attention_plan(case.table, page, **lengths)
        pages = case.query, case.keys, case.values, case.table
        with_plan = tree_attention(*pages, **lengths, plan=plan, impl="reference")
        assert torch.equal(with_plan, tree_attention(*pages, **lengths, impl="reference"))
        check(case, "reference", "cpu", run_options={"plan": plan}, window=window)


def test_long_prefill_in_the_reference_needs_no_quadratic_mask(monkeypatch):
    from saguaro_kernels.tree_attention import reference

    case = make_case(trunk=[0], depth=[list(range(300))], step=-1, draft_len=0)
    expected = run(case, "reference", "cpu")
    monkeypatch.setattr(reference, "_STORED_MASK", 0)
    plan = attention_plan(
        case.table, 16, trunk_len=torch.tensor([0]), depth=case.depth, draft_len=0, step=-1
    )
    assert all(block.mask is None for block in plan.blocks)
    assert torch.equal(run(case, "reference", "cpu", plan=plan), expected)
    check(case, "reference", "cpu")


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_of_the_layout_are_the_slots_that_are_read(impl, device):
    # Writes through tree_layout, step by step, and attends after each: the two files agree.
    draft_len, width, page = 2, 3, 4
    depth = torch.tensor([[0, 2, -1], [1, 1, 0]], dtype=torch.int32)
    case = make_case(trunk=[2, 9], depth=depth.tolist(), draft_len=draft_len, step=2, page=page)
    layout = tree_layout(
        depth, torch.zeros(2, width, dtype=torch.int64), torch.tensor(case.trunk),
        draft_len=draft_len, page_table=case.table, page_size=page, impl="reference",
    )  # fmt: skip
    rows = torch.stack([layout.physical[s, 0] for s in range(3)])
    keys, values = case.keys.clone(), case.values.clone()
    for b in range(2):
        for tensor in (case.keys, case.values):  # forget what the branches wrote
            tensor.flatten(0, 1)[layout.physical[:, b].flatten()] = float("nan")
    assert case.keys.flatten(0, 1)[rows].isnan().all()
    for step in range(3):
        for b in range(2):
            where = layout.physical[step, b]
            for tensor, written in ((case.keys, keys), (case.values, values)):
                tensor.flatten(0, 1)[where] = written.flatten(0, 1)[where]
        case.step = step
        check(case, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_batches(impl, device):
    case = make_case(trunk=[4], depth=[[0, 1]])
    case.query, case.depth, case.table = case.query[:0], case.depth[:0], case.table[:0]
    case.trunk = []
    assert run(case, impl, device).shape == (0, 2, 3, 16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("trunk", [20, 900], ids=["whole", "split"])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_nan_that_is_seen_is_not_hidden(impl, trunk, part, device):
    case = make_case(trunk=[trunk], depth=[[0, -1]], draft_len=4, step=0)
    getattr(case, part)[case.table[0, 0], 3] = float("nan")  # slot 3, of the trunk
    out = run(case, impl, device)
    assert out[0, 0].isnan().all() and (out[0, 1] == 0).all()


def test_the_workspace_is_the_callers(device):
    case = make_case(trunk=[900], depth=[[0, 1]], draft_len=4, step=0)
    size = tree_attention_workspace(case.query, case.keys, case.table)
    assert size > 0
    workspace = torch.full((size,), float("nan"), device=device)
    check(case, "triton", device, run_options={"workspace": workspace})
    with pytest.raises(ShapeError, match="workspace"):
        run(case, "triton", device, workspace=workspace[1:])


def _arguments(device):
    case = make_case(trunk=[4, 5], depth=[[0, 1], [1, -1]], heads=4, kv_heads=2)
    pages = [t.to(device) for t in (case.query, case.keys, case.values, case.table)]
    trunk = torch.tensor(case.trunk, dtype=torch.int32, device=device)
    return pages, {"trunk_len": trunk, "depth": case.depth.to(device), "draft_len": 3, "step": 1}


def test_wrong_arguments_are_named(device):
    (query, keys, values, table), lengths = _arguments(device)
    for error, match, pages, changed in (
        (ShapeError, "heads", (query[:, :, :3], keys, values, table), {}),
        (ShapeError, "key_pages", (query, keys[..., :8], values, table), {}),
        (ShapeError, "value_pages", (query, keys, values[1:], table), {}),
        (DTypeError, "value_pages", (query, keys, values.half(), table), {}),
        (DTypeError, "page_table", (query, keys, values, table.long()), {}),
        (
            ShapeError,
            "contiguous",
            (query.transpose(1, 3).transpose(1, 3), keys, values, table),
            {},
        ),
        (ShapeError, "trunk_len", (query, keys, values, table), {"trunk_len": table[0, :1]}),
        (DTypeError, "depth", (query, keys, values, table), {"depth": lengths["depth"].long()}),
        (ConfigError, "step", (query, keys, values, table), {"step": 4}),
        (ConfigError, "step", (query, keys, values, table), {"step": -2}),
        (ShapeError, "step", (query, keys, values, table), {"step": torch.zeros(1)}),
        (ConfigError, "draft_len", (query, keys, values, table), {"draft_len": -1}),
        (ConfigError, "softcap", (query, keys, values, table), {"softcap": 0.0}),
        (ConfigError, "window", (query, keys, values, table), {"window": 0}),
        (ShapeError, "out", (query, keys, values, table), {"out": query[:1]}),
        (ConfigError, "impl", (query, keys, values, table), {"impl": "cuda"}),
    ):
        if match == "contiguous":
            pages = (torch.empty(query.shape[::-1], device=device).permute(3, 2, 1, 0), *pages[1:])
        with pytest.raises(error, match=match):
            tree_attention(*pages, **lengths | changed)
    wide = [t.double() if t.is_floating_point() else t for t in (query, keys, values, table)]
    with pytest.raises(DTypeError, match="float64"):
        tree_attention(*wide, **lengths, impl="triton")
    with pytest.raises(DeviceError, match="depth"):
        tree_attention(
            query, keys, values, table, **lengths | {"depth": lengths["depth"].to("meta")}
        )
