"""Sampling in plain torch: the specification, and the path of CPU tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..distribution import Sampling
from ..distribution.contract import PAD
from ..distribution.reference import (
    argmax_reference,
    cutoff_reference,
    is_within_reference,
    largest_reference,
    load_reference,
    log_downweight_reference,
    log_tiny,
    reciprocal_reference,
    sampling_reference,
    status_reference,
)
from ..rng import Keys, Stream, distinct_gumbel_reference
from .contract import Sample

_PART_LOGITS = 1 << 18
"""Rows are drawn in parts of this size, which a core's cache holds: twice as fast on a CPU."""


@torch.no_grad()
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
    ids: torch.Tensor | None = None,
) -> Sample:
    """See `saguaro_sample`. float64 logits are drawn in float64; greedy rows draw no noise."""
    sampling = sampling_reference(sampling)
    rows, vocab = logits.shape
    temperature = sampling.temperature
    greedy = temperature <= 0
    if not 0 < scale_f < vocab:
        downweight = None  # scaling every id changes nothing
    count = min(max(top_f, 0 if downweight is None else scale_f + 1), vocab)
    noise, noise_row = _noise(keys, offset, stream, vocab, greedy, ids)
    reciprocal = reciprocal_reference(temperature, torch.promote_types(logits.dtype, torch.float32))
    part_rows = min(max(1, _PART_LOGITS // vocab), rows)
    # Written again by every part: fresh memory would cost more than what is done in it.
    buffers = logits.new_empty((2, part_rows, vocab), dtype=reciprocal.dtype)
    parts = []
    for start in range(0, max(rows, 1), max(part_rows, 1)):
        per_row: list[Any] = [
            None if value is None else value[start : start + part_rows]
            for value in (
                logits, *vars(sampling).values(), reciprocal, noise_row, downweight, bias
            )
        ]  # fmt: skip
        drawn = _draw(*per_row, noise=noise, count=count, scale_f=scale_f, buffers=buffers)
        parts.append(drawn)
    top, bad, cutoff, cutoff_id, ranked, order, log_sum, token, log_token = (
        torch.cat(field) for field in zip(*parts, strict=True)
    )
    empty = top == -torch.inf
    one_hot = greedy | empty
    log_sum, token = log_sum.masked_fill(empty, 0.0), token.masked_fill(empty, 0)
    scale_logit, scale_id = torch.full_like(top, torch.inf), torch.full_like(token, PAD)
    if downweight is not None:
        scaled = (ranked[:, scale_f] > -torch.inf) & ~greedy
        scale_logit = torch.where(scaled, ranked[:, scale_f - 1], scale_logit)
        scale_id = torch.where(scaled, order[:, scale_f - 1], scale_id)
    pad = (0, max(0, top_f - vocab))
    top_logits = torch.nn.functional.pad(ranked[:, :top_f], pad, value=-torch.inf)
    named = order if ids is None else ids[order]
    top_ids = torch.nn.functional.pad(named[:, :top_f], pad, value=PAD)
    return Sample(
        tokens=token if ids is None else ids[token],
        logq=(log_token - log_sum).masked_fill(one_hot, 0.0),
        lse=top.masked_fill(empty, 0.0) * reciprocal + log_sum,
        cutoff=torch.where(one_hot, top, cutoff),
        scale_logit=scale_logit,
        cutoff_id=torch.where(one_hot, token, cutoff_id),
        scale_id=scale_id,
        top_ids=top_ids.masked_fill(top_logits == -torch.inf, PAD),
        top_logits=top_logits,
        status=status_reference(top, bad),
    )


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    reciprocal: torch.Tensor,
    noise_row: torch.Tensor,
    downweight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    noise: torch.Tensor,
    count: int,
    scale_f: int,
    buffers: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Of a few rows: maximum, bad, cut, `count` largest, normaliser, token and its log-weight."""
    z, weight = buffers[:, : len(logits)]
    z, top, bad = load_reference(logits, bias, z)
    greedy, lowest, tiny = temperature <= 0, torch.finfo(z.dtype).min, log_tiny(z.dtype)
    cutoff, cutoff_id = cutoff_reference(z, Sampling(temperature, top_k, top_p, min_p))
    if top_k is not None or top_p is not None or min_p is not None:
        ids = torch.arange(z.shape[1], device=z.device)
        kept = is_within_reference(z, ids, cutoff, cutoff_id) | greedy[:, None]
        z = torch.where(kept, z, -torch.inf)
    ranked, order = largest_reference(z, count)
    # Log-weights relative to the maximum; a greedy row's are those of T = 1. z is not needed again.
    torch.sub(z, top.clamp(min=lowest)[:, None], out=weight).mul_(reciprocal[:, None])
    if downweight is None:
        log_sum = torch.clamp(weight, min=tiny, out=z).exp_().sum(-1).log_()
    else:
        scaled = (ranked[:, scale_f] > -torch.inf) & ~greedy
        log_scale = torch.where(scaled, log_downweight_reference(downweight).to(z.dtype), 0.0)
        log_scale.clamp_(min=lowest)  # times 0 below
        weight.scatter_add_(1, order[:, :scale_f], log_scale[:, None].expand(-1, scale_f))
        largest = weight.amax(-1).clamp(min=lowest)
        shifted = torch.sub(weight, largest[:, None], out=z).clamp_(min=tiny)
        log_sum = shifted.exp_().sum(-1).log_().add_(largest)
    for score, i in zip(weight, noise_row.tolist(), strict=True):
        if i >= 0:
            score += noise[i]
    token = argmax_reference(weight)
    z_token = logits.gather(1, token[:, None]).to(z.dtype)
    if bias is not None:
        z_token += bias.gather(1, token[:, None])
    log_token = (z_token[:, 0] - top) * reciprocal
    if downweight is not None:
        log_token += log_scale * (order[:, :scale_f] == token[:, None]).any(1)
    return top, bad, cutoff, cutoff_id, ranked, order, log_sum, token, log_token


def _noise(
    keys: Keys,
    offset: torch.Tensor | int,
    stream: Stream,
    vocab: int,
    greedy: torch.Tensor,
    ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise [D, V] of the distinct keys of the rows that draw, and each row's: [R], -1 for none."""
    row = torch.full(greedy.shape, -1, device=greedy.device)
    random = torch.nonzero(~greedy)[:, 0]
    if not len(random):
        return torch.empty((0, vocab), device=row.device), row
    offset = offset[random] if isinstance(offset, torch.Tensor) else offset
    random_keys = Keys(keys.seed[random], keys.base[random])
    if ids is not None and vocab:
        vocab = int(ids[-1]) + 1
    noise, row[random] = distinct_gumbel_reference(random_keys, offset, stream, vocab)
    return noise if ids is None else noise[:, ids], row
