"""A row's distribution: its logits, as the model wrote them, and a few scalars.

    z      = logits + bias                   invalid entries (NaN, +inf) count as -inf, see status
    kept   : z > cutoff, or z == cutoff and id <= cutoff_id
    scaled : z > scale_logit, or z == scale_logit and id <= scale_id         the F largest kept ids
    log q  = z / T - lse + [scaled] log C        for kept ids, else -inf

Filters apply in this order: temperature, top-k, top-p (smallest prefix of mass >= p), min-p
(relative to the maximum), then C. Equal logits rank by id, the lowest first, so that exactly k ids
are kept. Nothing of the vocabulary's size is ever written: whoever needs q reads the row again.

Temperature 0 is greedy: one-hot on the argmax (cutoff = max, cutoff_id = argmax, log q = 0 there);
filters do not matter, and lse is that of the unfiltered row at T = 1, which ranks the runners-up.
A row without a finite logit is one-hot on id 0, by the same formula: cutoff = -inf, cutoff_id = 0.

z / T - lse cancels at tiny temperatures (z = 30, T = 1e-5: half an ulp is 0.1). Whoever knows the
log-probability of one id near the top passes its logit as `anchor` and lse = -log q(id): z - anchor
is exact. row_stats gives (max, log_sum), a drawn token (its logit, -logq + [scaled] log C).

Source: top-p Holtzman et al. 1904.09751; min-p Nguyen et al. 2407.01082; C is Definition 14 of
"Speculative Speculative Decoding", 2603.03251.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PAD = -1
"""Stands for "no token" wherever ids are stored."""

MIN_TEMPERATURE = 1e-30
"""Positive temperatures below this act as this one, so that 1 / T stays finite."""


class Status(enum.IntEnum):
    """What a row of logits was; every row gets a legal id whatever it is."""

    OK = 0
    NAN = 1
    """NaN or +inf somewhere: those entries were taken as -inf."""
    EMPTY = 2
    """No finite logit and no NaN: the row acts as one-hot on id 0."""


@dataclass(frozen=True)
class Sampling:
    """Per row: temperature [R] float32 >= 0 (0 is greedy) and optional filters.

    top_k [R] int32 (<= 0: off), top_p [R] float32 (>= 1: off), min_p [R] float32 (<= 0: off).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


@dataclass(frozen=True)
class RowStats:
    """Per row: max, lse, cutoff [R] float32, argmax, cutoff_id [R] int64, status [R] int32.

    log_sum [R] float32 is lse relative to max (lse = max / T + log_sum), exact at any temperature.
    """

    max: torch.Tensor
    lse: torch.Tensor
    cutoff: torch.Tensor
    argmax: torch.Tensor
    cutoff_id: torch.Tensor
    status: torch.Tensor
    log_sum: torch.Tensor


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
        kept, active = kept & ((ranked >= top + temperature * p.log()) | ~on), active | on
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


@triton.jit
def _load_logits(ptr, bias_ptr, mask, HAS_BIAS: tl.constexpr):
    """z in float32; masked lanes are -inf. NaN and +inf pass: the caller counts and cleans them."""
    z = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def _clean(z):
    """NaN and +inf become -inf."""
    return tl.where(z < float("inf"), z, float("-inf"))


@triton.jit
def _is_within(z, ids, bound, bound_id):
    """True for ids that rank at or above the boundary (bound, bound_id)."""
    return (z > bound) | ((z == bound) & (ids <= bound_id))


@triton.jit
def _row_log_prob(
    z, ids, temperature, anchor, lse, cutoff, cutoff_id, scale_logit, scale_id, log_scale
):
    """log q of a tile of cleaned z (bias added), as log_prob_reference; lse is relative to anchor.

    Scalars, or tensors that broadcast. Unfiltered: cutoff = -inf, cutoff_id = -1. Nothing scaled:
    scale_logit = inf, scale_id = -1. log_scale = log C (-inf allowed).
    """
    kept = _is_within(z, ids, cutoff, cutoff_id)
    reciprocal = 1.0 / tl.maximum(temperature, 1e-30)
    log_prob = (z - anchor) * reciprocal - lse
    log_prob += tl.where(_is_within(z, ids, scale_logit, scale_id), log_scale, 0.0)
    one_hot = (temperature <= 0.0) | (z == float("-inf"))
    return tl.where(kept, tl.where(one_hot, 0.0, log_prob), float("-inf"))
