"""Verification in plain torch: the specification of the rules, and the path of CPU tensors."""

from __future__ import annotations

import dataclasses

import torch

from ..distribution import (
    MIN_TEMPERATURE,
    PAD,
    Sampling,
    Status,
    clean_reference,
    cutoff_reference,
    is_within_reference,
    log_prob_reference,
    sampling_reference,
)
from ..distribution.reference import exp_reference, log_downweight_reference
from ..rng import Keys, Stream, gumbel_reference, uniform_reference
from .contract import DRAFT_NAN, MASS_FLOOR, NO_INPUTS, Draft, Inputs, Verdict


@torch.no_grad()
def verify_reference(
    target_logits: torch.Tensor,
    draft: Draft,
    target_sampling: Sampling,
    keys: Keys,
    *,
    rule: str = "block",
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    inputs: Inputs = NO_INPUTS,
    uniforms: torch.Tensor | None = None,
) -> Verdict:
    """`verify` in plain torch; float64 logits stay float64. `uniforms` [B, K] injects u."""
    rule = "block" if rule == "hsd" else rule
    draft = _settled(draft)
    target_sampling = sampling_reference(target_sampling)
    tokens, device = draft.tokens, draft.tokens.device
    num_requests, num_steps = tokens.shape
    rows = _TargetRows(target_logits, target_sampling, bias, row_index, inputs)
    step = torch.arange(num_steps, device=device)
    judged = step < draft.num_draft[:, None]
    own_choice = (target_sampling.temperature <= 0) | (rule == "coupled")

    # Row i judges d_{i+1}: by log p/q, or by the target's own choice.
    log_ratio = torch.full(tokens.shape, -torch.inf, dtype=rows.dtype, device=device)
    choice = torch.full_like(tokens, PAD)
    status = torch.zeros((num_requests, num_steps + 1), dtype=torch.int32, device=device)
    b, i = torch.nonzero(judged & own_choice[:, None], as_tuple=True)
    if b.numel():
        z, status[b, i] = rows.load(b, i)
        choice[b, i] = rows.draw(z, b, i, keys, Stream.COUPLED)
    b, i = torch.nonzero(judged & ~own_choice[:, None], as_tuple=True)
    if b.numel():
        z, status[b, i] = rows.load(b, i)
        log_q = torch.where(_is_point(draft)[b, i], 0.0, _scalar(draft.logq, b, i, rows.dtype))
        log_ratio[b, i] = _gather(rows.log_prob(z, b), tokens[b, i]) - log_q
    broken = status[:, :num_steps] != Status.OK
    log_ratio = log_ratio.masked_fill(broken, -torch.inf)

    # k, and a_k (1 but in the block rule).
    if uniforms is None:
        # Unused, hence any number, where each row goes by the target's own choice.
        idle = num_steps == 0 or bool(own_choice.all())
        uniforms = torch.ones_like(log_ratio) if idle else _uniforms(keys, num_steps)
    matches = (choice == tokens) & ~broken
    passes = torch.where(own_choice[:, None], matches, uniforms.log() < log_ratio)
    if inputs.num_passing is not None:
        inputs.num_passing.copy_((passes & judged).sum(1))
    num_accepted = (passes & judged).to(torch.int64).cumprod(1).sum(1)
    log_scale = torch.zeros(num_requests, dtype=rows.dtype, device=device)
    if rule == "block" and not bool(own_choice.all()):
        sampled = judged & ~own_choice[:, None]
        by_block, log_a = _block_rule(rows, draft, log_ratio, uniforms, sampled, broken)
        num_accepted = torch.where(own_choice, num_accepted, by_block)
        log_scale = log_a.gather(1, num_accepted[:, None])[:, 0]

    # The extra token, from row k: known, or drawn from p, or from the residual.
    extra = torch.zeros_like(num_accepted)
    rejected = num_accepted < draft.num_draft
    b = torch.nonzero(own_choice & rejected)[:, 0]
    extra[b] = choice[b, num_accepted[b]]
    b = torch.nonzero(~own_choice & rejected)[:, 0]
    if b.numel():
        extra[b] = _draw_residual(rows, draft, b, num_accepted[b], log_scale[b], keys)
    b = torch.nonzero(~rejected)[:, 0]
    if inputs.bonus_tokens is not None:
        extra[b] = inputs.bonus_tokens[b]
    elif b.numel():
        z, status[b, num_accepted[b]] = rows.load(b, num_accepted[b])
        stream = Stream.COUPLED if rule == "coupled" else Stream.EXTRA
        extra[b] = rows.draw(z, b, num_accepted[b], keys, stream)

    bad_draft = (_is_bad(draft) & judged & ~own_choice[:, None]).any(1)
    worst = status.amax(1)
    worst = torch.where(worst == Status.OK, bad_draft.to(torch.int32) * DRAFT_NAN, worst)
    position = torch.arange(num_steps + 1, device=device)
    output = torch.nn.functional.pad(tokens, (0, 1), value=PAD)
    output = output.masked_fill(position >= num_accepted[:, None], PAD)
    output = output.scatter(1, num_accepted[:, None], extra[:, None])
    return Verdict(num_accepted.to(torch.int32), output, worst)


