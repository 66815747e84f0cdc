"""Row distributions in plain torch: the specification, and the path of CPU tensors."""

from __future__ import annotations

import torch

from .contract import MIN_TEMPERATURE, PAD, RowStats, Sampling, Status


def _work_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def clean_reference(
    logits: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """z [R, V] float32 (float64 stays) with NaN and +inf as -inf, and the status [R] int32."""
    z = logits.to(_work_dtype(logits))
    if bias is not None:
        z = z + bias
    top = z.amax(-1)  # NaN if any entry is
    bad = ~(top < torch.inf)
    status = torch.where(top == -torch.inf, int(Status.EMPTY), int(Status.OK))
    status = torch.where(bad, int(Status.NAN), status).to(torch.int32)
    if bool(bad.any()):
        z = torch.where(z < torch.inf, z, -torch.inf)
    return z, status


def cutoff_reference(z: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The last kept logit and id of each row, by sorting; (-inf, -1) for rows without a filter."""
    rows, vocab = z.shape
    cutoff, cutoff_id = z.new_full((rows,), -torch.inf), z.new_full((rows,), PAD, dtype=torch.int64)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return cutoff, cutoff_id
    ranked, order = torch.sort(z, dim=-1, descending=True, stable=True)
    temperature = sampling.temperature.to(z.dtype).clamp(min=MIN_TEMPERATURE)[:, None]
    top = ranked[:, :1]
    weight = ((ranked - top) * (1.0 / temperature)).double().exp_().nan_to_num_(nan=0.0)
    rank = torch.arange(vocab, device=z.device)
    kept = ranked > -torch.inf
    active = torch.zeros((rows, 1), dtype=torch.bool, device=z.device)
    if sampling.top_k is not None:
        k = sampling.top_k[:, None].long()
        on = (k > 0) & (k < vocab)
        kept, active = kept & ((rank < k) | ~on), active | on
    if sampling.top_p is not None:
        p = sampling.top_p[:, None].double()
        on = p < 1.0
        mass = (weight * kept).cumsum(-1)
        before = mass - weight * kept
        kept, active = kept & ((before < p * mass[:, -1:]) | (rank == 0) | ~on), active | on
    if sampling.min_p is not None:
        p = sampling.min_p[:, None].to(z.dtype)
        on = p > 0.0
        kept, active = (
            kept & ((ranked >= top + temperature * p.log().clamp(max=0.0)) | ~on),
            active | on,
        )
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    active = active[:, 0] & kept[:, 0]
    return (
        torch.where(active, ranked.gather(1, last)[:, 0], cutoff),
        torch.where(active, order.gather(1, last)[:, 0], cutoff_id),
    )


def is_within_reference(
    z: torch.Tensor, ids: torch.Tensor, bound: torch.Tensor, bound_id: torch.Tensor
) -> torch.Tensor:
    """[R, N] bool: ids that rank at or above each row's boundary (bound, bound_id), both [R]."""
    return (z > bound[:, None]) | ((z == bound[:, None]) & (ids <= bound_id[:, None]))


def row_stats_reference(
    logits: torch.Tensor, sampling: Sampling, *, bias: torch.Tensor | None = None
) -> RowStats:
    """See `row_stats`. Sorts rows only where a filter is given."""
    z, status = clean_reference(logits, bias)
    top, argmax = z.max(-1).values, z.argmax(-1)
    empty = top == -torch.inf
    argmax = argmax.masked_fill(empty, 0)
    greedy = sampling.temperature <= 0
    cutoff, cutoff_id = cutoff_reference(z, sampling)
    ids = torch.arange(z.shape[-1], device=z.device)
    kept = is_within_reference(z, ids, cutoff, cutoff_id) | greedy[:, None]
    temperature = torch.where(greedy, 1.0, sampling.temperature).to(z.dtype)
    reciprocal = 1.0 / temperature.clamp(min=MIN_TEMPERATURE)
    scaled = (z - top[:, None]) * reciprocal[:, None]
    log_sum = torch.where(kept, scaled, -torch.inf).exp_().sum(-1).log_()
    log_sum = log_sum.masked_fill(empty, 0.0)
    one_hot = greedy | empty
    return RowStats(
        max=top,
        lse=(top * reciprocal + log_sum).masked_fill(empty, 0.0),
        cutoff=torch.where(one_hot, top, cutoff),
        argmax=argmax,
        cutoff_id=torch.where(one_hot, argmax, cutoff_id),
        status=status,
        log_sum=log_sum,
    )


def log_prob_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    cutoff: torch.Tensor,
    cutoff_id: torch.Tensor,
    lse: torch.Tensor,
    scale_logit: torch.Tensor | None = None,
    scale_id: torch.Tensor | None = None,
    downweight: torch.Tensor | None = None,
    *,
    ids: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probability of every id of each row, or of the `ids` whose logits are given.

        log q[r, x] = (z[r, x] - anchor[r]) / T[r] - lse[r] + [x scaled] log C[r],  -inf unless kept

    Args:
        logits: [R, N] with the bias added.
        temperature, cutoff, cutoff_id, lse: [R].
        scale_logit, scale_id, downweight: [R]; None where nothing is scaled.
        ids: [R, N] or [N] int64, the ids of the columns. Default: 0..N-1.
        anchor: [R], the logit that lse is relative to. Default: 0. See the module's docstring.
    Returns:
        [R, N] float32 (float64 for float64 logits); greedy rows are 0 on their one id, else -inf.
    """
    z = logits.to(_work_dtype(logits))
    z = torch.where(z < torch.inf, z, -torch.inf)
    if ids is None:
        ids = torch.arange(z.shape[-1], device=z.device)
    column = lambda scalar: scalar[:, None]  # noqa: E731
    kept = is_within_reference(z, ids, cutoff, cutoff_id)
    reciprocal = 1.0 / temperature.to(z.dtype).clamp(min=MIN_TEMPERATURE)
    shifted = z if anchor is None else z - column(anchor)
    log_prob = shifted * column(reciprocal) - column(lse)
    if downweight is not None and scale_logit is not None and scale_id is not None:
        scaled = is_within_reference(z, ids, scale_logit, scale_id)
        log_prob = torch.where(scaled, log_prob + column(downweight.to(z.dtype).log()), log_prob)
    one_hot = (column(temperature) <= 0) | (z == -torch.inf)
    return torch.where(kept, torch.where(one_hot, 0.0, log_prob), -torch.inf)
