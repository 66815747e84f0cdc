"""Verification of drafted tokens by the target: how many are accepted, and the token it adds.

Glossary: *draft* d_1..d_K, d_i ~ q_i; *target row* p_1..p_{K+1}; *accepted* the kept prefix, length
k; *extra* the token the target adds: *recovered* when k < num_draft, *bonus* when k = num_draft.
K stands for the row's own num_draft. Under every rule the text is distributed as the target's.

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

import torch

from .._launch import Impl
from ..distribution import Sampling
from ..rng import Keys
from .contract import DRAFT_NAN, Draft, Verdict
from .launch import compile_cases, verify_workspace_size
from .op import _verify, run
from .reference import verify_reference

__all__ = [
    "DRAFT_NAN",
    "Draft",
    "Verdict",
    "_verify",
    "compile_cases",
    "verify",
    "verify_reference",
    "verify_workspace_size",
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
        bias: [B, K+1, V] float32 added to the target's logits before the temperature, the last
            dimension contiguous.
        row_index: [B, K+1] int64, where row i of request b lies in a flat target_logits.
        out, workspace: tensors to write to, so that nothing is allocated; the workspace is
            [>= verify_workspace_size(B, K, V)] float32, its contents do not matter.
    Returns:
        Verdict: num_accepted [B] int32; tokens [B, K+1] int64: accepted, extra, PAD; status [B].
        Where p equals q to rounding and a draft is rejected nevertheless, the extra comes from p.
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
    return run(
        target_logits,
        draft,
        target_sampling,
        keys,
        rule=rule,
        bias=bias,
        row_index=row_index,
        out=out,
        workspace=workspace,
        impl=impl,
    )
