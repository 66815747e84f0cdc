"""The registered op `saguaro::verify`: checks, allocation, and the way to an implementation."""

from __future__ import annotations

from typing import Any

import torch

from .._call import call
from .._launch import (
    FLOATS,
    Impl,
    check_out,
    check_sizes,
    check_tensor,
    check_workspace,
    resolve_impl,
)
from ..distribution import Sampling
from ..errors import ConfigError
from ..rng import Keys
from .contract import DRAFT_TENSORS, NO_INPUTS, RULES, Draft, Inputs, Verdict
from .launch import _verify_launch, verify_workspace_size
from .reference import verify_reference

_NEEDED = (
    "draft.num_draft", "target_sampling.temperature", "keys.seed", "keys.base",
    "draft.sampling.temperature",
)  # fmt: skip
_PAIRS = (
    ("cutoff", ("cutoff_id",)),
    ("cutoff_id", ("cutoff",)),
    ("scale_logit", ("scale_id",)),
    ("scale_id", ("scale_logit",)),
    ("downweight", ("scale_logit", "scale_id")),
)
"""Fields of a Draft that say nothing without others."""


def run(
    target_logits: torch.Tensor,
    draft: Draft,
    target_sampling: Sampling,
    keys: Keys,
    *,
    rule: str,
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    inputs: Inputs = NO_INPUTS,
    out: Verdict | None = None,
    workspace: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Verdict:
    """See `verify`; `inputs` serves the contracts of other engines."""
    rule = "block" if rule == "hsd" else rule
    if rule not in RULES:
        raise ConfigError(f"rule: got {rule!r}, want one of {', '.join(RULES)} or 'hsd'")
    _check(target_logits, draft, target_sampling, keys, bias, row_index)
    impl = resolve_impl(impl, target_logits.device)
    device, (num_requests, num_steps) = target_logits.device, draft.tokens.shape
    if out is None:
        out = Verdict(
            torch.empty(num_requests, dtype=torch.int32, device=device),
            torch.empty((num_requests, num_steps + 1), dtype=torch.int64, device=device),
            torch.empty(num_requests, dtype=torch.int32, device=device),
        )
    else:
        for name, shape, dtype in (
            ("num_accepted", (num_requests,), torch.int32),
            ("tokens", (num_requests, num_steps + 1), torch.int64),
            ("status", (num_requests,), torch.int32),
        ):
            check_out(f"out.{name}", getattr(out, name), shape, dtype, device)
    size = 0
    if impl == "triton":
        size = verify_workspace_size(num_requests, num_steps, target_logits.shape[-1])
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=device)
    else:
        check_workspace(workspace, size, torch.float32, device)
    call(
        "verify",
        target_logits,
        *(getattr(draft, name) for name in DRAFT_TENSORS),
        None if draft.sampling is None else draft.sampling.temperature,
        target_sampling.temperature,
        target_sampling.top_k,
        target_sampling.top_p,
        target_sampling.min_p,
        keys.seed,
        keys.base,
        bias,
        row_index,
        inputs.bonus_tokens,
        inputs.target_probs,
        inputs.draft_probs,
        rule,
        impl,
        out.num_accepted,
        out.tokens,
        out.status,
        workspace,
        inputs.num_passing,
    )
    return out


def _verify(target_logits: torch.Tensor, *arguments: Any) -> None:
    """Flat tensors back to their dataclasses, then the implementation that `impl` names."""
    count = len(DRAFT_TENSORS)
    fields, rest = dict(zip(DRAFT_TENSORS, arguments[:count], strict=True)), arguments[count:]
    draft_temperature, *sampling = rest[:5]
    seed, base, bias, row_index, bonus_tokens, target_probs, draft_probs, rule, impl = rest[5:14]
    num_accepted, tokens, status, workspace, num_passing = rest[14:]
    if draft_temperature is not None:
        fields["sampling"] = Sampling(draft_temperature)
    out = Verdict(num_accepted, tokens, status)
    options = {
        "rule": rule,
        "bias": bias,
        "row_index": row_index,
        "inputs": Inputs(target_probs, draft_probs, bonus_tokens, num_passing),
    }
    if impl == "reference":
        verdict = verify_reference(
            target_logits, Draft(**fields), Sampling(*sampling), Keys(seed, base), **options
        )
        for name in ("num_accepted", "tokens", "status"):
            getattr(out, name).copy_(getattr(verdict, name))
        return
    # The kernels take strides of the logits and the biases only.
    small = {
        name: value.contiguous() if value is not None and name not in ("logits", "bias") else value
        for name, value in fields.items()
        if name != "sampling"
    }
    if draft_temperature is not None:
        small["sampling"] = Sampling(draft_temperature.contiguous())
    filters = (value if value is None else value.contiguous() for value in sampling[1:])
    _verify_launch(
        target_logits,
        Draft(**small),
        Sampling(sampling[0].contiguous(), *filters),
        Keys(seed.contiguous(), base.contiguous()),
        out=out,
        workspace=workspace,
        **options,
    )


