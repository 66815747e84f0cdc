"""Row distributions in plain torch: the specification, and the path of CPU tensors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from .contract import MAX_TEMPERATURE, MIN_TEMPERATURE, PAD, RowStats, Sampling, Status


def _work_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def bounded_reference(x: torch.Tensor, most: float) -> torch.Tensor:
    """x in 0..most; 0 for NaN."""
    return x.nan_to_num(0.0).clamp(0.0, most)


def temperature_reference(temperature: torch.Tensor) -> torch.Tensor:
    """The temperature that acts: 0 for what is not above 0, MAX_TEMPERATURE for inf."""
    bounded = bounded_reference(temperature, MAX_TEMPERATURE)
    return torch.where(bounded > 0, bounded.clamp(min=MIN_TEMPERATURE), 0.0)


def sampling_reference(sampling: Sampling) -> Sampling:
    """`sampling` with the temperatures that act."""
    return dataclasses.replace(sampling, temperature=temperature_reference(sampling.temperature))


def log_downweight_reference(downweight: torch.Tensor) -> torch.Tensor:
    """log C, of C in 0..1; -inf for NaN."""
    return bounded_reference(downweight, 1.0).log()


def log_tiny(dtype: torch.dtype) -> float:
    """log of nearly the smallest normal number: torch's exp is 100 times as slow below it."""
    return math.log(torch.finfo(dtype).tiny) + 1.0


def exp_reference(x: torch.Tensor) -> torch.Tensor:
    """exp(x), and 0 where that would underflow, or nearly."""
    floor = log_tiny(x.dtype)
    return x.clamp(min=floor).exp_().masked_fill_(x < floor, 0.0)


def log_sum_exp_reference(x: torch.Tensor) -> torch.Tensor:
    """log of the sum of exp(x) of each row; -inf for a row of -inf."""
    top = x.amax(-1)
    anchor = top.masked_fill(top == -torch.inf, 0.0)
    return exp_reference(x - anchor[..., None]).sum(-1).log_().add_(anchor)


def clean_reference(
    logits: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """z [R, V] float32 (float64 stays) with NaN and +inf as -inf, and the status [R] int32."""
    z, top, bad = load_reference(logits, bias)
    return z, status_reference(top, bad)


def load_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z [R, V] as in clean_reference, its maximum [R], and whether entries were NaN or +inf [R]."""
    z = logits.to(_work_dtype(logits)) if out is None else out.copy_(logits)
    if bias is not None:
        z = z + bias
    top = z.amax(-1)  # NaN if any entry is
    bad = ~(top < torch.inf)
    if bool(bad.any()):
        z = torch.where(z < torch.inf, z, -torch.inf)
        top = z.amax(-1)
    return z, top, bad


def status_reference(top: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """The status [R] int32 of rows of this maximum."""
    status = torch.where(top == -torch.inf, int(Status.EMPTY), int(Status.OK))
    return torch.where(bad, int(Status.NAN), status).to(torch.int32)


def argmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The first id of the largest value of each row; numpy's is thirty times as fast on a CPU."""
    return torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)


