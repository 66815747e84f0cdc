"""Batched sampling of rows: plain, or with the F largest ids scaled by C ("downweight").

    token = argmax over x of log q(x) + g(x),    g: Gumbel noise keyed by seed, base, offset, stream, x

A sampled row is the argmax of log q + noise, so one pass over the row gives the token, its log q,
the row's lse and the largest ids, which are also the candidates of outcome prediction.

Source: Gumbel-max, Maddison et al. 1411.0030; C is Definition 14 of 2603.03251.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._launch import resolve_impl
from .distribution import (
    PAD,
    Sampling,
    clean_reference,
    is_within_reference,
    log_prob_reference,
    row_stats_reference,
)
from .errors import ConfigError, UnsupportedError
from .rng import Keys, Stream, gumbel_reference


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


def saguaro_sample_reference(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Keys,
    *,
    offset: torch.Tensor | int,
    stream: Stream = Stream.DRAFT,
    top_f: int = 0,
    scale_f: int = 0,
    downweight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Sample:
    """See `saguaro_sample`."""
    rows, vocab = logits.shape
    stats = row_stats_reference(logits, sampling, bias=bias)
    z, _ = clean_reference(logits, bias)
    ids = torch.arange(vocab, device=z.device)
    greedy = sampling.temperature <= 0
    one_hot = greedy | (stats.max == -torch.inf)

    # Candidates: kept ids of sampled rows, all ids of greedy ones.
    kept = is_within_reference(z, ids, stats.cutoff, stats.cutoff_id)
    pool = torch.where(kept | greedy[:, None], z, -torch.inf)
    ranked, order = torch.sort(pool, dim=-1, descending=True, stable=True)
    top_logits = z.new_full((rows, top_f), -torch.inf)
    top_ids = order.new_full((rows, top_f), PAD)
    width = min(top_f, vocab)
    top_logits[:, :width] = ranked[:, :width]
    top_ids[:, :width] = order[:, :width].masked_fill(ranked[:, :width] == -torch.inf, PAD)

    scale_logit, scale_id = z.new_full((rows,), torch.inf), order.new_full((rows,), PAD)
    lse, log_sum = stats.lse, stats.log_sum
    if downweight is not None and 0 < scale_f < vocab:
        use = (ranked[:, scale_f] > -torch.inf) & ~one_hot
        scale_logit = torch.where(use, ranked[:, scale_f - 1], scale_logit)
        scale_id = torch.where(use, order[:, scale_f - 1], scale_id)
        zero = torch.zeros_like(log_sum)
        scaled = log_prob_reference(
            z,
            sampling.temperature,
            stats.cutoff,
            stats.cutoff_id,
            zero,
            scale_logit,
            scale_id,
            downweight,
            anchor=stats.max,
        )
        shrink = scaled.logsumexp(-1) - log_sum
        log_sum = torch.where(use, log_sum + shrink, log_sum)
        lse = torch.where(use, lse + shrink, lse)

    anchor = torch.where(one_hot, 0.0, stats.max)
    log_q = log_prob_reference(
        z,
        sampling.temperature,
        stats.cutoff,
        stats.cutoff_id,
        log_sum,
        scale_logit,
        scale_id,
        downweight,
        anchor=anchor,
    )
    tokens = stats.argmax
    if not bool(one_hot.all()):
        noise = gumbel_reference(keys, offset, stream, vocab)
        tokens = torch.where(one_hot, tokens, (log_q + noise).argmax(-1))
    return Sample(
        tokens=tokens,
        logq=log_q.gather(1, tokens[:, None])[:, 0],
        lse=lse,
        cutoff=stats.cutoff,
        scale_logit=scale_logit,
        cutoff_id=stats.cutoff_id,
        scale_id=scale_id,
        top_ids=top_ids,
        top_logits=top_logits,
        status=stats.status,
    )


def saguaro_sample(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Keys,
    *,
    offset: torch.Tensor | int,
    stream: Stream = Stream.DRAFT,
    top_f: int = 0,
    scale_f: int = 0,
    downweight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scheme: str = "plain",
    impl: str = "auto",
) -> Sample:
    """Draw one token per row, and describe the distribution it was drawn from."""
    if scheme not in ("plain", "downweight"):
        raise ConfigError(f"scheme: got {scheme!r}, want 'plain' or 'downweight'")
    if resolve_impl(impl, logits.device) == "triton" and logits.device.type == "cuda":
        raise UnsupportedError("impl='triton': not built yet; use impl='reference'")
    if scheme == "plain":
        scale_f, downweight = 0, None
    return saguaro_sample_reference(
        logits,
        sampling,
        keys,
        offset=offset,
        stream=stream,
        top_f=top_f,
        scale_f=scale_f,
        downweight=downweight,
        bias=bias,
    )
