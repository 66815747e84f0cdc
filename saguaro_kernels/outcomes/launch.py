"""Launch of outcome prediction: shares of a row, scratch, and what to compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .._launch import check_int, on_device
from ..rng import Keys
from .fan_out import _allocate_fan_out_kernel
from .kernels import _predict_outcomes_scan_kernel, _predict_outcomes_select_kernel
from .reference import COLDEST, NOISE_FROM_TEMPERATURE, Outcomes

_PROGRAMS = 264
"""Programs worth having: two per multiprocessor of a large GPU."""
_SELECTED = 4096
"""Candidates that one program selects from."""
RANKINGS = ("probability", "noise", "coupled", "auto")
_UNIFORM, _FAN_OUT, _BEST = 0, 1, 2


@dataclass(frozen=True)
class OutcomesConfig:
    """Sizes of one launch: `width` candidates are kept of each of `splits` shares of a row.

    With 8 warps the selecting program, which holds all candidates, spills on sm_80 and sm_90.
    """

    width: int
    block_v: int
    splits: int
    num_warps: int = 4
    select_warps: int = 16


def outcomes_config(batch: int, rows: int, vocab: int, branches: int) -> OutcomesConfig:
    """As many shares as fill a large GPU, and as the selecting program can hold candidates of."""
    width = max(4, triton.next_power_of_2(branches))
    block_v = min(2048, max(4 * width, triton.next_power_of_2(vocab)))
    most = _SELECTED // (width * triton.next_power_of_2(rows))
    wanted = triton.cdiv(_PROGRAMS, max(1, batch * rows))
    return OutcomesConfig(width, block_v, max(1, min(most, wanted, triton.cdiv(vocab, block_v))))


def outcomes_workspace_size(batch: int, rows: int, vocab: int, branches: int) -> int:
    """int64 elements that `predict_outcomes` needs for draft_logits [batch, rows, vocab]."""
    check_int("batch", batch, 0)
    check_int("rows", rows, 1)
    check_int("vocab", vocab, 1)
    check_int("branches", branches, 0, 1024)
    config = outcomes_config(batch, rows, vocab, branches)
    return batch * rows * config.splits * (config.width + 1)


def _predict_outcomes_launch(
    draft_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    temperature: torch.Tensor,
    keys: Keys,
    fan_out: torch.Tensor | None,
    accept_prob: torch.Tensor | None,
    cutoff: torch.Tensor | None,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    out: Outcomes,
    *,
    ranking: str,
    best: bool,
    workspace: torch.Tensor | None = None,
    config: OutcomesConfig | None = None,
) -> None:
    batch, rows, vocab = draft_logits.shape
    branches = out.depth.shape[1]
    if not batch * branches:
        return
    config = config or outcomes_config(batch, rows, vocab, branches)
    shares = batch * rows * config.splits
    sizes = shares * config.width, shares
    if workspace is None:
        workspace = draft_logits.new_empty(sum(sizes), dtype=torch.int64)
    kept, floats = workspace[: sum(sizes)].split(sizes)
    top, total = floats.view(torch.float32).chunk(2)
    strides = draft_logits.stride()[:2] + ((0, 0) if bias is None else bias.stride()[:2])
    unit = 16 if all(size % 16 == 0 for size in (vocab, *strides)) else 1
    with on_device(draft_logits.device):
        _predict_outcomes_scan_kernel[(batch * rows, config.splits)](
            draft_logits,
            draft_logits if bias is None else bias,
            draft_tokens,
            num_draft,
            temperature,
            keys.seed,
            keys.base,
            temperature if cutoff is None else cutoff,
            ids,
            kept,
            top,
            total,
            *(stride // unit for stride in strides),
            drafts=rows - 1,
            vocab=vocab // unit,
            splits=config.splits,
            noise_from=NOISE_FROM_TEMPERATURE,
            COLDEST=COLDEST,
            RANKING=RANKINGS.index(ranking),
            HAS_BIAS=bias is not None,
            HAS_CUTOFF=cutoff is not None,
            UNIT=unit,
            F=config.width,
            BLOCK_V=config.block_v,
            num_warps=config.num_warps,
        )
        _predict_outcomes_select_kernel[(batch,)](
            kept,
            top,
            total,
            num_draft,
            num_draft if fan_out is None else fan_out,
            temperature if accept_prob is None else accept_prob,
            out.depth,
            out.tokens,
            out.score,
            drafts=rows - 1,
            splits=config.splits,
            branches=branches,
            fan_out_stride=0 if fan_out is None else fan_out.stride(0),
            ALLOCATION=_BEST if best else _UNIFORM if fan_out is None else _FAN_OUT,
            HAS_ACCEPT=accept_prob is not None,
            F=config.width,
            BLOCK_K=triton.next_power_of_2(rows),
            BLOCK_S=triton.next_power_of_2(config.splits),
            num_warps=config.select_warps,
        )


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, signature, constexprs, num_warps) of both phases, and of the fan-out."""
    scan = {
        "logits_ptr": "*bf16",
        "bias_ptr": "*fp32",
        "drafted_ptr": "*i64",
        "num_draft_ptr": "*i32",
    }
    scan |= {
        "temperature_ptr": "*fp32",
        "seed_ptr": "*i64",
        "base_ptr": "*i64",
        "cutoff_ptr": "*fp32",
    }
    scan |= {"best_ptr": "*i64", "top_ptr": "*fp32", "sum_ptr": "*fp32", "noise_from": "fp32"}
    strides = ("logits_stride_b", "logits_stride_k", "bias_stride_b", "bias_stride_k")
    scan |= dict.fromkeys((*strides, "drafts", "vocab", "splits"), "i32")
    select = {"best_ptr": "*i64", "top_ptr": "*fp32", "sum_ptr": "*fp32", "num_draft_ptr": "*i32"}
    select |= {"fan_out_ptr": "*i32", "accept_ptr": "*fp32", "depth_ptr": "*i32"}
    select |= {"tokens_ptr": "*i64", "score_ptr": "*fp32"}
    select |= dict.fromkeys(("drafts", "splits", "branches", "fan_out_stride"), "i32")
    config = OutcomesConfig(width=32, block_v=2048, splits=16)
    cases: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = []
    for ranking, mapped in (("probability", False), ("auto", False), ("auto", True)):
        flags: dict[str, Any] = {
            "RANKING": RANKINGS.index(ranking),
            "HAS_BIAS": False,
            "HAS_CUTOFF": False,
        }
        sizes: dict[str, Any] = {"COLDEST": COLDEST, "UNIT": 16, "F": 32, "BLOCK_V": 2048}
        name = f"predict_outcomes_scan-{ranking}-bf16{'-ids' if mapped else ''}"
        types = scan | ({"column_ids_ptr": "*i64"} if mapped else {})
        flags |= {} if mapped else {"column_ids_ptr": None}
        cases.append((name, _predict_outcomes_scan_kernel, types, flags | sizes, config.num_warps))
    for allocation, code in (("uniform", _UNIFORM), ("best", _BEST)):
        flags = {"ALLOCATION": code, "HAS_ACCEPT": code == _BEST}
        sizes = {"F": 32, "BLOCK_K": 8, "BLOCK_S": 16}
        name = f"predict_outcomes_select-{allocation}"
        cases.append(
            (name, _predict_outcomes_select_kernel, select, flags | sizes, config.select_warps)
        )
    fan_out = {"hist_ptr": "*fp32", "r_ptr": "*fp32", "r_value": "fp32", "out_ptr": "*i32"}
    fan_out |= {"lengths": "i32", "branches": "i32"}
    flags = {"R_IS_TENSOR": False, "BLOCK": 8}
    return [*cases, ("allocate_fan_out", _allocate_fan_out_kernel, fan_out, flags, 1)]