def _settled(draft: Draft) -> Draft:
    """The draft with the numbers and temperatures that act."""
    sampling = None if draft.sampling is None else sampling_reference(draft.sampling)
    num_draft = draft.num_draft.clamp(0, draft.tokens.shape[1])
    return dataclasses.replace(draft, num_draft=num_draft, sampling=sampling)


def _block_rule(
    rows: _TargetRows,
    draft: Draft,
    log_ratio: torch.Tensor,
    uniforms: torch.Tensor,
    judged: torch.Tensor,
    broken: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [B] = max{i: u_i < h_i} and log a_0..a_K [B, K+1]."""
    scales = [log_ratio.new_zeros((log_ratio.shape[0], 1))]
    for ratio in log_ratio.split(1, dim=1):
        scales.append((scales[-1] + ratio).clamp(max=0))
    log_a = torch.cat(scales[: log_ratio.shape[1] + 1], 1)
    a = log_a[:, 1:].exp()
    # R_i <= a_i. R = a makes h = a: right for the last draft, for a = 1, and for u >= a, which
    # fails whatever R is. Only the others, after the last sure success, need their R. A row
    # without a law has none.
    mass = a.clone()
    count = torch.arange(1, a.shape[1] + 1, device=a.device)
    last = count == judged.sum(1, keepdim=True)
    possible = judged & (uniforms < a)
    sure = (possible & ((a == 1) | last)).to(torch.int64) * count
    sure = torch.nn.functional.pad(sure, (1, 0)).amax(1, keepdim=True)
    lawless = torch.nn.functional.pad(broken[:, 1:], (0, 1))
    b, i = torch.nonzero(possible & (count > sure) & ~lawless, as_tuple=True)
    if b.numel():
        log_p, log_q = rows.log_prob(rows.load(b, i + 1)[0], b), _log_q(rows, draft, b, i + 1)
        joint = log_p + log_a[b, i + 1, None]
        excess = (exp_reference(joint) - exp_reference(log_q)).clamp(min=0)
        mass[b, i] = excess.sum(1)
    passes = judged & (uniforms * (mass + 1 - a) < mass)
    num_accepted = torch.nn.functional.pad(passes.to(torch.int64) * count, (1, 0)).amax(1)
    return num_accepted, log_a


def _draw_residual(
    rows: _TargetRows,
    draft: Draft,
    b: torch.Tensor,
    i: torch.Tensor,
    log_scale: torch.Tensor,
    keys: Keys,
) -> torch.Tensor:
    """argmax log (a p - q)+ + g of row i of request b; of log p + g where the residual is empty."""
    z, status = rows.load(b, i)
    log_p = rows.log_prob(z, b)
    above, below = log_p + log_scale[:, None], _log_q(rows, draft, b, i)
    # log(1 - q/p) would round to 0 for small q/p.
    residual = torch.where(
        above > below, above + torch.log1p(-exp_reference(below - above)), -torch.inf
    )
    empty = (exp_reference(residual).sum(1) <= MASS_FLOOR) | (status != Status.OK)
    score = torch.where(empty[:, None], log_p, residual)
    noise = gumbel_reference(Keys(keys.seed[b], keys.base[b]), i, Stream.EXTRA, rows.vocab)
    return (score + noise).argmax(1)


class _TargetRows:
    """Rows (b, i) of the target's logits wherever they lie, in float32 (float64 stays)."""

    def __init__(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        bias: torch.Tensor | None,
        row_index: torch.Tensor | None,
        inputs: Inputs,
    ) -> None:
        self.logits, self.bias, self.row_index = logits, bias, row_index
        self.sampling, self.inputs = sampling, inputs
        self.dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self.vocab = logits.shape[-1]

    def load(self, b: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """z [N, V], NaN and +inf as -inf, and status [N]."""
        rows = self.logits[b, i] if self.row_index is None else self.logits[self.row_index[b, i]]
        if self.inputs.target_probs:
            rows = rows.to(self.dtype).log()
        return clean_reference(rows, None if self.bias is None else self.bias[b, i])

    def log_prob(self, z: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """log p [N, V] of loaded rows of sampled requests b."""
        filters = (self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        if any(values is not None for values in filters):
            sampling = Sampling(
                self.sampling.temperature[b], *(None if v is None else v[b] for v in filters)
            )
            ids = torch.arange(self.vocab, device=z.device)
            z = torch.where(
                is_within_reference(z, ids, *cutoff_reference(z, sampling)), z, -torch.inf
            )
        top = z.amax(1, keepdim=True)
        reciprocal = 1.0 / self.sampling.temperature[b].to(z.dtype).clamp(min=MIN_TEMPERATURE)
        scaled = (z - top.clamp(min=torch.finfo(z.dtype).min)) * reciprocal[:, None]
        log_p = scaled.log_softmax(1)
        return log_p if bool((top > -torch.inf).all()) else log_p.nan_to_num(nan=-torch.inf)

    def draw(
        self, z: torch.Tensor, b: torch.Tensor, i: torch.Tensor, keys: Keys, stream: Stream
    ) -> torch.Tensor:
        """The token of loaded rows (b, i): argmax of log p + g, of z at temperature 0."""
        token = z.argmax(1)
        random = torch.nonzero(self.sampling.temperature[b] > 0)[:, 0]
        if random.numel():
            b, i = b[random], i[random]
            noise = gumbel_reference(Keys(keys.seed[b], keys.base[b]), i, stream, self.vocab)
            token[random] = (self.log_prob(z[random], b) + noise).argmax(1)
        return token


def _log_q(rows: _TargetRows, draft: Draft, b: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """log q [N, V] of draft rows (b, i) over the target's ids."""
    token = draft.tokens[b, i]
    ids = torch.arange(rows.vocab, device=token.device)
    point = torch.where(ids == token[:, None], 0.0, -torch.inf).to(rows.dtype)
    is_point = _is_point(draft)[b, i]
    if draft.logits is None or bool(is_point.all()):
        return point
    z = draft.logits[b, i] if draft.row_index is None else draft.logits[draft.row_index[b, i]]
    z = z.to(rows.dtype).log() if rows.inputs.draft_probs else z.to(rows.dtype)
    if draft.bias is not None:
        z = z + draft.bias[b, i]
    own, own_token = _to_draft_ids(draft, ids), _to_draft_ids(draft, token)
    z_token = _gather(z, own_token)
    width = z.shape[1]
    z = torch.where((own >= 0) & (own < width), z[:, own.clamp(0, width - 1)], -torch.inf)
    assert draft.logq is not None and draft.sampling is not None  # checked with the logits
    lse, downweight = -draft.logq[b, i].to(rows.dtype), None
    scale_logit = _scalar(draft.scale_logit, b, i, rows.dtype, torch.inf)
    scale_id = _scalar(draft.scale_id, b, i, torch.int64, PAD)
    if draft.downweight is not None:
        downweight = draft.downweight[b]
        # lse counts from a scaled token, log q(d) already holds its log C.
        edge = scale_logit, scale_id
        scaled = is_within_reference(z_token[:, None], own_token[:, None], *edge)[:, 0]
        lse = torch.where(scaled, lse + log_downweight_reference(downweight).to(rows.dtype), lse)
    log_q = log_prob_reference(
        z,
        torch.where(is_point, 1.0, draft.sampling.temperature[b]),
        _scalar(draft.cutoff, b, i, rows.dtype, -torch.inf),
        _scalar(draft.cutoff_id, b, i, torch.int64, PAD),
        lse,
        scale_logit,
        scale_id,
        downweight,
        ids=own,
        anchor=z_token,
    )
    # A row whose token has no logit cannot be judged: its token counts as a one-hot draft.
    return torch.where((is_point | ~z_token.isfinite())[:, None], point, log_q)


def _scalar(
    values: torch.Tensor | None,
    b: torch.Tensor,
    i: torch.Tensor,
    dtype: torch.dtype,
    default: float = 0.0,
) -> torch.Tensor:
    """values[b, i], or the default for each where there are none."""
    if values is None:
        return torch.full(b.shape, default, dtype=dtype, device=b.device)
    return values[b, i].to(dtype)


def _is_one_hot(draft: Draft) -> torch.Tensor:
    """[B] bool: requests whose drafts are deterministic proposals."""
    if draft.logits is None:
        return torch.ones_like(draft.num_draft, dtype=torch.bool)
    assert draft.sampling is not None  # checked with the logits
    one_hot = draft.sampling.temperature <= 0
    return one_hot if draft.one_hot is None else one_hot | draft.one_hot


def _is_bad(draft: Draft) -> torch.Tensor:
    """[B, K] bool: rows that should be sampled ones, but log q is not a number to judge by."""
    if draft.logq is None:
        return torch.zeros_like(draft.tokens, dtype=torch.bool)
    return ~draft.logq.isfinite() & ~_is_one_hot(draft)[:, None]


def _is_point(draft: Draft) -> torch.Tensor:
    """[B, K] bool: drafts judged as one-hot."""
    return _is_one_hot(draft)[:, None] | _is_bad(draft)


def _to_draft_ids(draft: Draft, ids: torch.Tensor) -> torch.Tensor:
    """The draft's ids of target ids; beyond V_draft where it has none."""
    if draft.vocab_map is None:
        return ids
    known = (ids >= 0) & (ids < len(draft.vocab_map))
    own = draft.vocab_map[torch.where(known, ids, 0)].to(torch.int64)
    # An id without a draft id ranks below all: -1 would stand at the edge of an unfiltered row.
    return own.masked_fill(~known | (own < 0), 2**31 - 1)


def _gather(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """rows[n, ids[n]]: [N]; -inf where the row has no such id."""
    inside = (ids >= 0) & (ids < rows.shape[1])
    values = rows.gather(1, ids.clamp(0, rows.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, values, -torch.inf)


def _uniforms(keys: Keys, num_steps: int) -> torch.Tensor:
    """u [B, K]."""
    step = torch.arange(num_steps, device=keys.seed.device).repeat(keys.seed.shape[0])
    each = Keys(keys.seed.repeat_interleave(num_steps), keys.base.repeat_interleave(num_steps))
    return uniform_reference(each, step, Stream.ACCEPT).view(-1, num_steps)
