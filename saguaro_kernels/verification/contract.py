"""What a verification takes and returns: `Draft`, `Verdict`, and the status codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..distribution import Sampling

PAD = -1
"""Fills `Draft.tokens` beyond num_draft and `Verdict.tokens` beyond the extra token."""

OK, NAN, EMPTY, DRAFT_NAN = 0, 1, 2, 3
"""Verdict.status, the highest that applies: OK; NAN: a target row held NaN or +inf; EMPTY: a target
row had no finite logit; DRAFT_NAN: a draft row was unusable. In each case the token ids are legal.
After DRAFT_NAN the law is still the target's (the token was judged as a one-hot draft); after NAN or
EMPTY there was no law to follow: the engine should end or repeat the request."""

RULES = ("token", "block", "coupled")
"""Names of the rules; "hsd" is an alias of "block"."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of B requests and the distributions they were drawn from.

    The distribution of a row is its logits as the draft model wrote them and a few scalars:
    log q(x) = (logits[x] - logits[d]) / T + logq, + log C if x is scaled, - log C if d is, for kept x.
    An id is kept iff z > cutoff, or z = cutoff and id <= cutoff_id; scaled likewise by scale_*.

    Fields:
        tokens: [B, K] int64, PAD beyond num_draft. K may be 0. Ids of the target's vocabulary.
        num_draft: [B] int32 in 0..K.
        logits: [B, K, V_draft] float, or None when every row is one-hot (n-gram, argmax, replay).
        logq: [B, K] float32, log q of each token; needed with `logits`.
        lse: [B, K] float32, log-normaliser; carried for its users, verification needs `logq` only.
        cutoff, cutoff_id: [B, K] float32 and int64, or None when the draft rows are not filtered.
        scale_logit, scale_id: [B, K] float32 and int64, with `downweight`.
        downweight: [B] float32, C of the scaled ids, or None.
        one_hot: [B] bool, requests whose tokens are deterministic proposals, or None.
        sampling: the draft's sampling, temperature [B]; a row of temperature 0 is one-hot.
        vocab_map: [V] int32, the draft's id of each target id, -1 where it has none, or None when the
            ids agree. Ids beyond V_draft, and those without a draft id, have q = 0.
    """

    tokens: torch.Tensor
    num_draft: torch.Tensor
    logits: torch.Tensor | None = None
    logq: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    cutoff: torch.Tensor | None = None
    scale_logit: torch.Tensor | None = None
    cutoff_id: torch.Tensor | None = None
    scale_id: torch.Tensor | None = None
    downweight: torch.Tensor | None = None
    one_hot: torch.Tensor | None = None
    sampling: Sampling | None = None
    vocab_map: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """num_accepted [B] int32 = k; tokens [B, K+1] int64: k accepted, the extra token, PAD; status [B]."""

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    status: torch.Tensor
