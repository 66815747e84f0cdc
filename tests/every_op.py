"""One small call of every public op, as data: its function and its arguments by name.

Tests that ask the same of all ops (another device, gradients, an empty batch) vary these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from drafting import random_case

from saguaro_kernels import (
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
from saguaro_kernels.compat import chain_speculative_sampling, rejection_sample

B, K, V = 2, 2, 24
INT = torch.int32


@dataclasses.dataclass(frozen=True)
class Op:
    """`call(**arguments, impl=...)`; the arguments named in `shared` have no batch dimension.

    Called itself, it hands on a copy of the argument that `call` writes, and returns that.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    shared: tuple[str, ...] = ()
    written: str = ""

    def __call__(self, impl: str = "reference", **changed: Any) -> Any:
        arguments = {**self.arguments, **changed, "impl": impl}
        if not self.written:
            return self.call(**arguments)
        given = arguments[self.written]
        copy = given.detach().clone().requires_grad_(given.requires_grad)
        self.call(**{**arguments, self.written: copy})
        return copy.detach()


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, tensor) of every tensor among the arguments."""
    fields = vars(value) if dataclasses.is_dataclass(value) else value
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(fields, dict):
        for name, its in fields.items():
            yield from leaves(its, (*path, name))


def change(value: Any, how: Callable[[tuple[str, ...], torch.Tensor], Any], path=()) -> Any:
    """The arguments with how(path, tensor) in the place of every tensor."""
    if isinstance(value, torch.Tensor):
        return how(path, value)
    if dataclasses.is_dataclass(value):
        fields = {name: change(its, how, (*path, name)) for name, its in vars(value).items()}
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {name: change(its, how, (*path, name)) for name, its in value.items()}
    return value


def tensors(result: Any) -> list[torch.Tensor]:
    """Everything an op returned."""
    if isinstance(result, (tuple, list)):
        return [tensor for its in result for tensor in tensors(its)]
    return [tensor for _, tensor in leaves(result)]


def cache_table() -> dict[str, torch.Tensor]:
    """The tensors of a cache, which an insertion writes."""
    its = SpeculationCache(8, 4, "cpu", tokens=torch.arange(4 * K, device="cpu").view(4, K))
    return {name: getattr(its, name) for name in ("buckets", "key_rows", "dropped", "tokens")}


def insert_and_look_up(
    *, slot: torch.Tensor, impl: str, table: dict[str, torch.Tensor] | None = None, **key: Any
) -> Any:
    table = table or cache_table()
    cache = SpeculationCache(8, 4, "cpu", tokens=table["tokens"])
    cache.buckets, cache.key_rows, cache.dropped = (
        table[name] for name in ("buckets", "key_rows", "dropped")
    )
    cache.insert(**key, slot=slot, impl=impl)
    return cache.lookup(**key, impl=impl)


def sample_rows(**arguments: Any) -> Any:
    return saguaro_sample(**arguments, offset=1, scheme="downweight", scale_f=3, top_f=4)


def ops() -> dict[str, Op]:
    random = torch.Generator().manual_seed(0)
    rows = 2 * torch.randn(B, V, generator=random)
    other = rows + torch.randn(B, V, generator=random)
    filters = {
        "top_k": torch.tensor([5, 0], dtype=INT),
        "top_p": torch.tensor([0.9, 1.0]),
        "min_p": torch.tensor([0.0, 0.05]),
    }
    sampling = Sampling(torch.tensor([1.0, 0.7]), **filters)
    keys = Keys(torch.tensor([3, 4]), torch.tensor([8, 9]))
    case = random_case(B, K, V, downweight=0.5, scale_f=3, temperature=[1.0, 0.7])
    draft = dataclasses.replace(
        case["draft"],
        bias=torch.zeros(B, K, V),
        one_hot=torch.tensor([False, False]),
        vocab_map=torch.arange(V, dtype=INT),
    )
    target, count = case["target_logits"], torch.tensor([2, 1], dtype=INT)
    drafted = torch.tensor([[3, 4], [5, -1]])
    depth = torch.tensor([[0, 2, -1], [1, 0, 2]], dtype=INT)
    trunk, branch = torch.tensor([4, 2], dtype=INT), torch.tensor([1, 2], dtype=INT)
    table = torch.arange(8, dtype=INT).view(2, 4)
    slots = torch.arange(32, dtype=INT).view(2, 16)
    pages = torch.randn(2, 8, 4, 1, 16, generator=random)
    query = torch.randn(B, 3, 2, 16, generator=random)
    moved = {"trunk_len": trunk, "depth": branch * 0 + 1, "branch": branch}
    moved |= {"draft_len": K, "branches": 3}
    flat = target[:, :K].flatten(0, 1)
    return {
        "row_stats": Op(
            row_stats, {"logits": rows, "sampling": sampling, "bias": torch.zeros(B, V)}
        ),
        "saguaro_sample": Op(
            sample_rows,
            {
                "logits": rows,
                "sampling": sampling,
                "keys": keys,
                "downweight": torch.tensor([0.5, 1.0]),
                "bias": torch.zeros(B, V),
                "ids": 2 * torch.arange(V),
            },
            ("ids",),
        ),
        "sample_geometric": Op(
            sample_geometric,
            {
                "draft_logits": rows,
                "target_logits": other,
                "draft_sampling": sampling,
                "keys": keys,
                "offset": torch.tensor([0, 1]),
            },
        ),
        "residual": Op(
            residual,
            {
                "target_logits": other,
                "draft_logits": rows,
                "target_sampling": sampling,
                "draft_sampling": sampling,
                "scale": torch.tensor([1.0, 0.5]),
            },
        ),
        "verify": Op(
            verify,
            {
                "target_logits": target,
                "draft": draft,
                "target_sampling": sampling,
                "keys": keys,
                "bias": torch.zeros(B, K + 1, V),
            },
            ("vocab_map",),
        ),
        "verify_flat": Op(
            verify,
            {
                "target_logits": target.flatten(0, 1),
                "draft": dataclasses.replace(
                    draft,
                    bias=None,
                    logits=draft.logits.flatten(0, 1),
                    row_index=torch.arange(B * K).view(B, K),
                ),
                "target_sampling": sampling,
                "keys": keys,
                "row_index": torch.arange(B * (K + 1)).view(B, K + 1),
            },
            ("vocab_map", "target_logits", "logits"),
        ),
        "predict_outcomes": Op(
            predict_outcomes,
            {
                "draft_logits": target,
                "draft_tokens": drafted,
                "num_draft": count,
                "sampling": Sampling(torch.tensor([1.0, 0.3])),
                "keys": keys,
                "branches": 6,
                "fan_out": torch.tensor([[2, 2, 2], [1, 2, 3]], dtype=INT),
                "accept_prob": torch.tensor([[0.3, 0.3, 0.4], [0.2, 0.7, 0.1]]),
                "cutoff": torch.full((B, K + 1), -3.0),
                "bias": torch.zeros(B, K + 1, V),
                "ids": torch.arange(V) + 1,
            },
            ("ids",),
        ),
        "allocate_fan_out": Op(
            allocate_fan_out,
            {
                "accept_hist": torch.tensor([[5.0, 3.0, 2.0], [0.0, 1.0, 1.0]]),
                "branches": 7,
                "r": torch.tensor([0.6, 0.0]),
            },
        ),
        "ngram_propose": Op(
            ngram_propose,
            {
                "history": torch.tensor([[1, 2, 1, 2, 1, 0], [7, 8, 9, 7, 8, 0]]),
                "length": torch.tensor([5, 4], dtype=INT),
                "num_tokens": 3,
            },
        ),
        "promote_branch": Op(
            promote_branch,
            {"kv_pages": pages, "page_table": table, **moved},
            ("kv_pages",),
            written="kv_pages",
        ),
        "promote_pages": Op(promote_pages, {"page_table": slots, **moved}, written="page_table"),
        "tree_layout": Op(
            tree_layout,
            {
                "depth": depth,
                "tokens": torch.arange(6).view(B, 3),
                "trunk_len": trunk,
                "draft_len": K,
                "page_table": table,
                "page_size": 4,
            },
        ),
        "chain_layout": Op(
            chain_layout,
            {
                "tokens": drafted,
                "count": count,
                "trunk_len": trunk,
                "page_table": table,
                "page_size": 4,
            },
        ),
        "tree_attention": Op(
            tree_attention,
            {
                "query": query,
                "key_pages": pages[0],
                "value_pages": pages[1],
                "page_table": table,
                "trunk_len": trunk,
                "depth": depth,
                "draft_len": K,
                "step": 1,
                "window": 4,
                "softcap": 5.0,
            },
            ("key_pages", "value_pages"),
        ),
        "cache": Op(
            insert_and_look_up,
            {
                "uid": torch.tensor([1, 2]),
                "generation": torch.tensor([5, 5]),
                "base": torch.tensor([7, 8]),
                "accepted": torch.tensor([0, 1], dtype=INT),
                "extra": torch.tensor([11, 12]),
                "slot": torch.tensor([2, 3], dtype=INT),
            },
        ),
        "chain_speculative_sampling": Op(
            chain_speculative_sampling,
            {
                "draft_probs": target[:, :K].softmax(-1),
                "draft_token_ids": torch.tensor([[3, 4], [5, 6]]),
                "target_probs": other[:, None].expand(B, K + 1, V).softmax(-1),
                "seed": torch.tensor([5]),
                "offset": torch.tensor([6]),
            },
            ("seed", "offset"),
        ),
        "rejection_sample": Op(
            rejection_sample,
            {
                "draft_token_ids": torch.tensor([3, 4, 5, 6]),
                "num_draft_tokens": [2, 2],
                "max_spec_len": 2,
                "cu_num_draft_tokens": torch.tensor([2, 4]),
                "draft_probs": flat.softmax(-1),
                "target_logits": 1.5 * flat,
                "bonus_token_ids": torch.tensor([1, 2]),
                "temperature": torch.tensor([1.0, 0.0]),
                "seed": 5,
            },
        ),
    }
