"""Every registered op through torch.library's checks, torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import random_case
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro_kernels import (
    Draft,
    Keys,
    Sampling,
    SpeculationCache,
    allocate_fan_out,
    chain_layout,
    ngram_propose,
    predict_outcomes,
    promote_branch,
    promote_pages,
    residual,
    row_stats,
    saguaro_sample,
    sample_geometric,
    tree_attention,
    tree_layout,
    verify,
)

Call = Callable[..., Any]
REFERENCE: dict[str, Any] = {"impl": "reference"}


def _cases() -> dict[str, tuple[Call, tuple[torch.Tensor, ...]]]:
    """A call of each op, as a function of tensors alone, and the tensors."""
    seed = torch.arange(2)
    logits = 2 * torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    rows, tokens, temperature = logits[:, 0], logits.argmax(-1), torch.tensor([1.0, 0.7])
    count = torch.tensor([2, 1], dtype=torch.int32)
    depth = torch.tensor([[0, 1, -1], [2, 0, 1]], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    kv = torch.randn(1, 2, 8, 8, 1, 16, generator=torch.Generator().manual_seed(1))
    top_k, top_p = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([0.9, 1.0])
    hit = {"draft_len": 2, "branches": 3}
    case = random_case(2, 2, 40)
    draft = case["draft"]

    def judge(target, tokens, num_draft, draft_logits, logq, lse, temperature, seed, base):
        sampling = Sampling(temperature)
        its = Draft(tokens, num_draft, draft_logits, logq, lse, sampling=sampling)
        verdict = verify(target, its, sampling, Keys(seed, base), rule="block", **REFERENCE)
        return verdict.num_accepted, verdict.tokens, verdict.status

    def sample(z, t, k, p, seed, base):
        its = saguaro_sample(z, Sampling(t, k, p), Keys(seed, base), offset=1, top_f=3, **REFERENCE)
        return its.tokens, its.logq, its.top_ids

    return {
        "row_stats": (
            lambda z, t, k: row_stats(z, Sampling(t, k), **REFERENCE).lse,
            (rows, temperature, top_k),
        ),
        "saguaro_sample": (sample, (rows, temperature, top_k, top_p, seed, seed + 5)),
        "geometric_row": (
            lambda q, p, t, s: sample_geometric(
                q, p, Sampling(t), Keys(s, s), offset=0, **REFERENCE
            )[1],
            (rows, logits[:, 1], temperature, seed),
        ),
        "residual": (
            lambda p, q, t: residual(
                p, q, target_sampling=Sampling(t), draft_sampling=Sampling(t), **REFERENCE
            ).probs,
            (rows, logits[:, 1], temperature),
        ),
        "verify": (
            judge,
            (
                case["target_logits"], draft.tokens, draft.num_draft, draft.logits, draft.logq,
                draft.lse, draft.sampling.temperature, case["keys"].seed, case["keys"].base,
            ),
        ),
        "predict_outcomes": (
            lambda z, d, n, t, s: predict_outcomes(
                z, d, n, Sampling(t), Keys(s, s), branches=4, **REFERENCE
            ).tokens,
            (logits, tokens[:, :2], count, temperature, seed),
        ),
        "allocate_fan_out": (
            lambda hist, r: allocate_fan_out(hist, 5, r, **REFERENCE),
            (torch.tensor([[5, 3, 1], [0, 0, 9]]), torch.tensor([0.5, 1.0])),
        ),
        "tree_layout": (
            lambda d, x, n, pages: tree_layout(
                d, x, n, draft_len=2, page_table=pages, page_size=8, **REFERENCE
            ).physical,
            (depth, tokens, count, table),
        ),
        "chain_layout": (
            lambda x, n: chain_layout(x, n, n, **REFERENCE).slots,
            (tokens, count),
        ),
        "tree_attention": (
            lambda q, k, v, pages, n, d, step: tree_attention(
                q, k, v, pages, trunk_len=n, depth=d, draft_len=2, step=step, **REFERENCE
            ),
            (torch.randn(2, 3, 2, 16), kv[0, 0], kv[0, 1], table, count, depth,
             torch.tensor([1], dtype=torch.int32)),
        ),
        "promote_branch": (
            lambda pages, its, n, d: promote_branch(
                pages, its, trunk_len=n, depth=d, branch=d, **hit, **REFERENCE
            ),
            (kv, table, count, count),
        ),
        "promote_pages": (
            lambda its, n, d: promote_pages(
                its, trunk_len=n, depth=d, branch=d, **hit, **REFERENCE
            ),
            (torch.arange(2 * 40, dtype=torch.int32).view(2, 40), count, count),
        ),
        "cache_insert": (
            lambda *tensors: _cache(*tensors[:4]).insert(*tensors[4:], **REFERENCE),
            (*_table(), seed, torch.tensor([3]), seed, count, seed + 7, count),
        ),
        "cache_lookup": (
            lambda *tensors: _cache(*tensors[:4]).lookup(*tensors[4:], **REFERENCE).tokens,
            (*_table(), seed, torch.tensor([3]), seed, count, seed + 7),
        ),
        "ngram_propose": (
            lambda history, length: ngram_propose(history, length, num_tokens=2, **REFERENCE),
            (torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 0, 0]]), torch.tensor([5, 3])),
        ),
    }  # fmt: skip


def _table() -> tuple[torch.Tensor, ...]:
    """The tensors of a cache."""
    cache = SpeculationCache(4, 3, torch.device("cpu"), draft_len=2)
    return cache.buckets, cache.key_rows, cache.dropped, cache.tokens


def _cache(buckets, key_rows, dropped, tokens) -> SpeculationCache:
    cache = SpeculationCache(4, 3, torch.device("cpu"), tokens=tokens)
    cache.buckets, cache.key_rows, cache.dropped = buckets, key_rows, dropped
    return cache


CASES = _cases()


class _Captured(TorchDispatchMode):
    """Keeps the registered ops that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "saguaro":
            self.ops[func._schema.name.removeprefix("saguaro::")] = (func, args)
        return func(*args, **(kwargs or {}))


class _Module(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.call(*tensors)


def _fresh(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


def _same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return torch.equal(got, want)
    if want is None:
        return got is None
    return all(_same(a, b) for a, b in zip(got, want, strict=True))


def test_every_registered_op_has_a_case() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("saguaro::") for name in names if name.startswith("saguaro::")}
    assert set(CASES) == ours


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    """Schema, fake kernel, autograd registration and dispatch under dynamic shapes."""
    call, tensors = CASES[name]
    with _Captured() as captured:
        call(*_fresh(tensors))
    op, arguments = captured.ops[name]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("name", CASES)
def test_compiles_and_exports_whole(name: str) -> None:
    """One graph without breaks; results and what is written to arguments are the eager call's."""
    call, tensors = CASES[name]
    eager, compiled, exported = _fresh(tensors), _fresh(tensors), _fresh(tensors)
    want = call(*eager)
    graph = torch.compile(call, fullgraph=True, backend="eager")
    assert _same(graph(*compiled), want)
    program = torch.export.export(_Module(call), _fresh(tensors))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(f"saguaro.{name}" in target for target in targets), targets
    assert _same(program.module()(*exported), want)
    for its in (compiled, exported):
        assert all(_same(got, wanted) for got, wanted in zip(its, eager, strict=True))
