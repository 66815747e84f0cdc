"""Which verification outcomes (k, extra) to draft for: the most promising ones of all rows at once.

Row k of the draft's logits predicts the extra token of "k drafts accepted". The drafted token d_{k+1} is
excluded for k < num_draft (it was accepted, or the residual is without it), nothing for k = num_draft.

    score[k, x]  = z[k, x] / T + g[k, x]
    weight[k, x] = P(k) * exp(score[k, x]) / sum over allowed x' of exp(score[k, x'])

The verifier draws the extra token by Gumbel-argmax under the stream EXTRA at offset k. With "noise" the
drafter ranks with those very g, so it predicts the dice as well as the distribution; with "coupled" g is
the stream COUPLED; with "probability" g = 0. T = 0 ranks by the raw logits. This decides which branches
are prepared and nothing else, so it cannot change the law of the output.

`allocate_fan_out` splits a budget by Theorem 12 of arXiv 2603.03251, generalised to any accept law:
F_k proportional to P(k)^(1 / (1 + r)) for a miss probability that falls as F^-r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .rng import Keys, Stream, gumbel_reference

PAD = -1
NOISE_FROM_TEMPERATURE = 0.5
"""ranking="auto": noise-aware from here on; below, the noise is too small to change the order."""
Ranking = Literal["auto", "probability", "noise", "coupled"]
Allocation = Literal["auto", "best", "uniform"]


@dataclass(frozen=True)
class Outcomes:
    """M predicted outcomes per request, by depth, best first within a depth, unused ones at the end."""

    depth: torch.Tensor
    """[B, M] int32: accepted drafts k, PAD where unused."""
    tokens: torch.Tensor
    """[B, M] int64: the extra token, PAD where unused."""
    score: torch.Tensor
    """[B, M] float32: log of the weight (P(k) = 1 without accept_prob), -inf where unused."""


def allocate_fan_out_reference(
    accept_hist: torch.Tensor, branches: int, r: float | torch.Tensor
) -> torch.Tensor:
    hist = accept_hist.double().clamp(min=0)
    hist = torch.where(hist.sum(-1, keepdim=True) > 0, hist, 1.0)
    power = 1.0 / (1.0 + torch.as_tensor(r, dtype=torch.float64, device=hist.device))
    share = (hist / hist.sum(-1, keepdim=True)) ** power[..., None]
    share = branches * share / share.sum(-1, keepdim=True)
    # Largest remainders get the branches that rounding down left over; ties to the smallest k.
    fan_out = share.floor()
    left = branches - fan_out.sum(-1, keepdim=True)
    order = (share - fan_out).sort(dim=-1, descending=True, stable=True).indices
    rank = order.sort(dim=-1).indices
    return (fan_out + (rank < left)).to(torch.int32)


def predict_outcomes_reference(
    draft_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    sampling,
    keys: Keys,
    *,
    branches: int,
    fan_out: torch.Tensor | None = None,
    accept_prob: torch.Tensor | None = None,
    cutoff: torch.Tensor | None = None,
    ranking: Ranking = "auto",
    allocation: Allocation = "auto",
) -> Outcomes:
    batch, rows, _ = draft_logits.shape
    device = draft_logits.device
    allocation = resolve_allocation(allocation, fan_out, accept_prob)
    depth = torch.full((batch, branches), PAD, dtype=torch.int32, device=device)
    tokens = torch.full((batch, branches), PAD, dtype=torch.int64, device=device)
    score = torch.full((batch, branches), float("-inf"), device=device)
    for b in range(batch):
        last = int(num_draft[b])
        row_keys = Keys(keys.seed[b : b + 1], keys.base[b : b + 1])
        scores = _row_scores(
            draft_logits[b, : last + 1], draft_tokens[b], float(sampling.temperature[b]),
            row_keys, None if cutoff is None else cutoff[b], ranking,
        )  # fmt: skip
        log_prob = torch.zeros(last + 1, device=device)
        if accept_prob is not None:
            log_prob = _fold_tail(accept_prob[b].float(), last).log()
        log_prob = log_prob - scores.logsumexp(-1)
        if fan_out is not None:
            counts = _fold_tail(fan_out.expand(batch, rows)[b], last).tolist()
        else:
            counts = uniform_fan_out(branches, last)
        width = branches if allocation == "best" else max(counts)
        found = [_top(row, width) for row in scores]
        weights = [log_prob[k] + values for k, (values, _) in enumerate(found)]
        if allocation == "best":
            counts = _best_counts(weights, branches)
        used = 0
        for k, count in enumerate(counts):
            stop = min(used + count, used + len(weights[k]), branches)
            depth[b, used:stop] = k
            tokens[b, used:stop] = found[k][1][: stop - used]
            score[b, used:stop] = weights[k][: stop - used]
            used = stop
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


def _row_scores(logits, draft_tokens, temperature, keys, cutoff, ranking) -> torch.Tensor:
    """z / T + g of rows 0..num_draft, -inf where an id cannot be a candidate: [rows, V] float32."""
    rows, vocab = logits.shape
    scores = logits.float()
    if cutoff is not None:
        scores = scores.masked_fill(scores < cutoff[:rows, None], float("-inf"))
    scores = scores - scores.nan_to_num(float("-inf")).amax(-1, keepdim=True).clamp(min=-3e38)
    if temperature > 0:
        scores /= temperature
        if ranking == "auto":
            ranking = "noise" if temperature >= NOISE_FROM_TEMPERATURE else "probability"
        if ranking != "probability":
            stream = Stream.EXTRA if ranking == "noise" else Stream.COUPLED
            offsets = torch.arange(rows, device=logits.device)
            keys = Keys(keys.seed.expand(rows), keys.base.expand(rows))
            scores += gumbel_reference(keys, offsets, stream, vocab)
    index = torch.arange(rows - 1, device=logits.device)
    scores[index, draft_tokens[: rows - 1]] = float("-inf")
    return scores.nan_to_num_(float("-inf"), float("inf"), float("-inf"))


def _top(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best of one row, of equal ones the lowest ids first; fewer if fewer are allowed."""
    values, ids = scores.topk(min(width + 1, scores.numel()))
    if (
        values.numel() > width > 0 and values[width - 1] == values[width]
    ):  # a tie across the boundary
        ids = (scores >= values[width]).nonzero()[:, 0]
    ids = ids.sort().values
    values, order = scores[ids].sort(descending=True, stable=True)
    allowed = values[:width] > float("-inf")
    return values[:width][allowed], ids[order[:width]][allowed]


