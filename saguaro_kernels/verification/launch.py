"""Launcher of the verification kernels: block sizes, scratch, strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .._launch import check_int, on_device
from ..distribution import Sampling
from ..distribution.launch import row_cutoff_launch
from ..rng import Keys
from .contract import Draft, Inputs, Verdict
from .kernels import (
    _INTEGERS,
    _verify_extra_kernel,
    _verify_mass_kernel,
    _verify_stats_kernel,
)


@dataclass(frozen=True)
class VerifyConfig:
    """Ids per tile, programs per row at most, warps per program; the same for every shape.

    Tiles of 4096 ids: two loads of 16 bytes per thread in bf16, one in the program of the extra
    token, which holds noise, p and q at once and would spill with two. 16 programs per row, because
    each program of a later launch merges the partials of all.
    """

    block_v: int = 4096
    max_splits: int = 16
    num_warps: int = 8
    noise_warps: int = 16

    def split(self, vocab: int) -> tuple[int, int]:
        """(programs per row, tiles per program)."""
        tiles = triton.cdiv(vocab, self.block_v)
        each = triton.cdiv(tiles, self.max_splits)
        return triton.cdiv(tiles, each), each


def verify_workspace_size(num_requests: int, num_steps: int, vocab: int) -> int:
    """float32 elements that one `verify` needs at most."""
    check_int("num_requests", num_requests, 0)
    check_int("num_steps", num_steps, 0)
    check_int("vocab", vocab, 1)
    splits, _ = VerifyConfig().split(vocab)
    return sum(_scratch_sizes(num_requests, num_steps, splits))


def _scratch_sizes(num_requests: int, num_steps: int, splits: int) -> tuple[int, ...]:
    """Of cutoff, cutoff_id, part, part_arg, mass, extra, extra_arg, counter."""
    per_split = (3 * num_steps, num_steps, num_steps, 4, 2)
    num_rows = num_requests * (num_steps + 1)
    shares = (num_requests * splits * size for size in per_split)
    return (num_rows, num_rows, *shares, num_requests)


def _verify_launch(
    target_logits: torch.Tensor,
    draft: Draft,
    sampling: Sampling,
    keys: Keys,
    *,
    rule: str,
    bias: torch.Tensor | None,
    row_index: torch.Tensor | None,
    inputs: Inputs,
    out: Verdict,
    workspace: torch.Tensor,
    config: VerifyConfig | None = None,
) -> None:
    """Write `out`. Everything but the logits and the biases is contiguous."""
    num_requests, num_steps = draft.tokens.shape
    if num_requests == 0:
        return
    vocab = target_logits.shape[-1]
    config = config or VerifyConfig()
    splits, tiles = config.split(vocab)
    sizes = _scratch_sizes(num_requests, num_steps, splits)
    cutoff, cutoff_id, part, part_arg, mass, extra, extra_arg, counter = workspace[
        : sum(sizes)
    ].split(sizes)
    cutoff_id, part_arg, extra_arg, counter = (
        ids.view(torch.int32) for ids in (cutoff_id, part_arg, extra_arg, counter)
    )
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        cutoff = cutoff_id = None
    else:
        row_cutoff_launch(
            target_logits, sampling, cutoff, cutoff_id, bias=bias, row_index=row_index,
            num_draft=draft.num_draft,
        )  # fmt: skip
    strides = [*_row_strides(target_logits), *_row_strides(draft.logits)]
    aligned = all(stride % 16 == 0 for stride in strides)
    if aligned:
        strides = [stride // 16 for stride in strides]
    bias_strides = [*_row_strides(bias), *_row_strides(draft.bias)]
    common = dict(
        part_ptr=part, target_ptr=target_logits, row_index_ptr=row_index, bias_ptr=bias,
        cutoff_ptr=cutoff, cutoff_id_ptr=cutoff_id, num_draft_ptr=draft.num_draft,
        temperature_ptr=sampling.temperature, seed_ptr=keys.seed, base_ptr=keys.base, vocab=vocab,
        num_steps=num_steps, num_splits=splits, tiles=tiles, stride_b=strides[0],
        stride_i=strides[1], bias_stride_b=bias_strides[0], bias_stride_i=bias_strides[1],
        PROBS=inputs.target_probs, ALIGNED=aligned, BLOCK_V=config.block_v,
    )  # fmt: skip
    one_hot, own = draft.one_hot, draft.sampling
    with_draft = dict(
        tokens_ptr=draft.tokens, draft_ptr=draft.logits, draft_row_index_ptr=draft.row_index,
        logq_ptr=draft.logq,
        draft_cutoff_ptr=draft.cutoff, draft_cutoff_id_ptr=draft.cutoff_id,
        scale_logit_ptr=draft.scale_logit, scale_id_ptr=draft.scale_id,
        downweight_ptr=draft.downweight,
        one_hot_ptr=None if one_hot is None else one_hot.view(torch.uint8),
        draft_temperature_ptr=None if own is None else own.temperature,
        draft_bias_ptr=draft.bias, map_ptr=draft.vocab_map,
        draft_vocab=vocab if draft.logits is None else draft.logits.shape[-1],
        draft_stride_b=strides[2], draft_stride_i=strides[3],
        draft_bias_stride_b=bias_strides[2], draft_bias_stride_i=bias_strides[3],
        DRAFT_PROBS=inputs.draft_probs, BLOCK_K=max(8, triton.next_power_of_2(num_steps)),
        BLOCK_S=triton.next_power_of_2(config.max_splits),
    )  # fmt: skip
    scan_masses = rule == "block" and draft.logits is not None and num_steps > 1
    with on_device(target_logits.device):
        _verify_stats_kernel[(num_requests, splits, max(num_steps, 1))](
            part_arg_ptr=part_arg, counter_ptr=counter, COUPLED=rule == "coupled",
            num_warps=config.noise_warps if rule == "coupled" else config.num_warps, **common,
        )  # fmt: skip
        if scan_masses:
            _verify_mass_kernel[(num_requests, splits, num_steps - 1)](
                mass_ptr=mass, num_warps=config.num_warps, **common, **with_draft
            )
        _verify_extra_kernel[(num_requests, splits)](
            num_accepted_ptr=out.num_accepted, output_ptr=out.tokens, status_ptr=out.status,
            num_passing_ptr=inputs.num_passing, bonus_ptr=inputs.bonus_tokens, extra_ptr=extra,
            extra_arg_ptr=extra_arg, counter_ptr=counter, part_arg_ptr=part_arg,
            mass_ptr=mass if scan_masses else None, BLOCK_RULE=rule == "block",
            COUPLED=rule == "coupled", num_warps=config.noise_warps, **common, **with_draft,
        )  # fmt: skip


def _row_strides(rows: torch.Tensor | None) -> tuple[int, int]:
    """(stride of a request, stride of a row); flat rows [N, V] have no request."""
    if rows is None:
        return 0, 0
    return (rows.stride(0), rows.stride(1)) if rows.dim() == 3 else (0, rows.stride(0))


def compile_cases() -> list[tuple[str, object, dict, dict, int]]:
    """Binaries to compile ahead of time: (name, kernel, signature, constexprs, num_warps)."""
    scratch = {
        "part_ptr": "*fp32", "part_arg_ptr": "*i32", "counter_ptr": "*i32", "mass_ptr": "*fp32",
        "extra_ptr": "*fp32", "extra_arg_ptr": "*i32", "num_accepted_ptr": "*i32",
        "output_ptr": "*i64", "status_ptr": "*i32",
    }  # fmt: skip
    requests = {
        "num_draft_ptr": "*i32", "temperature_ptr": "*fp32", "seed_ptr": "*i64",
        "base_ptr": "*i64", "tokens_ptr": "*i64",
    }  # fmt: skip
    sampled = {
        "logq_ptr": "*fp32", "draft_cutoff_ptr": "*fp32", "draft_cutoff_id_ptr": "*i64",
        "scale_logit_ptr": "*fp32", "scale_id_ptr": "*i64", "draft_temperature_ptr": "*fp32",
        "one_hot_ptr": "*u8",
    }  # fmt: skip
    rest = {
        "row_index_ptr": "*i64", "bias_ptr": "*fp32", "cutoff_ptr": "*fp32",
        "cutoff_id_ptr": "*i32", "downweight_ptr": "*fp32", "draft_bias_ptr": "*fp32",
        "map_ptr": "*i32",
    }  # fmt: skip
    integers = {name: "i32" for name in _INTEGERS}
    config, cases, seen = VerifyConfig(), [], set()

    def add(name: str, pointers: dict, rule: str, aligned: bool = True) -> None:
        kernels = {"stats": _verify_stats_kernel, "extra": _verify_extra_kernel}
        if rule == "block" and "draft_ptr" in pointers:
            kernels["mass"] = _verify_mass_kernel
        types = {**scratch, **requests, **pointers, **integers}
        if "mass" not in kernels:
            del types["mass_ptr"]
        probs = name.startswith("compat")
        values = {
            "BLOCK_V": config.block_v, "BLOCK_K": 8, "BLOCK_S": 16, "ALIGNED": aligned,
            "COUPLED": rule == "coupled", "BLOCK_RULE": rule == "block",
            "PROBS": probs, "DRAFT_PROBS": probs,
        }  # fmt: skip
        for phase, kernel in kernels.items():
            signature = {n: types[n] for n in kernel.arg_names if n in types}
            constexprs = {n: values.get(n) for n in kernel.arg_names if n not in signature}
            noisy = phase == "extra" or rule == "coupled"
            warps = config.noise_warps if noisy else config.num_warps
            key = (phase, *signature.items(), *constexprs.items())
            if key not in seen:
                seen.add(key)
                cases.append((f"verify-{phase}-{name}", kernel, signature, constexprs, warps))

    for dtype in ("bf16", "fp32"):
        rows = {"target_ptr": f"*{dtype}", "draft_ptr": f"*{dtype}", **sampled}
        for rule in ("token", "block", "coupled"):
            add(f"{rule}-{dtype}", rows, rule)
    rows = {"target_ptr": "*bf16", "draft_ptr": "*bf16", **sampled}
    add("block-bf16-unaligned", rows, "block", aligned=False)
    add("block-bf16-all-options", {**rows, **rest}, "block")
    add("token-bf16-one-hot", {"target_ptr": "*bf16"}, "token")
    flat = {"row_index_ptr": "*i64", "draft_row_index_ptr": "*i64"}
    compat = {"num_passing_ptr": "*i32", "bonus_ptr": "*i64"}
    rows = {"target_ptr": "*fp32", "draft_ptr": "*fp32", **sampled}
    add("compat-fp32", {**rows, **flat, **compat}, "token")
    add("block-fp16", {"target_ptr": "*fp16", "draft_ptr": "*fp16", **sampled}, "block")
    return cases
