"""Torch reference of outcome prediction: the CPU path, and the specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .._launch import LARGE
from ..distribution import PAD, Sampling
from ..distribution.reference import bounded_reference, log_sum_exp_reference, sampling_reference
from ..rng import Keys, Stream, gumbel_reference

NOISE_FROM_TEMPERATURE = 0.5
"""ranking="auto" uses the noise from here on; below it rarely changes the order."""
COLDEST = 1e-20
"""Lower temperatures rank as this one, so that z / T stays finite."""
LARGEST = 3.4e38
"""Larger quotients z / T rank as this one, for the same reason."""
Ranking = Literal["auto", "probability", "noise", "coupled"]
Allocation = Literal["auto", "best", "uniform"]


@dataclass(frozen=True)
class Outcomes:
    """M predicted outcomes a request: by depth, best first within a depth, unused ones last."""

    depth: torch.Tensor
    """[B, M] int32: accepted drafts k, PAD where unused."""
    tokens: torch.Tensor
    """[B, M] int64: the extra token, PAD where unused."""
    score: torch.Tensor
    """[B, M] float32: log of the weight (P(k) = 1 without accept_prob), -inf where unused."""


@torch.no_grad()
def predict_outcomes_reference(
    draft_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    sampling: Sampling,
    keys: Keys,
    *,
    branches: int,
    fan_out: torch.Tensor | None = None,
    accept_prob: torch.Tensor | None = None,
    cutoff: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    ranking: Ranking = "auto",
    allocation: Allocation = "auto",
) -> Outcomes:
    """See `predict_outcomes`; one request after another."""
    batch, rows, vocab = draft_logits.shape
    num_draft = num_draft.clamp(0, rows - 1)
    sampling = sampling_reference(sampling)
    device = draft_logits.device
    best = resolve_allocation(allocation, fan_out, accept_prob) == "best"
    depth = torch.full((batch, branches), PAD, dtype=torch.int32, device=device)
    tokens = torch.full((batch, branches), PAD, dtype=torch.int64, device=device)
    score = torch.full((batch, branches), -torch.inf, dtype=torch.float32, device=device)
    bias = None if bias is None else bias.expand(batch, rows, vocab)
    noise, noise_row = _noise(sampling.temperature, keys, ranking, rows, vocab, ids)
    for b, last in enumerate(num_draft.tolist()):
        used = slice(0, last + 1)
        scores = _scores(
            draft_logits[b, used],
            _columns(draft_tokens[b, :last], ids),
            float(sampling.temperature[b]),
            None if noise_row[b] < 0 else noise[noise_row[b], used],
            None if cutoff is None else cutoff[b, used],
            None if bias is None else bias[b, used],
        )
        log_prob = torch.zeros(last + 1, dtype=torch.float32, device=device)
        if accept_prob is not None:
            log_prob = _fold_tail(bounded_reference(accept_prob[b].float(), LARGE), last).log()
        log_prob = log_prob - log_sum_exp_reference(scores)
        if fan_out is not None:
            given = fan_out.expand(batch, rows)[b].clamp(0, branches)
            counts = _fold_tail(given, last).tolist()
        else:
            counts = uniform_fan_out(branches, last)
        width = min(branches, vocab)
        found = [
            _top(row, width if best else min(width, counts[k])) for k, row in enumerate(scores)
        ]
        weights = [log_prob[k] + values for k, (values, _) in enumerate(found)]
        if best:
            counts = _best_counts(weights, branches)
        first = 0
        for k, count in enumerate(counts):
            end = min(first + min(count, len(weights[k])), branches)
            depth[b, first:end] = k
            columns = found[k][1][: end - first]
            tokens[b, first:end] = columns if ids is None else ids[columns]
            score[b, first:end] = weights[k][: end - first]
            first = end
    return Outcomes(depth, tokens, score)


def resolve_allocation(allocation: str, fan_out: object, accept_prob: object) -> str:
    """ "auto": the given fan_out, else the best by accept_prob, else uniform."""
    if allocation != "auto":
        return allocation
    return "best" if fan_out is None and accept_prob is not None else "uniform"


def uniform_fan_out(branches: int, num_draft: int) -> list[int]:
    """Equal shares of k = 0..num_draft; what is left over goes to the largest k, one each."""
    share, left = divmod(branches, num_draft + 1)
    return [share + (k > num_draft - left) for k in range(num_draft + 1)]


def _fold_tail(values: torch.Tensor, last: int) -> torch.Tensor:
    """Entries k > num_draft count for k = num_draft: that is where those outcomes end up."""
    return torch.cat((values[:last], values[last:].sum(0, keepdim=True)))


def _columns(tokens: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The columns of tokens, -1 where they have none."""
    if ids is None:
        return tokens
    column = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[column] == tokens, column, -1)


