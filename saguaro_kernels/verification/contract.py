"""What a verification takes and returns: `Draft`, `Verdict`, and the names of the rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..distribution import Sampling

RULES = ("token", "block", "coupled")
"""Names of the rules; "hsd" is an alias of "block"."""

DRAFT_NAN = 3
"""Verdict.status beside those of `Status`: a draft row was unusable, see `Verdict`."""

MASS_FLOOR = 2.0**-18
"""A residual of less mass is the rounding of p == q; the extra token is then drawn from p."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of B requests and the distributions they were drawn from.

    The distribution of a row is its logits, as the draft model wrote them, and a few scalars; see
    `saguaro_kernels.distribution`. The fields are those that `saguaro_sample` returns:

        log q(x) = (z[x] - z[d]) / T + log q(d), + log C if x is scaled, - log C if d is; x kept

    Fields:
        tokens: [B, K] int64 ids of the target's vocabulary, PAD beyond num_draft. K may be 0. An id
            outside the vocabulary is a draft that is rejected.
        num_draft: [B] int32, clamped to 0..K.
        logits: [B, K, V_draft], or None when every row is one-hot (n-gram, argmax, replay).
            Ids at and beyond V_draft have q = 0.
        logq: [B, K] float32, log q of each token; needed with `logits`.
        lse: [B, K] float32; carried along, a verification needs only `logq`.
        cutoff, cutoff_id: [B, K] float32 and int64; None when the draft is not filtered.
        scale_logit, scale_id, downweight: [B, K] float32, [B, K] int64, [B] float32; None at C = 1.
        one_hot: [B] bool, requests whose tokens are deterministic proposals; None for none.
        sampling: temperature [B]; needed with `logits`. A row of temperature 0 is one-hot.
        bias: [B, K, V_draft] float32 that was added to `logits` before sampling, or None.
        vocab_map: [V] int32, the draft's id of each target id, -1 (q = 0) where it has none; None
            when the ids are the same.
        row_index: [B, K] int64, where the rows lie in flat `logits` [N, V_draft]; None for padded.
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
    bias: torch.Tensor | None = None
    vocab_map: torch.Tensor | None = None
    row_index: torch.Tensor | None = None


DRAFT_TENSORS = (
    "tokens", "num_draft", "logits", "logq", "cutoff", "cutoff_id", "scale_logit", "scale_id",
    "downweight", "one_hot", "bias", "vocab_map", "row_index",
)  # fmt: skip
"""The fields of a Draft in the order of the registered op, which then takes its temperature."""


@dataclass(frozen=True)
class Inputs:
    """What the contracts of other engines add: see `saguaro_kernels.compat`.

    Fields:
        target_probs, draft_probs: the rows hold probabilities, which count by their measured mass.
            `Draft.logq` is then log q of the token after division by the mass.
        bonus_tokens: [B] int64, emitted after a whole chain instead of drawing from a bonus row.
        num_passing: out [B] int32, drafts that pass their own test, whatever came before them.
    """

    target_probs: bool = False
    draft_probs: bool = False
    bonus_tokens: torch.Tensor | None = None
    num_passing: torch.Tensor | None = None


NO_INPUTS = Inputs()
"""Logits on both sides, the bonus token drawn."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of each request.

    Fields:
        num_accepted: [B] int32, k.
        tokens: [B, K+1] int64: the k accepted tokens, the extra token, then PAD.
        status: [B] int32. OK; NAN or EMPTY: a target row that was read held NaN or +inf, or no
            finite logit. Its draft was rejected and the extra token is a legal id, but the row
            defines no distribution: end or repeat the request. DRAFT_NAN: a draft row was unusable
            and its token was judged as a one-hot draft; the output still has the target's
            distribution, but the drafter needs attention.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    status: torch.Tensor
