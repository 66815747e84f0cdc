"""Verification of drafted tokens by the target: how many are kept, and the one token it adds.

Glossary: *draft* d_1..d_K, d_i ~ q_i; *target row* p_1..p_{K+1}; *accepted* the kept prefix, length
k; *extra* the token the target adds: *recovered* when k < num_draft, *bonus* when k = num_draft.
K stands for the row's own num_draft. Every rule leaves the law of the text the target's.

    token    accept d_i iff u_i q_i(d_i) < p_i(d_i), stop at the first failure; a_k = 1
    block    a_0 = 1, a_i = min(1, a_{i-1} p_i(d_i) / q_i(d_i))
             R_i = sum_x (a_i p_{i+1}(x) - q_{i+1}(x))+,  h_i = R_i / (R_i + 1 - a_i),  h_K = a_K
             k = max{i: u_i < h_i}, 0 if none
    extra    k < K: x ~ (a_k p_{k+1} - q_{k+1})+ / mass;  k = K: x ~ p_{K+1}
    coupled  y_i = argmax log p_i + g_i, g by absolute position; k = leading y_i = d_i; extra y_{k+1}

A request of temperature 0 keeps its drafts while they are the argmax of their row, under any rule.

Sources: token, arXiv 2211.17192 and 2302.01318; block, arXiv 2403.10444 (the capped rule of arXiv
2601.05724, "hsd", is the same rule); coupled, arXiv 2408.07978.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._launch import FLOATS, Impl, check_tensor, resolve_impl
from ..errors import ConfigError, ShapeError
from ..rng import Keys
from .reference import verify_reference
from .contract import DRAFT_NAN, EMPTY, NAN, OK, PAD, RULES, Draft, Verdict

if TYPE_CHECKING:
    from ..distribution import Sampling

__all__ = [
    "DRAFT_NAN", "EMPTY", "NAN", "OK", "PAD", "Draft", "Verdict", "verify", "verify_reference",
]  # fmt: skip


def verify(
    target_logits: torch.Tensor,
    draft: Draft,
    target_sampling: Sampling,
    keys: Keys,
    *,
    rule: str = "block",
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Verdict:
    """Judge the drafts of B requests: accepted counts, output tokens and a status per request."""
    rule = "block" if rule == "hsd" else rule
    if rule not in RULES:
        raise ConfigError(f"rule: got {rule!r}, want one of {', '.join(RULES)} or 'hsd'")
    resolve_impl("reference", target_logits.device)
    return verify_reference(
        target_logits, draft, target_sampling, keys, rule=rule, bias=bias, row_index=row_index
    )