def largest_reference(z: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, in order; equal ones by id, lowest first."""
    if count == 0 or len(z) == 0:
        return z[:, :count], torch.empty((len(z), count), dtype=torch.int64, device=z.device)
    values = z.cpu().numpy()
    least = np.partition(values, values.shape[1] - count, axis=1)[:, -count]
    # A flat search is ten times as fast as one in two dimensions.
    rows, columns = np.divmod(np.flatnonzero(values >= least[:, None]), values.shape[1])
    order = np.lexsort((-values[rows, columns], rows))  # stable: ids stay in order
    first = np.searchsorted(rows, np.arange(len(values)))
    ranked = columns[order[first[:, None] + np.arange(count)]]
    ids = torch.from_numpy(ranked).to(z.device)
    return z.gather(1, ids), ids


def cutoff_reference(z: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The last kept logit and id of each row, by sorting; (-inf, -1) for rows without a filter."""
    sampling = sampling_reference(sampling)
    rows, vocab = z.shape
    unfiltered = z.new_full((rows,), -torch.inf), z.new_full((rows,), PAD, dtype=torch.int64)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return unfiltered
    # Rarely more than a few are kept: sort the largest, and more of them while the last is kept.
    width = 512
    while True:
        width = min(width, vocab)
        cutoff, cutoff_id, open_ended = _cutoff_among_largest(z, sampling, width)
        if width == vocab or not bool(open_ended.any()):
            return cutoff, cutoff_id
        width *= 8


def _cutoff_among_largest(
    z: torch.Tensor, sampling: Sampling, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cutoff_reference if less than the `width` largest are kept; else the row is open-ended."""
    rows, vocab = z.shape
    ranked, order = largest_reference(z, width)
    top = ranked[:, :1]
    temperature = sampling.temperature.to(z.dtype).clamp(min=MIN_TEMPERATURE)[:, None]
    weigh = lambda z: exp_reference((z - top) * (1.0 / temperature)).nan_to_num_(nan=0.0).double()  # noqa: E731
    rank = torch.arange(width, device=z.device)
    kept = ranked > -torch.inf
    active = torch.zeros((rows, 1), dtype=torch.bool, device=z.device)
    by_k, k = active, rank
    if sampling.top_k is not None:
        k = sampling.top_k[:, None].long()
        by_k = (k > 0) & (k < vocab)
        kept, active = kept & ((rank < k) | ~by_k), active | by_k
    if sampling.top_p is not None:
        p = sampling.top_p[:, None].double()
        on = p < 1.0
        mass = (weigh(ranked) * kept).cumsum(-1)
        total = mass[:, -1:]
        if width < vocab:
            total = torch.where(by_k, total, weigh(z).sum(-1, keepdim=True))
        before = torch.nn.functional.pad(mass, (1, 0))[:, :-1]
        kept, active = kept & ((before < p * total) | (rank == 0) | ~on), active | on
    if sampling.min_p is not None:
        p = sampling.min_p[:, None].to(z.dtype)
        on = p > 0.0
        floor = top + temperature * p.log().clamp(max=0.0)
        kept, active = kept & ((ranked >= floor) | ~on), active | on
    active &= (ranked[:, :1] > -torch.inf) & (sampling.temperature > 0)[:, None]
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    cutoff = torch.where(active, ranked.gather(1, last), -torch.inf)[:, 0]
    cutoff_id = torch.where(active, order.gather(1, last), PAD)[:, 0]
    return cutoff, cutoff_id, active & (kept[:, -1:] | (by_k & (k > width)))


def is_within_reference(
    z: torch.Tensor, ids: torch.Tensor, bound: torch.Tensor, bound_id: torch.Tensor
) -> torch.Tensor:
    """[R, N] bool: ids that rank at or above each row's boundary (bound, bound_id), both [R]."""
    return (z > bound[:, None]) | ((z == bound[:, None]) & (ids <= bound_id[:, None]))


@torch.no_grad()
def row_stats_reference(
    logits: torch.Tensor, sampling: Sampling, *, bias: torch.Tensor | None = None
) -> RowStats:
    """See `row_stats`."""
    sampling = sampling_reference(sampling)
    z, top, bad = load_reference(logits, bias)
    argmax = argmax_reference(z)
    empty, greedy = top == -torch.inf, sampling.temperature <= 0
    cutoff, cutoff_id = cutoff_reference(z, sampling)
    if sampling.top_k is not None or sampling.top_p is not None or sampling.min_p is not None:
        ids = torch.arange(z.shape[-1], device=z.device)
        kept = is_within_reference(z, ids, cutoff, cutoff_id) | greedy[:, None]
        z = torch.where(kept, z, -torch.inf)
    anchor = top.masked_fill(empty, 0.0)
    reciprocal = reciprocal_reference(sampling.temperature, z.dtype)
    log_sum = exp_reference((z - anchor[:, None]).mul_(reciprocal[:, None])).sum(-1).log_()
    log_sum = log_sum.masked_fill(empty, 0.0)
    one_hot = greedy | empty
    return RowStats(
        max=top,
        lse=anchor * reciprocal + log_sum,
        cutoff=torch.where(one_hot, top, cutoff),
        argmax=argmax,
        cutoff_id=torch.where(one_hot, argmax, cutoff_id),
        status=status_reference(top, bad),
        log_sum=log_sum,
    )


def reciprocal_reference(temperature: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 / T of the temperature that ranks: 1 for a greedy row."""
    acting = temperature_reference(temperature).to(dtype)
    return 1.0 / torch.where(acting > 0, acting, torch.ones_like(acting))


@torch.no_grad()
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
    temperature = temperature_reference(temperature)
    if ids is None:
        ids = torch.arange(z.shape[-1], device=z.device)
    column = lambda scalar: scalar[:, None]  # noqa: E731
    kept = is_within_reference(z, ids, cutoff, cutoff_id)
    reciprocal = 1.0 / temperature.to(z.dtype).clamp(min=MIN_TEMPERATURE)
    shifted = z if anchor is None else z - column(anchor)
    log_prob = shifted * column(reciprocal) - column(lse)
    if downweight is not None and scale_logit is not None and scale_id is not None:
        scaled = is_within_reference(z, ids, scale_logit, scale_id)
        log_prob = torch.where(
            scaled, log_prob + column(log_downweight_reference(downweight).to(z.dtype)), log_prob
        )
    one_hot = (column(temperature) <= 0) | (z == -torch.inf)
    return torch.where(kept, torch.where(one_hot, 0.0, log_prob), -torch.inf)
