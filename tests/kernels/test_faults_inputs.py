"""What a caller may hand in by mistake: refused by name, or the same legal result everywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drafting import random_case
from every_op import INT, B, K, V, change, leaves, ops, tensors
from triton.runtime.jit import KernelInterface

from saguaro_kernels import (
    PAD,
    Keys,
    Sampling,
    SpeculationCache,
    Stream,
    attention_plan,
    outcomes_workspace_size,
    saguaro_sample,
    sample_geometric,
    sample_workspace_size,
    tree_attention,
    tree_attention_workspace,
    verify,
    verify_workspace_size,
)
from saguaro_kernels.compat import chain_speculative_sampling
from saguaro_kernels.errors import ConfigError, DeviceError, DTypeError, SaguaroError, ShapeError
from saguaro_kernels.rng import gumbel_reference

IMPLS = ("reference", "triton")
OPS = tuple(ops())
both = pytest.mark.parametrize("impl", IMPLS)
every = pytest.mark.parametrize("name", OPS)


def same(found: Any, wanted: Any, exact: bool = True) -> None:
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    assert pairs
    for its, other in pairs:
        assert its.dtype == other.dtype and its.device == other.device
        close = {} if its.is_floating_point() and not exact else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(its, other, **close, equal_nan=True)


# -- the same asked of every op --------------------------------------------------------------------


@both
@every
def test_tensors_on_two_devices(name: str, impl: str) -> None:
    op = ops()[name]
    paths = [path for path, _ in leaves(op.arguments)]
    assert len(paths) > 1
    for moved in paths:

        def move(path: tuple[str, ...], tensor: torch.Tensor, moved=moved) -> torch.Tensor:
            return tensor.to("meta") if path == moved else tensor

        if name == "sample_geometric" and moved[-1] in ("top_k", "top_p", "min_p"):
            match = moved[-1]
        elif moved[-1] in ("target_probs", "target_logits") or moved == paths[0]:
            match = "on "  # it says where all of them should be, so another is named
        else:
            match = moved[-1]
        with pytest.raises(DeviceError, match=match):
            op(impl, **change(op.arguments, move))


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("impl", "dtype", "device"),
    [
        ("reference", torch.float32, "cpu"),
        ("reference", torch.float64, "cpu"),
        ("reference", torch.bfloat16, "meta"),
        ("triton", torch.bfloat16, "meta"),
    ],
)
@every
def test_gradients_and_defaults(name: str, impl: str, dtype: torch.dtype, device: str) -> None:
    """Inputs that require grad, another default dtype, another default device: the same result."""
    op = ops()[name]

    def track(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor

    tracked = change(op.arguments, track)
    with defaults(dtype, device):
        found = op(impl, **tracked)
    same(found, op(), exact=impl == "reference")
    assert not any(tensor.requires_grad for tensor in tensors(found))


@both
@every
def test_an_empty_batch(name: str, impl: str) -> None:
    op = ops()[name]

    def cut(path: tuple[str, ...], tensor: torch.Tensor) -> torch.Tensor:
        return tensor if path[-1] in op.shared else tensor[:0]

    arguments = change(op.arguments, cut)
    if "num_draft_tokens" in arguments:
        arguments["num_draft_tokens"] = []
    found = op(impl, **arguments)
    if name == "promote_branch":
        assert torch.equal(found, op.arguments["kv_pages"])
    elif name == "tree_layout" or name == "chain_layout":
        assert not any(tensor.numel() for tensor in tensors(found))
    else:
        assert all(tensor.shape[0] == 0 for tensor in tensors(found))


@every
def test_meta_tensors_give_shapes(name: str) -> None:
    op = ops()[name]
    if name == "cache":  # it says where its table lies
        return
    found = tensors(op("auto", **change(op.arguments, lambda _, its: its.to("meta"))))
    wanted = tensors(op())
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    assert all(its.is_meta for its in found)


@every
def test_autocast_changes_nothing(name: str) -> None:
    op = ops()[name]
    plain = {"softcap": None} if name == "tree_attention" else {}
    for options in ({}, plain):
        wanted = op(**options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same(op(**options), wanted)


@every
def test_batches_are_no_larger_than_a_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """65535 is what the second and third dimension of a launch hold; the first holds 2^31."""
    op, many, grids = ops()[name], 70_000, []

    def record(kernel: Any, grid: Any) -> Any:
        return lambda *_, **__: grids.append(grid)

    def widen(path: tuple[str, ...], tensor: torch.Tensor) -> torch.Tensor:
        return tensor if path[-1] in op.shared else tensor[:1].expand(many, *tensor.shape[1:])

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    arguments = change(op.arguments, widen)
    if name == "rejection_sample":
        arguments["num_draft_tokens"] = [1] * many
    op("triton", **arguments)
    assert grids and all(size <= 65535 for grid in grids for size in grid[1:])


NOTHING = {  # (op, argument, its shape or a dimension that is 0, what the message names)
    "row_stats": (("logits", (B, 0), "logits.*V"),),
    "saguaro_sample": (("logits", (B, 0), "logits.*V"),),
    "sample_geometric": (("draft_logits", (B, 0), "draft_logits.*V"),),
    "residual": (
        ("target_logits", (B, 0), "target_logits.*V"),
        ("draft_logits", (B, 0), "draft_logits.*V"),
    ),
    "verify": (("target_logits", (B, K + 1, 0), "target_logits.*V"),),
    "verify_flat": (("target_logits", (0, V), "target_logits.*N"),),
    "predict_outcomes": (
        ("draft_logits", (B, K + 1, 0), "draft_logits.*V"),
        ("draft_logits", (B, 0, V), "draft_logits.*K"),
    ),
    "allocate_fan_out": (("accept_hist", (B, 0), "accept_hist"),),
    "promote_branch": (
        ("kv_pages", (2, 0, 4, 1, 16), "kv_pages.*P >= 1"),
        ("kv_pages", (2, 8, 0, 1, 16), "kv_pages.*page >= 1"),
        ("kv_pages", (2, 8, 4, 0, 16), "kv_pages.*Hkv >= 1"),
        ("kv_pages", (2, 8, 4, 1, 0), "kv_pages.*D >= 1"),
        ("page_table", (B, 0), "page_table.*pages"),
    ),
    "promote_pages": (("page_table", (B, 0), "page_table.*pages"),),
    "tree_layout": (("page_table", (B, 0), "page_table.*pages"),),
    "chain_layout": (("page_table", (B, 0), "page_table.*pages"),),
    "tree_attention": (
        ("key_pages", (8, 4, 0, 16), "(key|value)_pages"),
        ("key_pages", (8, 0, 1, 16), "(key|value)_pages"),
        ("key_pages", (0, 4, 1, 16), "(key|value)_pages"),
        ("page_table", (B, 0), "page_table.*pages"),
    ),
    "chain_speculative_sampling": (("draft_probs", (B, K, 0), "draft_probs.*V"),),
    "rejection_sample": (("target_logits", (4, 0), "target_logits.*V"),),
}


@pytest.mark.parametrize(
    ("name", "argument", "shape", "match"),
    [(name, *its) for name in NOTHING for its in NOTHING[name]],
)
@both
def test_sizes_of_zero(
    name: str, argument: str, shape: tuple[int, ...], match: str, impl: str
) -> None:
    op = ops()[name]
    changed = {argument: op.arguments[argument].new_empty(shape)}
    if argument == "key_pages":
        changed["value_pages"] = changed["key_pages"]
    with pytest.raises(ShapeError, match=match):
        op(impl, **changed)


@both
def test_nothing_to_do(impl: str) -> None:
    """No branches, no heads, no tokens, no drafts: empty results of the right shape."""
    table = ops()
    attend = table["tree_attention"]
    for size in ((B, 0, 2, 16), (B, 3, 0, 16)):
        depth = attend.arguments["depth"][:, : size[1]]
        found = attend(impl, query=torch.empty(size), depth=depth)
        assert found.shape == size
    depth = torch.empty(B, 0, dtype=INT)
    assert table["tree_layout"](impl, depth=depth, tokens=depth.long()).slots.shape == (K + 1, B, 0)
    assert table["chain_layout"](impl, tokens=depth.long()).slots.shape == (1, B, 0)
    assert table["predict_outcomes"](impl, branches=0).tokens.shape == (B, 0)
    tokens, count = table["ngram_propose"](impl, num_tokens=0)
    assert tokens.shape == (B, 0) and count.shape == (B,)
    history = torch.empty(B, 0, dtype=torch.int64)
    assert table["ngram_propose"](impl, history=history)[1].tolist() == [0, 0]
    assert table["allocate_fan_out"](impl, branches=0).sum() == 0
    case = random_case(B, 0, V)
    assert verify(**case, impl=impl).tokens.shape == (B, 1)
    probs = torch.rand(B, 1, V)
    empty = torch.empty(B, 0, dtype=torch.int64)
    ids, *_ = chain_speculative_sampling(probs[:, :0], empty, probs, seed=1, impl=impl)
    assert ids.shape == (B, 1) and ((ids >= 0) & (ids < V)).all()


BAD_INTEGERS = {
    "sample_geometric": {"top_f": (-1, 129, 1.5), "offset": (-1, 1 << 24, 0.5), "stream": (-1, 4)},
    "predict_outcomes": {"branches": (-1, 1025, 1.5)},
    "allocate_fan_out": {"branches": (-1, 1 << 40, 2.5)},
    "ngram_propose": {"num_tokens": (-1, 1 << 40), "max_n": (0, 1 << 40), "min_n": (0, 1.5)},
    "promote_branch": {"draft_len": (-1, 1 << 40), "branches": (0, 1.5)},
    "promote_pages": {"draft_len": (-1, 1 << 40), "branches": (0, 1.5)},
    "tree_layout": {"draft_len": (-1, 1 << 40), "page_size": (0, 1 << 40)},
    "chain_layout": {"page_size": (0, 1 << 40, 1.5)},
    "tree_attention": {
        "draft_len": (-1, 1 << 40), "step": (-2, K + 1, 0.5), "window": (0, 1 << 40, 1.5),
    },
    "cache": {"generation": (1 << 63, -(1 << 63) - 1, 0.5)},
    "chain_speculative_sampling": {
        "seed": (1 << 64, -(1 << 63) - 1, 0.5), "offset": (1 << 64, 0.5),
    },
    "rejection_sample": {
        "max_spec_len": (1, -1, 1 << 40), "seed": (1 << 64,), "num_draft_tokens": ([2, -1],),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"), [(name, its) for name in BAD_INTEGERS for its in BAD_INTEGERS[name]]
)
@both
def test_integers_outside_their_range(name: str, argument: str, impl: str) -> None:
    op = ops()[name]
    for value in BAD_INTEGERS[name][argument]:
        with pytest.raises((ConfigError, DTypeError), match=argument):
            op(impl, **{argument: value})


@both
def test_offset_and_stream(impl: str) -> None:
    """On the host they are refused; on the device an offset counts by its 24 bits."""
    logits, keys = torch.zeros(3, 500), Keys(torch.arange(3), torch.arange(3) + 7)
    ones = Sampling(torch.ones(3))

    def draw(offset: Any, stream: Any = Stream.DRAFT) -> list[int]:
        its = saguaro_sample(logits, ones, keys, offset=offset, stream=stream, impl=impl)
        return its.tokens.tolist()

    for offset in (-1, 1 << 24, 1 << 40, 1.0, None, "0"):
        with pytest.raises((ConfigError, DTypeError), match="offset"):
            draw(offset)
    for stream in (-1, 4, 256, 1.5, "DRAFT"):
        with pytest.raises(ConfigError, match="stream"):
            draw(0, stream)
    last = (1 << 24) - 1
    assert draw(0, int(Stream.EXTRA)) == draw(0, Stream.EXTRA) != draw(0)
    assert draw(torch.tensor([3, 3 + (1 << 24), 3 - (1 << 24)])) == draw(3)
    assert draw(torch.tensor([-1, -1, last])) == draw(last)
    assert draw(torch.tensor([-1, -1, last], dtype=INT)) == draw(last)


def test_both_sides_draw_the_same_noise_at_any_offset() -> None:
    logits, keys = (
        torch.zeros(4, 500),
        Keys(torch.arange(4), torch.tensor([5, -1, 2**40, -(2**63)])),
    )
    offset = torch.tensor([0, -5, 1 << 30, 2**62])
    for stream in Stream:
        its = saguaro_sample(
            logits, Sampling(torch.ones(4)), keys, offset=offset, stream=stream, impl="triton"
        )
        noise = gumbel_reference(keys, offset, stream, 500)
        assert torch.equal(its.tokens, noise.argmax(1))
    with pytest.raises(ConfigError, match="offset"):
        gumbel_reference(keys, -1, Stream.DRAFT, 500)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("softcap", (math.inf, math.nan, -1.0, 0.0, 1e-40, "2")),
        ("scale", (math.inf, math.nan, -math.inf, 1e40, "2")),
    ],
)
@both
def test_numbers_of_attention(option: str, values: tuple[Any, ...], impl: str) -> None:
    for value in values:
        with pytest.raises((ConfigError, DTypeError), match=option):
            ops()["tree_attention"](impl, **{option: value})


@both
def test_fan_out_of_odd_numbers(impl: str) -> None:
    allocate = ops()["allocate_fan_out"]
    for r in (math.inf, math.nan, -0.5, -math.inf, 1e40):
        with pytest.raises(ConfigError, match="r: got"):
            allocate(impl, r=r)
    odd = [math.nan, -1.0, math.inf, 0.0]
    hist = torch.tensor([5.0, 3.0, 0.0]).expand(4, 3)
    found = allocate(impl, accept_hist=hist, r=torch.tensor(odd))
    same(found, allocate(impl, accept_hist=hist, r=torch.tensor([0.0, 0.0, 1e30, 0.0])))
    assert (found.sum(1) == 7).all() and (found >= 0).all()
    hist = torch.tensor([[math.nan, 1.0, 1.0], [-3.0, 1.0, 1.0], [math.inf, 1.0, 1.0], [0.0] * 3])
    found = allocate(impl, accept_hist=hist, r=0.5)
    assert found.tolist() == [[0, 4, 3], [0, 4, 3], [7, 0, 0], [3, 2, 2]]


# -- values on the device --------------------------------------------------------------------------

ODD = [math.inf, math.nan, -1.0, 1e-42, 3e38, 0.0, 1.0, -math.inf]


def odd_rows(vocab: int = 300) -> torch.Tensor:
    logits = 3 * torch.randn(len(ODD), vocab, generator=torch.Generator().manual_seed(1))
    logits[:, 5::7] = -math.inf
    return logits


@pytest.mark.parametrize("filtered", [False, True])
def test_temperatures_of_every_kind(filtered: bool) -> None:
    """inf is uniform over what is allowed, what is negative or NaN is greedy."""
    logits, rows, table = odd_rows(), len(ODD), ops()
    acts = torch.tensor([1e30, 0.0, 0.0, 1e-30, 1e30, 0.0, 1.0, 0.0])
    keys = Keys(torch.arange(rows), torch.arange(rows))
    nine, tenth = torch.full((rows,), 9, dtype=INT), torch.full((rows,), 0.1)
    filters = {"top_k": nine, "min_p": tenth} if filtered else {}

    def run(temperature: torch.Tensor, impl: str) -> tuple[Any, ...]:
        sampling = Sampling(temperature, **filters)
        sample = saguaro_sample(logits, sampling, keys, offset=0, top_f=3, impl=impl)
        if filtered:
            return (sample,)
        ids = sample.top_ids[:, :1]
        return (
            sample,
            table["residual"].call(
                logits, logits.flip(0), target_sampling=sampling, draft_sampling=sampling, impl=impl
            ),
            table["row_stats"].call(logits, sampling, impl=impl),
            table["predict_outcomes"].call(
                logits[:, None].expand(-1, 2, -1), ids, torch.ones_like(ids[:, 0]).int(),
                sampling, keys, branches=3, impl=impl,
            ),
        )  # fmt: skip

    found = run(torch.tensor(ODD), "reference")
    same(found, run(acts, "reference"))
    same(found, run(torch.tensor(ODD), "triton"), exact=False)
    sample, allowed = found[0], logits[0] > -math.inf
    assert allowed[sample.tokens].all()
    for r in (1, 2, 5, 7):
        assert sample.tokens[r] == logits[r].argmax() and sample.logq[r] == 0
    count = 9 if filtered else int(allowed.sum())
    assert abs(float(sample.logq[0]) + math.log(count)) < 1e-5
    if not filtered:
        assert torch.allclose(found[1].probs.sum(1), torch.ones(rows))


def test_an_infinite_temperature_draws_uniformly() -> None:
    draws = 4000
    logits = torch.tensor([9.0, -9.0, -math.inf, 0.0]).expand(draws, 4)
    keys = Keys(torch.arange(draws), torch.zeros(draws, dtype=torch.int64))
    hot = Sampling(torch.full((draws,), math.inf))
    tokens = saguaro_sample(logits, hot, keys, offset=0, impl="reference").tokens
    counts = tokens.bincount(minlength=4)
    assert counts[2] == 0 and ((counts[[0, 1, 3]] - draws / 3).abs() < 150).all()


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_verification_at_temperatures_of_every_kind(rule: str) -> None:
    case = random_case(len(ODD), 2, 300, temperature=1.0)
    case["draft"].num_draft.fill_(2)
    case["target_logits"][:, :, 5::7] = -math.inf
    temperature = torch.tensor(ODD)
    case["draft"] = dataclasses.replace(case["draft"], sampling=Sampling(temperature.roll(3)))
    case["target_sampling"] = Sampling(temperature)
    found, wanted = (verify(**case, rule=rule, impl=impl) for impl in IMPLS)
    same(found, wanted)
    used = found.tokens[found.tokens != PAD]
    assert ((used >= 0) & (used < 300)).all() and (used % 7 != 5).all()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", [-5, 0, 2**31 - 1, -(2**31), 1, 2, 299, 300]),
        ("top_p", [math.nan, -1.0, math.inf, 0.0, -math.inf, 1e-30, 0.5, 1.0]),
        ("min_p", [math.nan, -1.0, math.inf, 0.0, -math.inf, 1e-42, 2.0, 1.0]),
        ("downweight", [math.nan, -1.0, math.inf, 0.0, -math.inf, 1e-42, 2.0, 1.0]),
    ],
)
def test_filters_of_every_kind(field: str, values: list[float]) -> None:
    logits = odd_rows()
    count = torch.tensor(values, dtype=INT if field == "top_k" else torch.float32)
    sampling, options = Sampling(torch.ones(len(ODD))), {}
    if field == "downweight":
        options = {"downweight": count, "scheme": "downweight", "scale_f": 20}
    else:
        sampling = dataclasses.replace(sampling, **{field: count})
    keys = Keys(torch.arange(len(ODD)), torch.arange(len(ODD)))
    found, wanted = (
        saguaro_sample(logits, sampling, keys, offset=0, impl=impl, **options) for impl in IMPLS
    )
    same(found, wanted, exact=False)
    assert (logits.gather(1, found.tokens[:, None]) > -math.inf).all()
    assert found.logq.isfinite().all()
    if field == "top_p":  # all with NaN, one below 0
        assert found.cutoff_id[0] == PAD and found.tokens[1] == logits[1].argmax()
    if field == "downweight":  # of 0 where it is no number, of 1 above
        assert found.logq[0] < 0 and found.logq[6] < 0


@both
def test_scales_of_a_residual(impl: str) -> None:
    rows = odd_rows()
    ones = Sampling(torch.ones(len(ODD)))
    found = ops()["residual"].call(
        rows, rows.flip(0), target_sampling=ones, draft_sampling=ones, scale=torch.tensor(ODD),
        impl=impl,
    )  # fmt: skip
    assert found.probs.isfinite().all() and found.mass.isfinite().all()
    assert torch.allclose(found.probs.sum(1), torch.ones(len(ODD)))
    assert not found.mass[[1, 2, 5, 7]].any()


OUTSIDE = (-1, V, 2**32 + 3, -(2**32) + 3, 2**40, 2**63 - 1)


@pytest.mark.parametrize(
    ("rule", "one_hot", "mapped"),
    [
        ("token", False, True),
        ("block", False, False),
        ("block", True, True),
        ("coupled", False, False),
    ],
)
def test_drafted_ids_outside_the_vocabulary(rule: str, one_hot: bool, mapped: bool) -> None:
    """Such a draft is refused, and the extra token is drawn from p, by both implementations."""
    requests = len(OUTSIDE)
    case = random_case(requests, 2, V)
    case["target_logits"] = case["target_logits"][:1, :1].expand(requests, 3, V).clone()
    case["target_logits"][..., 3] += 4.0  # what 2^32 + 3 would be in 32 bits
    tokens = torch.tensor(OUTSIDE)[:, None].expand(requests, 2)
    draft = dataclasses.replace(case["draft"], tokens=tokens)
    draft.num_draft.fill_(2)
    changed = {"one_hot": torch.full((requests,), one_hot)}
    if mapped:
        changed["vocab_map"] = torch.arange(V, dtype=INT)
    case["draft"] = dataclasses.replace(draft, **changed)
    found, wanted = (verify(**case, rule=rule, impl=impl) for impl in IMPLS)
    same(found, wanted)
    assert not found.num_accepted.any()
    assert ((found.tokens[:, 0] >= 0) & (found.tokens[:, 0] < V)).all()
    assert (found.tokens[:, 0] == 3).any()
    assert (found.tokens[:, 1:] == PAD).all()


def test_outcomes_of_drafts_outside_the_vocabulary() -> None:
    predict = ops()["predict_outcomes"]
    for ids in (None, torch.arange(V) + 1):
        nothing = predict(draft_tokens=torch.full((B, K), PAD), ids=ids)
        for some in (OUTSIDE[:4], (V + 1, 2**31, *OUTSIDE[4:])):
            tokens = torch.tensor(some).view(B, K)
            if ids is not None:
                tokens = tokens + 1  # V would be the last of them
            for impl in IMPLS:
                same(predict(impl, draft_tokens=tokens, ids=ids), nothing, exact=False)


@pytest.mark.parametrize("count", [-1, -(2**31), K + 1, 2**31 - 1])
def test_numbers_of_drafts_outside_their_range(count: int) -> None:
    """Of drafts, of tokens: as the nearest there is."""
    nearest, table = min(max(count, 0), K), ops()
    for name in ("verify", "verify_flat"):
        op = table[name]
        draft = op.arguments["draft"]
        odd, near = (
            dataclasses.replace(draft, num_draft=torch.tensor([n, 1], dtype=INT))
            for n in (count, nearest)
        )
        for rule in ("token", "block", "coupled"):
            same(op(draft=odd, rule=rule), op(draft=near, rule=rule))
        same(op("triton", draft=odd), op(draft=near))
    predict, propose = table["predict_outcomes"], table["ngram_propose"]
    wanted = predict(num_draft=torch.tensor([nearest, 1]))
    lengths = torch.tensor([count, 4]), torch.tensor([min(max(count, 0), 6), 4])
    for impl in IMPLS:
        odd = predict(impl, num_draft=torch.tensor([count, 1], dtype=INT))
        same(odd, wanted, exact=False)
        same(predict(impl, num_draft=torch.tensor([count, 1])), wanted, exact=False)
        same(propose(impl, length=lengths[0]), propose(length=lengths[1]))


@both
def test_outcomes_of_odd_numbers(impl: str) -> None:
    predict = ops()["predict_outcomes"]
    odd = torch.tensor([[math.nan, 0.5, -1.0], [math.inf, 0.5, 0.1]])
    plain = torch.tensor([[0.0, 0.5, 0.0], [1e30, 0.5, 0.1]])
    most, few = [2**31 - 1] * 3, [-4, 2, 2**31 - 1]
    never = torch.tensor([[math.inf, -3.0, -3.0], [math.inf, -3.0, -math.inf]])
    for given, acts in (
        ({"accept_prob": odd, "fan_out": None}, {"accept_prob": plain, "fan_out": None}),
        (
            {"fan_out": torch.tensor([few, most], dtype=INT)},
            {"fan_out": torch.tensor([[0, 2, 6], [6, 6, 6]], dtype=INT)},
        ),
        ({"cutoff": torch.where(never == math.inf, math.nan, never)}, {"cutoff": never}),
    ):
        same(predict(impl, **given), predict(**acts), exact=False)


@pytest.mark.parametrize("allocation", ["best", "uniform"])
@pytest.mark.parametrize("ranking", ["probability", "noise"])
@pytest.mark.parametrize(
    ("scale", "shift", "temperature"),
    [
        (1e38, 0.0, 0.1),
        (1.0, -1e38, 1.0),
        (1e31, -3e31, 1.0),
        (1e19, 0.0, 1e-25),
        (1e35, 3.4e38, 0.0),
    ],
)
def test_outcomes_of_logits_of_any_size(
    scale: float, shift: float, temperature: float, ranking: str, allocation: str
) -> None:
    predict, random = ops()["predict_outcomes"], torch.Generator().manual_seed(4)
    logits = torch.randn(B, K + 1, V, generator=random).clamp(-3, 3) * scale + shift
    changed = {
        "draft_logits": logits, "sampling": Sampling(torch.full((B,), temperature)), "ids": None,
        "cutoff": None, "accept_prob": None, "fan_out": None, "ranking": ranking,
        "allocation": allocation,
    }  # fmt: skip
    found, wanted = (predict(impl, **changed) for impl in IMPLS)
    same(found, wanted, exact=False)
    assert (wanted.tokens >= 0).all() and wanted.score.isfinite().all()


@both
def test_hits_outside_their_range_move_nothing(impl: str) -> None:
    for name, written in (("promote_branch", "kv_pages"), ("promote_pages", "page_table")):
        op = ops()[name]
        before = op.arguments[written]
        assert not torch.equal(op(impl), before)
        two = torch.tensor([3, 2**31 - 1], dtype=INT)
        assert torch.equal(op(impl, branch=two), before)
        for depth in (K + 1, -1, 2**31 - 1):
            assert torch.equal(op(impl, depth=torch.full((B,), depth, dtype=INT)), before)


# -- rows and buffers that are shared --------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_requests_that_share_a_row(rule: str) -> None:
    """Each has filters and a bias of its own; indices of rows that are not read may be anything."""
    requests, steps = 6, 2
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(2, V, generator=random)
    row_index = torch.tensor([[0, 1, 0], [1, 0, 1]]).repeat(3, 1)
    num_draft = torch.tensor([2, 2, 1, 0, 2, 2], dtype=INT)
    unread = torch.arange(steps + 1) > num_draft[:, None]
    sampling = Sampling(torch.ones(requests), top_k=torch.tensor([1, 20, 2, 0, 9, 3], dtype=INT))
    case = random_case(requests, steps, V)
    case["draft"] = dataclasses.replace(case["draft"], num_draft=num_draft)
    bias = torch.randn(requests, steps + 1, V, generator=random)
    given = {**case, "target_sampling": sampling, "bias": bias, "rule": rule}
    wanted = verify(**{**given, "target_logits": rows[row_index]}, impl="reference")
    given |= {"target_logits": rows, "row_index": row_index.masked_fill(unread, -(2**40))}
    for impl in IMPLS:
        same(verify(**given, impl=impl), wanted)


def test_a_workspace_may_begin_anywhere() -> None:
    case = random_case(2, 2, V)
    case["target_sampling"] = Sampling(torch.ones(2), top_k=torch.tensor([5, 3], dtype=INT))
    workspace = torch.empty(verify_workspace_size(2, 2, V) + 1)[1:]
    same(verify(**case, impl="triton", workspace=workspace), verify(**case, impl="reference"))


@both
def test_outputs_of_a_lookup(impl: str) -> None:
    cache, key = SpeculationCache(8, 4, "cpu", draft_len=K), torch.tensor([1, 2])
    fits = cache.lookup(key, 0, key, key, key, impl=impl)
    for name, error in (("hit", DTypeError), ("slot", DTypeError), ("tokens", ShapeError)):
        its = getattr(fits, name)
        wrong = its.double() if error is DTypeError else its.t().contiguous().t()
        with pytest.raises(error, match=f"out.{name}"):
            cache.lookup(
                key, 0, key, key, key, out=dataclasses.replace(fits, **{name: wrong}), impl=impl
            )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.complex64, torch.bool]
)
@both
def test_pages_of_any_dtype_move(dtype: torch.dtype, impl: str) -> None:
    op = ops()["promote_branch"]
    pages = op.arguments["kv_pages"]
    its = pages.to(dtype) if dtype.is_complex else pages.gt(0).to(dtype)
    moved = op(impl, kv_pages=its).contiguous().view(torch.uint8)
    as_bytes = its.view(torch.uint8)
    assert torch.equal(moved, op(kv_pages=as_bytes)) and not torch.equal(moved, as_bytes)
    with pytest.raises(DTypeError, match="kv_pages"):
        op(impl, kv_pages=pages.to(torch.complex128))


# -- fields that say nothing without another -------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["cutoff", "cutoff_id", "scale_logit", "scale_id", "logq", "sampling"]
)
@pytest.mark.parametrize("one_hot", [False, True])
def test_half_a_pair_of_a_draft(field: str, one_hot: bool) -> None:
    op = ops()["verify"]
    draft = dataclasses.replace(op.arguments["draft"], **{field: None})
    if one_hot:
        if field in ("logq", "sampling"):
            draft = dataclasses.replace(draft, logits=None, bias=None)
            assert (op(draft=draft).num_accepted >= 0).all()  # not needed then
            return
        draft = dataclasses.replace(draft, logits=None, bias=None)
    with pytest.raises(ConfigError, match=f"draft.*{field}"):
        op(draft=draft)
    if field.startswith("scale"):  # also at C = 1
        with pytest.raises(ConfigError, match=f"draft.*{field}"):
            op(draft=dataclasses.replace(draft, downweight=None))


def test_options_of_another_scheme() -> None:
    table = ops()
    given, ones = table["saguaro_sample"].arguments, torch.ones(B)
    rows = given["logits"]
    positional = rows, given["sampling"], given["keys"]
    for options, match in (
        ({"target_sampling": given["sampling"]}, "target_sampling"),
        ({"target_logits": rows}, "target_logits"),
        ({"downweight": ones}, "downweight"),
        ({"scheme": "downweight"}, "downweight"),
        ({"scale_f": 4}, "scale_f"),
        ({"scheme": "geometric"}, "target_logits"),
        ({"scheme": "geometric", "target_logits": rows, "scale_f": 4}, "scale_f"),
        (
            {"scheme": "geometric", "target_logits": rows, "workspace": torch.empty(9)},
            "workspace",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            saguaro_sample(*positional, offset=0, **options)
    with pytest.raises(ShapeError, match="target_logits"):
        sample_geometric(rows, rows[:, 1:], *positional[1:], offset=0)


def test_a_plan_of_another_call() -> None:
    op = ops()["tree_attention"]
    given = op.arguments
    lengths = {name: given[name] for name in ("trunk_len", "depth", "draft_len", "step", "window")}
    plan = attention_plan(given["page_table"], 4, **lengths)
    torch.testing.assert_close(op(plan=plan), op())
    depth = given["depth"][:, :2]
    for changed in (
        {"window": 3},
        {"window": None},
        {"step": 0},
        {"draft_len": 1},
        {"depth": depth, "query": given["query"][:, :2]},
    ):
        with pytest.raises(ConfigError, match="plan"):
            op(plan=plan, **changed)


def test_sizes_of_workspaces() -> None:
    for call in (
        lambda: verify_workspace_size(1, 1, 0),
        lambda: verify_workspace_size(-1, 1, 9),
        lambda: verify_workspace_size(1, -1, 9),
        lambda: sample_workspace_size(1, 0, 0, 0),
        lambda: sample_workspace_size(-1, 9, 0, 0),
        lambda: sample_workspace_size(1, 9, 200, 0),
        lambda: outcomes_workspace_size(-1, 1, 9, 4),
        lambda: outcomes_workspace_size(1, 0, 9, 4),
        lambda: outcomes_workspace_size(1, 1, 0, 4),
        lambda: outcomes_workspace_size(1, 1, 9, 2000),
        lambda: tree_attention_workspace(
            torch.empty(1, 1, 1, 16), torch.empty(1, 4, 0, 16), torch.empty(1, 1, dtype=INT)
        ),
    ):
        with pytest.raises(SaguaroError):
            call()


@both
def test_outputs_that_require_grad_are_refused(impl: str) -> None:
    op = ops()["row_stats"]
    found = op(impl)
    out = dataclasses.replace(found, lse=found.lse.clone().requires_grad_())
    with pytest.raises(ConfigError, match="out.lse"):
        op(impl, out=out)


# -- slots that nobody sees ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (None, 3.0), (1, None), (2, 3.0), (5, None)]
)
@pytest.mark.parametrize("step", [-1, 2])
@both
def test_unseen_slots_are_harmless(
    step: int, window: int | None, softcap: float | None, impl: str
) -> None:
    """Ragged trunks, depths with gaps, unused branches: NaN and inf wherever nobody looks."""
    random = torch.Generator().manual_seed(3)
    trunk_len = torch.tensor([11, 0, 70, 5], dtype=INT)
    depth = torch.tensor([[0, 4, -1, 2], [3, -1, 0, 0], [4, 0, 2, -1], [-1] * 4], dtype=INT)
    draft_len, branches, page, slots = 4, 4, 4, 112
    table = torch.randperm(4 * slots // page, generator=random).view(4, -1).int()
    keys, values = torch.randn(2, 4 * slots // page, page, 1, 16, generator=random)
    query = torch.randn(4, branches, 2, 16, generator=random)
    seen = torch.zeros(4, slots, dtype=torch.bool)
    for b in range(4):
        for i in range(branches):
            k, trunk = int(depth[b, i]), int(trunk_len[b])
            if k < 0:
                continue
            path = list(range(trunk + k + 1))
            path += [trunk + draft_len + 1 + s * branches + i for s in range(step + 1)]
            seen[b, path[-window:] if window else path] = True
    place = table[:, :, None] * page + torch.arange(page)
    hidden = place.view(4, slots)[~seen]
    options = {
        "trunk_len": trunk_len, "depth": depth, "draft_len": draft_len, "step": step,
        "window": window, "softcap": softcap,
    }  # fmt: skip
    clean = tree_attention(query, keys, values, table, **options, impl="reference")
    assert clean.isfinite().all()
    poison = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(len(hidden)) % 3]
    for pages in (keys, values):
        pages.view(-1, 16)[hidden] = poison[:, None]
    found = tree_attention(query, keys, values, table, **options, impl=impl)
    torch.testing.assert_close(found, clean, rtol=1e-5, atol=1e-5)


@both
def test_an_unused_branch_is_0_whatever_the_others_see(impl: str) -> None:
    op = ops()["tree_attention"]
    found = op(impl, value_pages=torch.full_like(op.arguments["value_pages"], math.nan))
    unused = op.arguments["depth"] < 0
    assert unused.any() and (found[unused] == 0).all() and found[~unused].isnan().all()


# -- other engines' contracts ----------------------------------------------------------------------


@both
def test_seeds_of_64_bits(impl: str) -> None:
    chain = ops()["chain_speculative_sampling"]
    big = torch.tensor([2**64 - 5], dtype=torch.uint64)
    twins = ((2**63, -(2**63)), (2**64 - 1, -1), (7, torch.tensor(7)), (2**64 - 5, big))
    for seed, twin in twins if impl == "reference" else twins[:1]:
        same(chain(impl, seed=seed, offset=seed), chain(seed=twin, offset=twin))
    for wrong, error in (
        (torch.tensor([1.0]), DTypeError),
        (torch.tensor([1, 2, 3]), ShapeError),
        (torch.empty(0, dtype=torch.int64), ShapeError),
    ):
        for name in ("seed", "offset"):
            with pytest.raises(error, match=name):
                chain(impl, **{name: wrong})


@both
def test_what_rejection_sample_refuses(impl: str) -> None:
    op = ops()["rejection_sample"]
    two = torch.tensor([1, 2])
    for changed, error, match in (
        ({"bonus_token_ids": two.float()}, DTypeError, "bonus_token_ids"),
        ({"bonus_token_ids": two[:1]}, ShapeError, "bonus_token_ids"),
        ({"bonus_token_ids": torch.tensor(1)}, ShapeError, "bonus_token_ids"),
        ({"temperature": two}, DTypeError, "temperature"),
        ({"temperature": torch.ones(3)}, ShapeError, "temperature"),
        ({"num_draft_tokens": [2, 3], "max_spec_len": 3}, ShapeError, "draft_token_ids"),
        ({"draft_probs": torch.ones(V, 4).t()}, ShapeError, "draft_probs"),
    ):
        with pytest.raises(error, match=match):
            op(impl, **changed)
    probs = torch.ones(B, V, K).transpose(1, 2)
    with pytest.raises(ShapeError, match="draft_probs"):
        ops()["chain_speculative_sampling"](impl, draft_probs=probs)
    bonus = torch.tensor([2**31 - 1, -7])
    output = op(impl, bonus_token_ids=bonus, draft_probs=None, target_logits=torch.eye(V)[3:7] * 99)
    assert output.tolist() == [[3, 4, 2**31 - 1], [5, 6, -7]]  # as given


@pytest.mark.parametrize("sums", [[-3, 9], [2**40, -(2**40)], [3, 1], [0, 0]])
def test_sums_that_fit_nothing(sums: list[int]) -> None:
    """They lie on the device: whatever they are, both implementations give the same legal ids."""
    op = ops()["rejection_sample"]
    found, wanted = (op(impl, cu_num_draft_tokens=torch.tensor(sums)) for impl in IMPLS)
    assert torch.equal(found, wanted)
    assert ((found >= PAD) & (found < V)).all()


def test_drafts_outside_the_vocabulary_of_another_engine() -> None:
    tokens = torch.tensor([[-1, V], [2**31 - 1, -(2**31)]], dtype=INT)
    chain, flat = ops()["chain_speculative_sampling"], ops()["rejection_sample"]
    for results in (
        [chain(impl, draft_token_ids=tokens)[0] for impl in IMPLS],
        [flat(impl, draft_token_ids=tokens.view(-1)) for impl in IMPLS],
        [flat(impl, draft_token_ids=tokens.view(-1), draft_probs=None) for impl in IMPLS],
    ):
        assert torch.equal(*results)
        assert ((results[0][:, 0] >= 0) & (results[0][:, 0] < V)).all()
        assert (results[0][:, 1:] == PAD).all()
