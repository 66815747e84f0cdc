"""Verification of drafted tokens by the target: how many are kept, and the one token it adds.

Glossary: *draft* d_1..d_K, d_i ~ q_i; *target row* p_1..p_{K+1}; *accepted* the kept prefix, length
k; *extra* the token the target adds: *recovered* when k < num_draft, *bonus* when k = num_draft.
K stands for the row's own num_draft. Under every rule the text has the target's law.

    token    accept d_i iff u_i q_i(d_i) < p_i(d_i), stop at the first failure; a_k = 1
    block    a_0 = 1, a_i = min(1, a_{i-1} p_i(d_i) / q_i(d_i))
             R_i = sum_x (a_i p_{i+1}(x) - q_{i+1}(x))+,  h_i = R_i / (R_i + 1 - a_i),  h_K = a_K
             k = max{i: u_i < h_i}, 0 if none
    extra    k < K: x ~ (a_k p_{k+1} - q_{k+1})+ / mass;  k = K: x ~ p_{K+1}
    coupled  y_i = argmax log p_i + g_i, g keyed by absolute position;
             k = the leading i with y_i = d_i; the extra token is y_{k+1}

A request of temperature 0 keeps its drafts while they are the argmax of their row, under any rule.

Sources: token, arXiv 2211.17192 and 2302.01318; block, arXiv 2403.10444 (the capped rule of arXiv
2601.05724, "hsd", has the same h and residual); coupled, arXiv 2408.07978.
"""

from __future__ import annotations

from typing import Any

import torch

from .._launch import FLOATS, Impl, check_tensor, resolve_impl
from ..distribution import Sampling
from ..errors import ConfigError, ShapeError
from ..rng import Keys
from .contract import DRAFT_NAN, DRAFT_TENSORS, RULES, Draft, Verdict
from .launch import _verify_launch, compile_cases, workspace_size
from .reference import verify_reference

__all__ = [
    "DRAFT_NAN",
    "Draft",
    "Verdict",
    "compile_cases",
    "verify",
    "verify_reference",
    "workspace_size",
]


def verify(
    target_logits: torch.Tensor,
    draft: Draft,
    target_sampling: Sampling,
    keys: Keys,
    *,
    rule: str = "block",
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    out: Verdict | None = None,
    workspace: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Verdict:
    """Judge the drafts of B requests: the accepted count, the output tokens and a status of each.

    Args:
        target_logits: [B, K+1, V] float16 | bfloat16 | float32, the last dimension contiguous, the
            others with any strides; or [N, V] with `row_index`. Row i judges d_{i+1}, row num_draft
            gives the bonus token, rows beyond are not read.
        draft: what was proposed, and the distributions it was drawn from.
        target_sampling: temperature [B] float32 and filters [B] of the target's rows.
        keys: seed [B] and base [B] int64: u_i and the extra token are functions of these.
        rule: "token", "block" ("hsd" is an alias) or "coupled". Drafts for "coupled" are drawn
            under Stream.COUPLED; for the others under any stream but ACCEPT and EXTRA.
        bias: [B, K+1, V] float32 added to the target's logits before the temperature, any strides.
        row_index: [B, K+1] int64, where row i of request b lies in a flat target_logits.
        out, workspace: tensors to write to, so that nothing is allocated; the workspace is
            [>= workspace_size(B, K, V)] float32, its contents do not matter.
    Returns:
        Verdict: num_accepted [B] int32; tokens [B, K+1] int64: accepted, extra, PAD; status [B].
        Where p equals q to rounding and a draft is refused nevertheless, the extra comes from p.
    Raises:
        ShapeError, DTypeError, DeviceError: a tensor does not fit. ConfigError: unknown rule, or a
        sampled draft without logq or temperature. Values are not checked on the device: see status.
    Cost:
        Target rows 0..num_draft-1 once, then one (p, q) row pair or the bonus row; block: also the
        pairs of the R_i that decide (u_i < a_i, after the last a_i = 1). 2 launches, block 3; with
        filters one more, and their re-reads. 0 host syncs; draft rows are never normalised.
    Source:
        See the module.
    """
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
    size = 0
    if impl == "triton":
        num_rows = None if row_index is None else target_logits.shape[0]
        vocab = target_logits.shape[-1]
        size = workspace_size(num_requests, num_steps, vocab, num_rows=num_rows)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=device)
    elif workspace.numel() < size:
        raise ShapeError(f"workspace: got {workspace.numel()} elements, want at least {size}")
    torch.ops.saguaro.verify(
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
        rule,
        impl,
        out.num_accepted,
        out.tokens,
        out.status,
        workspace,
    )
    return out


def _verify(
    target_logits: torch.Tensor,
    *arguments: Any,
) -> None:
    """The registered op: flat tensors back to their dataclasses, then the implementation."""
    count = len(DRAFT_TENSORS)
    fields, rest = dict(zip(DRAFT_TENSORS, arguments[:count], strict=True)), arguments[count:]
    draft_temperature, *sampling = rest[:5]
    seed, base, bias, row_index, rule, impl, num_accepted, tokens, status, workspace = rest[5:]
    if draft_temperature is not None:
        fields["sampling"] = Sampling(draft_temperature)
    draft, out = Draft(**fields), Verdict(num_accepted, tokens, status)
    options = {"rule": rule, "bias": bias, "row_index": row_index}
    if impl == "reference":
        verdict = verify_reference(
            target_logits, draft, Sampling(*sampling), Keys(seed, base), **options
        )
        for name in ("num_accepted", "tokens", "status"):
            getattr(out, name).copy_(getattr(verdict, name))
        return
    draft = Draft(**{name: _small_contiguous(name, value) for name, value in vars(draft).items()})
    _verify_launch(
        target_logits, draft, Sampling(*sampling), Keys(seed.contiguous(), base.contiguous()),
        out=out, workspace=workspace, **options,
    )  # fmt: skip


def _small_contiguous(name: str, value: Any) -> Any:
    """The tensors of [B, K] and [B]; logits and bias keep their strides."""
    if isinstance(value, torch.Tensor) and name not in ("logits", "bias"):
        return value.contiguous()
    return value


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
    if vocab == 0:
        raise ShapeError(f"target_logits: got shape {list(target_logits.shape)}, want V > 0")

    def check(name: str, tensor: torch.Tensor | None, shape: tuple, dtype: torch.dtype) -> None:
        if tensor is not None:
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
    if draft.logits is None:
        return
    shape = (*per_draft, None)
    check_tensor("draft.logits", draft.logits, shape, FLOATS, device, contiguous_last=True)
    if draft.bias is not None:
        shape = tuple(draft.logits.shape)
        check_tensor("draft.bias", draft.bias, shape, torch.float32, device, contiguous_last=True)
    if draft.logq is None or draft.sampling is None:
        raise ConfigError(
            "draft: got logits without logq or sampling, want both (saguaro_sample returns logq), "
            "or logits=None for one-hot drafts"
        )
    check("draft.sampling.temperature", draft.sampling.temperature, per_request, torch.float32)
    for edge, others in (("cutoff", ("cutoff_id",)), ("downweight", ("scale_logit", "scale_id"))):
        missing = [name for name in others if getattr(draft, name) is None]
        if getattr(draft, edge) is not None and missing:
            raise ConfigError(f"draft.{edge}: got it without {missing[0]}, want both")
