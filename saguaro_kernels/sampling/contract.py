"""What a draw returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """What drawing a row gives; with the row's logits it describes q exactly (see `distribution`).

    tokens [R] int64; logq, lse, cutoff, scale_logit [R] float32; cutoff_id, scale_id [R] int64;
    top_ids [R, F] int64 (PAD where fewer are kept), top_logits [R, F] float32 (bias added, -inf
    there); status [R] int32 (`Status`).
    """

    tokens: torch.Tensor
    logq: torch.Tensor
    lse: torch.Tensor
    cutoff: torch.Tensor
    scale_logit: torch.Tensor
    cutoff_id: torch.Tensor
    scale_id: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    status: torch.Tensor
