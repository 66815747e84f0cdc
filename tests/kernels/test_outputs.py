"""Tensors that a caller hands in to be written: what does not fit is refused before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import random_case

from saguaro_kernels import Keys, Sampling, row_stats, saguaro_sample, verify
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.errors import DeviceError, DTypeError, ShapeError
from saguaro_kernels.outcomes import predict_outcomes
from saguaro_kernels.tree import chain_layout, tree_layout

SAMPLING, KEYS = Sampling(torch.ones(2)), Keys(torch.tensor([1, 2]), torch.tensor([3, 4]))
LOGITS = torch.randn(2, 11, generator=torch.Generator().manual_seed(0))
INT = torch.int32


def sample(**options: Any) -> Any:
    return saguaro_sample(LOGITS, SAMPLING, KEYS, offset=0, **options)


def stats(**options: Any) -> Any:
    return row_stats(LOGITS, SAMPLING, **options)


def outcomes(**options: Any) -> Any:
    rows = LOGITS[:, None].expand(2, 3, 11).contiguous()
    drafts, count = torch.ones(2, 2, dtype=torch.int64), torch.full((2,), 2, dtype=INT)
    return predict_outcomes(rows, drafts, count, SAMPLING, KEYS, branches=8, **options)


def tree(page_table: torch.Tensor | None = None, **options: Any) -> Any:
    depth, tokens = torch.zeros(2, 3, dtype=INT), torch.ones(2, 3, dtype=torch.int64)
    trunk = torch.full((2,), 5)
    return tree_layout(depth, tokens, trunk, draft_len=2, page_table=page_table, **options)


def chain(**options: Any) -> Any:
    tokens, two = torch.ones(2, 3, dtype=torch.int64), torch.full((2,), 2)
    return chain_layout(tokens, two, two, **options)


def judge(**options: Any) -> Any:
    return verify(**random_case(2, 2, 50), rule="block", **options)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def of_other_type(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def too_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :1].contiguous()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("spoil", "error"),
    [(strided, ShapeError), (of_other_type, DTypeError), (too_small, ShapeError)],
)
@pytest.mark.parametrize("op", [sample, stats, outcomes, tree, chain, judge])
def test_every_field_is_checked(
    op: Callable[..., Any], spoil: Callable[..., Any], error: type[Exception], impl: str
) -> None:
    found = op(impl=impl)
    op(out=found, impl=impl)  # its own output fits
    for field in dataclasses.fields(found):
        tensor = getattr(found, field.name)
        if not tensor.numel() or (op is tree and field.name == "depth"):
            continue  # nothing to write; an input
        out = dataclasses.replace(found, **{field.name: spoil(tensor)})
        with pytest.raises(error, match=field.name):
            op(out=out, impl=impl)


@pytest.mark.parametrize("op", [sample, judge, outcomes])
def test_workspaces(op: Callable[..., Any]) -> None:
    dtype = torch.float32 if op is judge else torch.int64
    op(workspace=torch.zeros(4096, dtype=dtype), impl="triton")
    for workspace, error in (
        (torch.zeros(4096, dtype=torch.float64), DTypeError),
        (torch.zeros(8192, dtype=dtype)[::2], ShapeError),
        (torch.zeros(64, 64, dtype=dtype), ShapeError),
        (torch.zeros(3, dtype=dtype), ShapeError),
        (torch.zeros(4096, dtype=dtype, device="meta"), DeviceError),
    ):
        with pytest.raises(error, match="workspace"):
            op(workspace=workspace, impl="triton")


def test_page_tables_and_chains_lie_in_one_piece() -> None:
    table = torch.arange(40, dtype=INT).view(2, 20)
    for wrong in (table[:, ::2], table[:, :0]):
        with pytest.raises(ShapeError, match="page_table"):
            tree(wrong)
    with pytest.raises(ShapeError, match="tokens"):
        SpeculationCache(8, 4, "cpu", tokens=torch.arange(24).view(4, 6)[:, :3])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_layout_of_tokens_that_do_not_lie_in_one_piece(impl: str) -> None:
    tokens, two = torch.arange(6).view(3, 2), torch.full((2,), 2)
    found = chain_layout(tokens.T, two, two, impl=impl)
    for name, wanted in vars(chain_layout(tokens.T.contiguous(), two, two, impl=impl)).items():
        assert torch.equal(getattr(found, name), wanted), name