def _scores(
    logits: torch.Tensor,
    drafted: torch.Tensor,
    temperature: float,
    noise: torch.Tensor | None,
    cutoff: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """z / T + g of rows 0..num_draft, -inf where an id is no candidate: [rows, V] float32."""
    scores = logits.float() if bias is None else logits.float() + bias
    scores = torch.where(scores < torch.inf, scores, -torch.inf)  # NaN and +inf: no candidates
    if cutoff is not None:
        scores.masked_fill_(~(scores >= cutoff[:, None]), -torch.inf)
    if temperature > 0:
        scores *= 1.0 / max(temperature, COLDEST)
    scores.clamp_(max=LARGEST)
    if noise is not None:
        scores += noise
    row = torch.arange(len(scores) - 1, device=logits.device)
    named = (drafted >= 0) & (drafted < scores.shape[1])
    scores[row[named], drafted[named]] = -torch.inf
    return scores


def _noise(
    temperature: torch.Tensor,
    keys: Keys,
    ranking: str,
    rows: int,
    vocab: int,
    ids: torch.Tensor | None,
) -> tuple[torch.Tensor, list[int]]:
    """Noise [N, rows, V] of the requests that rank with it, and each request's n, -1 for none."""
    coldest = NOISE_FROM_TEMPERATURE if ranking == "auto" else 0.0
    noisy = (temperature > 0) & (temperature >= coldest) & (ranking != "probability")
    index = torch.where(noisy, noisy.cumsum(0) - 1, -1).tolist()
    base = keys.base[noisy].repeat_interleave(rows)
    offset = torch.arange(rows, device=base.device).repeat(len(base) // rows)
    stream = Stream.COUPLED if ranking == "coupled" else Stream.EXTRA
    drawn = Keys(keys.seed[noisy].repeat_interleave(rows), base)
    if not len(base):
        return temperature.new_empty(0, rows, vocab), index
    noise = gumbel_reference(drawn, offset, stream, vocab if ids is None else int(ids[-1]) + 1)
    return (noise if ids is None else noise[:, ids]).view(-1, rows, vocab), index


def _top(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best of one row, of equal ones the lowest ids; fewer if fewer are allowed."""
    values, ids = scores.topk(min(width + 1, scores.numel()))
    if values.numel() > width > 0 and values[width - 1] == values[width]:  # a tie at the boundary
        ids = (scores >= values[width]).nonzero()[:, 0]
    ids = ids.sort().values
    values, order = scores[ids].sort(descending=True, stable=True)
    allowed = values[:width] > -torch.inf
    return values[:width][allowed], ids[order[:width]][allowed]


def _best_counts(weights: list[torch.Tensor], branches: int) -> list[int]:
    """How many each depth has among the best of all; of equal weights the lowest depth first."""
    owner = torch.repeat_interleave(torch.tensor([len(row) for row in weights], device="cpu"))
    flat = torch.cat(weights).cpu()
    best = flat.sort(descending=True, stable=True).indices[:branches]
    best = best[flat[best] > -torch.inf]
    return torch.bincount(owner[best], minlength=len(weights)).tolist()