def _check(
    target_logits: torch.Tensor,
    draft: Draft,
    sampling: Sampling,
    keys: Keys,
    bias: torch.Tensor | None,
    row_index: torch.Tensor | None,
) -> None:
    """Raise unless every tensor fits the shapes of the docstrings."""
    device = target_logits.device
    check_tensor("draft.tokens", draft.tokens, (None, None), torch.int64, device)
    num_requests, num_steps = draft.tokens.shape
    rows = (num_requests, num_steps + 1) if row_index is None else (None,)
    check_tensor("target_logits", target_logits, (*rows, None), FLOATS, contiguous_last=True)
    vocab = target_logits.shape[-1]
    check_sizes("target_logits", target_logits, V=vocab)
    if row_index is not None and num_requests:
        check_sizes("target_logits", target_logits, N=target_logits.shape[0])

    def check(name: str, tensor: torch.Tensor | None, shape: tuple, dtype: torch.dtype) -> None:
        if tensor is not None or name in _NEEDED:
            check_tensor(name, tensor, shape, dtype, device)

    per_request, per_draft = (num_requests,), (num_requests, num_steps)
    check("draft.num_draft", draft.num_draft, per_request, torch.int32)
    check("row_index", row_index, (num_requests, num_steps + 1), torch.int64)
    for name in ("logq", "lse", "cutoff", "scale_logit"):
        check(f"draft.{name}", getattr(draft, name), per_draft, torch.float32)
    for name in ("cutoff_id", "scale_id"):
        check(f"draft.{name}", getattr(draft, name), per_draft, torch.int64)
    check("draft.downweight", draft.downweight, per_request, torch.float32)
    check("draft.one_hot", draft.one_hot, per_request, torch.bool)
    check("draft.vocab_map", draft.vocab_map, (vocab,), torch.int32)
    check("target_sampling.temperature", sampling.temperature, per_request, torch.float32)
    check("target_sampling.top_k", sampling.top_k, per_request, torch.int32)
    check("target_sampling.top_p", sampling.top_p, per_request, torch.float32)
    check("target_sampling.min_p", sampling.min_p, per_request, torch.float32)
    check("keys.seed", keys.seed, per_request, torch.int64)
    check("keys.base", keys.base, per_request, torch.int64)
    if bias is not None:
        shape = (num_requests, num_steps + 1, vocab)
        check_tensor("bias", bias, shape, torch.float32, device, contiguous_last=True)
    for name, others in _PAIRS:
        missing = [other for other in others if getattr(draft, other) is None]
        if getattr(draft, name) is not None and missing:
            raise ConfigError(f"draft.{name}: got it without {missing[0]}, want both or neither")
    check("draft.row_index", draft.row_index, per_draft, torch.int64)
    if draft.sampling is not None:
        temperature = draft.sampling.temperature
        check("draft.sampling.temperature", temperature, per_request, torch.float32)
    if draft.logits is None:
        return
    flat = draft.row_index is not None
    leading = (None,) if flat else per_draft
    check_tensor(
        "draft.logits", draft.logits, (*leading, None), FLOATS, device, contiguous_last=True
    )
    check_sizes("draft.logits", draft.logits, V_draft=draft.logits.shape[-1])
    if flat and num_requests and num_steps:
        check_sizes("draft.logits", draft.logits, N=draft.logits.shape[0])
    if draft.bias is not None:
        shape = (*per_draft, draft.logits.shape[-1])
        check_tensor("draft.bias", draft.bias, shape, torch.float32, device, contiguous_last=True)
    if draft.logq is None or draft.sampling is None:
        raise ConfigError(
            "draft: got logits without logq or sampling, want both (saguaro_sample returns logq), "
            "or logits=None for one-hot drafts"
        )
    filters = draft.sampling.top_k, draft.sampling.top_p, draft.sampling.min_p
    if draft.cutoff is None and any(part is not None for part in filters):
        raise ConfigError(
            "draft.cutoff: got None with a filter in draft.sampling, want the cutoff and cutoff_id "
            "that saguaro_sample returned: they say which ids the draft was drawn from"
        )