def _best_counts(weights: list[torch.Tensor], branches: int) -> list[int]:
    """How many each depth has among the best of all; of equal weights the lowest depth first."""
    owner = torch.repeat_interleave(torch.tensor([len(row) for row in weights]))
    best = torch.cat(weights).sort(descending=True, stable=True).indices[:branches]
    return torch.bincount(owner[best.cpu()], minlength=len(weights)).tolist()


def predict_outcomes(
    draft_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    sampling,
    keys: Keys,
    *,
    branches: int,
    fan_out: torch.Tensor | None = None,
    accept_prob: torch.Tensor | None = None,
    cutoff: torch.Tensor | None = None,
    ranking: Ranking = "auto",
    allocation: Allocation = "auto",
    impl: str = "auto",
) -> Outcomes:
    return predict_outcomes_reference(
        draft_logits,
        draft_tokens,
        num_draft,
        sampling,
        keys,
        branches=branches,
        fan_out=fan_out,
        accept_prob=accept_prob,
        cutoff=cutoff,
        ranking=ranking,
        allocation=allocation,
    )


def allocate_fan_out(
    accept_hist: torch.Tensor, branches: int, r: float | torch.Tensor, impl: str = "auto"
) -> torch.Tensor:
    return allocate_fan_out_reference(accept_hist, branches, r)
