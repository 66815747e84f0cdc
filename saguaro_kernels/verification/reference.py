"""Verification in plain torch: the specification of the rules, and the path of CPU tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..rng import Keys, Stream, gumbel_reference, uniform_reference
from .contract import DRAFT_NAN, EMPTY, NAN, OK, PAD, Draft, Verdict

if TYPE_CHECKING:
    from ..distribution import Sampling

MASS_FLOOR = 2.0**-18
"""A residual of less mass is the rounding of p == q; the extra token is then drawn from p."""


def verify_reference(
    target_logits: torch.Tensor,
    draft: Draft,
    target_sampling: Sampling,
    keys: Keys,
    *,
    rule: str = "block",
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> Verdict:
    """`verify` in plain torch. float64 logits are judged in float64; `uniforms` [B, K] replaces u."""
    tokens, device = draft.tokens, draft.tokens.device
    num_requests, num_steps = tokens.shape
    rows = _TargetRows(target_logits, target_sampling, bias, row_index)
    step = torch.arange(num_steps, device=device)
    judged = step < draft.num_draft[:, None]
    own_choice = (target_sampling.temperature <= 0) | (rule == "coupled")
    uniforms = _uniforms(keys, num_steps) if uniforms is None else uniforms

    # Row i judges d_{i+1}: by log p/q, or by the target's own choice.
    log_ratio = torch.full(tokens.shape, -torch.inf, dtype=rows.dtype, device=device)
    choice = torch.full_like(tokens, PAD)
    status = torch.zeros((num_requests, num_steps + 1), dtype=torch.int32, device=device)
    b, i = torch.nonzero(judged & own_choice[:, None], as_tuple=True)
    if b.numel():
        logits, status[b, i] = rows.load(b, i)
        choice[b, i] = rows.draw(logits, b, i, keys, Stream.COUPLED)
    b, i = torch.nonzero(judged & ~own_choice[:, None], as_tuple=True)
    if b.numel():
        logits, status[b, i] = rows.load(b, i)
        log_p = _at(rows.log_prob(logits, b), tokens[b, i])
        log_ratio[b, i] = log_p - _log_q_of_token(draft, b, i, rows.dtype)
    broken = status[:, :num_steps] != OK
    log_ratio = log_ratio.masked_fill(broken, -torch.inf)

    # k, and a_k (1 but in the block rule).
    passes = torch.where(
        own_choice[:, None], (choice == tokens) & ~broken, uniforms.log() < log_ratio
    )
    num_accepted = (passes & judged).to(torch.int64).cumprod(1).sum(1)
    log_scale = torch.zeros(num_requests, dtype=rows.dtype, device=device)
    if rule == "block":
        by_block, log_a = _block_rule(
            rows, draft, log_ratio, uniforms, judged & ~own_choice[:, None]
        )
        num_accepted = torch.where(own_choice, num_accepted, by_block)
        log_scale = log_a.gather(1, num_accepted[:, None])[:, 0]

    # The extra token, from row k: known, or drawn from p, or from the residual.
    extra = torch.zeros_like(num_accepted)
    stopped = num_accepted < draft.num_draft
    b = torch.nonzero(own_choice & stopped)[:, 0]
    extra[b] = choice[b, num_accepted[b]]
    for kind, stream in ((own_choice, Stream.COUPLED), (~own_choice, Stream.EXTRA)):
        b = torch.nonzero(kind & ~stopped)[:, 0]
        if b.numel():
            logits, status[b, num_accepted[b]] = rows.load(b, num_accepted[b])
            extra[b] = rows.draw(logits, b, num_accepted[b], keys, stream)
    b = torch.nonzero(~own_choice & stopped)[:, 0]
    if b.numel():
        extra[b] = _draw_residual(rows, draft, b, num_accepted[b], log_scale[b], keys)

    bad_draft = (_is_bad(draft) & judged & ~own_choice[:, None]).any(1)
    worst = status.amax(1)
    worst = torch.where(worst == OK, bad_draft.to(torch.int32) * DRAFT_NAN, worst)
    position = torch.arange(num_steps + 1, device=device)
    output = torch.nn.functional.pad(tokens, (0, 1), value=PAD)
    output = output.masked_fill(position >= num_accepted[:, None], PAD)
    output = output.scatter(1, num_accepted[:, None], extra[:, None])
    return Verdict(num_accepted.to(torch.int32), output, worst)


def _block_rule(
    rows: _TargetRows,
    draft: Draft,
    log_ratio: torch.Tensor,
    uniforms: torch.Tensor,
    judged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [B] = max{i: u_i < h_i} and log a_0..a_K [B, K+1]."""
    log_a = [log_ratio.new_zeros((log_ratio.shape[0], 1))]
    for i in range(log_ratio.shape[1]):
        log_a.append((log_a[-1] + log_ratio[:, i : i + 1]).clamp(max=0))
    log_a = torch.cat(log_a, 1)
    a = log_a[:, 1:].exp()
    # R_i in [0, a_i]. Starting from R = a, h is a: right for the last draft, for a = 1, and for
    # u >= a, which fails whatever R is. Only the others after the last sure success need their R.
    mass = a.clone()
    count = torch.arange(1, a.shape[1] + 1, device=a.device)
    last = count == judged.sum(1, keepdim=True)
    possible = judged & (uniforms < a)
    sure = (possible & ((a == 1) | last)).to(torch.int64).mul(count)
    sure = torch.nn.functional.pad(sure, (1, 0)).amax(1, keepdim=True)
    b, i = torch.nonzero(possible & (count > sure), as_tuple=True)
    if b.numel():
        log_p, log_q = rows.log_prob(rows.load(b, i + 1)[0], b), _log_q(rows, draft, b, i + 1)
        excess = (a[b, i, None] * log_p.exp() - log_q.exp()).clamp(min=0)
        mass[b, i] = excess.nan_to_num(0).sum(1)
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
    """argmax log (a p - q)+ + g of row i of request b; where the residual is empty, of log p + g."""
    logits, _ = rows.load(b, i)
    log_p = rows.log_prob(logits, b)
    above, below = log_p + log_scale[:, None], _log_q(rows, draft, b, i)
    # log(1 - x) would round to 0 for small q/p.
    residual = torch.where(above > below, above + torch.log1p(-(below - above).exp()), -torch.inf)
    empty = ~(residual.exp().sum(1) > MASS_FLOOR)
    score = torch.where(empty[:, None], log_p, residual)
    noise = gumbel_reference(Keys(keys.seed[b], keys.base[b]), i, Stream.EXTRA, rows.vocab)
    return (score + noise).argmax(1)


class _TargetRows:
    """Rows (b, i) of the target's logits, in float32 (float64 if they are), wherever they lie."""

    def __init__(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        bias: torch.Tensor | None,
        row_index: torch.Tensor | None,
    ) -> None:
        self.logits, self.bias, self.row_index = logits, bias, row_index
        self.temperature = sampling.temperature
        self.dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self.vocab = logits.shape[-1]

    def load(self, b: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V], NaN and +inf as -inf, and status [N]."""
        rows = self.logits[b, i] if self.row_index is None else self.logits[self.row_index[b, i]]
        logits = rows.to(self.dtype)
        if self.bias is not None:
            logits = logits + (self.bias[b, i] if self.bias.dim() == 3 else self.bias[b])
        good = logits < torch.inf
        logits = torch.where(good, logits, -torch.inf)
        empty = (logits == -torch.inf).all(1)
        status = torch.where(good.all(1), torch.where(empty, EMPTY, OK), NAN)
        return logits, status.to(torch.int32)

    def log_prob(self, logits: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """log p [N, V] of loaded rows of requests b; one-hot at temperature 0."""
        temperature = self.temperature[b].to(self.dtype)[:, None]
        best = logits.amax(1, keepdim=True).clamp(min=torch.finfo(self.dtype).min)
        return ((logits - best) / temperature).log_softmax(1)

    def draw(
        self, logits: torch.Tensor, b: torch.Tensor, i: torch.Tensor, keys: Keys, stream: Stream
    ) -> torch.Tensor:
        """The token of loaded rows (b, i): argmax of log p + g, of the logits at temperature 0."""
        token = logits.argmax(1)
        random = torch.nonzero(self.temperature[b] > 0)[:, 0]
        if random.numel():
            b, i = b[random], i[random]
            noise = gumbel_reference(Keys(keys.seed[b], keys.base[b]), i, stream, self.vocab)
            score = self.log_prob(logits[random], b).masked_fill(logits[random].isinf(), -torch.inf)
            token[random] = (score + noise).argmax(1)
        return token


def _log_q(rows: _TargetRows, draft: Draft, b: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """log q [N, V] of draft rows (b, i) over the target's ids; a NaN row is one-hot at its token."""
    token = draft.tokens[b, i]
    ids = torch.arange(rows.vocab, device=token.device)
    point = torch.where(ids == token[:, None], 0.0, -torch.inf).to(rows.dtype)
    one_hot = _is_one_hot(draft, b) | _is_bad(draft)[b, i]
    if draft.logits is None or bool(one_hot.all()):
        return point
    own, own_token = _to_draft_ids(draft, ids), _to_draft_ids(draft, token)
    logits = draft.logits[b, i].to(rows.dtype)
    z_token = _at(logits, own_token)[:, None]
    has_q = (own >= 0) & (own < logits.shape[1])
    z = torch.where(has_q, logits[:, own.clamp(0, logits.shape[1] - 1)], -torch.inf)
    temperature = torch.where(one_hot, 1.0, draft.sampling.temperature[b]).to(rows.dtype)[:, None]
    log_q = (z - z_token) / temperature + draft.logq[b, i].to(rows.dtype)[:, None]
    if draft.downweight is not None:
        log_c = draft.downweight[b].to(rows.dtype).log()[:, None]
        edge = draft.scale_logit[b, i][:, None], draft.scale_id[b, i][:, None]
        token_scaled = _at_or_above(z_token, own_token[:, None], *edge)
        log_q = torch.where(_at_or_above(z, own, *edge), log_q + log_c, log_q)
        log_q = torch.where(token_scaled, log_q - log_c, log_q)
    if draft.cutoff is not None:
        edge = draft.cutoff[b, i][:, None], draft.cutoff_id[b, i][:, None]
        log_q = torch.where(_at_or_above(z, own, *edge) | z.isnan(), log_q, -torch.inf)
    return torch.where(one_hot[:, None] | log_q.isnan(), point, log_q)


def _log_q_of_token(
    draft: Draft, b: torch.Tensor, i: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if draft.logq is None:
        return torch.zeros(b.shape, dtype=dtype, device=b.device)
    one_hot = _is_one_hot(draft, b) | _is_bad(draft)[b, i]
    return torch.where(one_hot, 0.0, draft.logq[b, i].to(dtype))


def _is_one_hot(draft: Draft, b: torch.Tensor) -> torch.Tensor:
    """[N] bool: requests whose drafts are deterministic proposals."""
    if draft.logits is None:
        return torch.ones_like(b, dtype=torch.bool)
    one_hot = draft.sampling.temperature[b] <= 0
    return one_hot if draft.one_hot is None else one_hot | draft.one_hot[b]


def _is_bad(draft: Draft) -> torch.Tensor:
    """[B, K] bool: sampled rows whose log q is not a number to judge by."""
    every = torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
    if draft.logq is None:
        return torch.zeros_like(draft.tokens, dtype=torch.bool)
    return ~draft.logq.isfinite() & ~_is_one_hot(draft, every)[:, None]


def _to_draft_ids(draft: Draft, ids: torch.Tensor) -> torch.Tensor:
    """The draft's ids of target ids; -1 or >= V_draft where it has none."""
    return ids if draft.vocab_map is None else draft.vocab_map.to(torch.int64)[ids]


def _at(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """rows[n, ids[n]]: [N]; -inf where the row has no such id."""
    inside = (ids >= 0) & (ids < rows.shape[1])
    values = rows.gather(1, ids.clamp(0, rows.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, values, -torch.inf)


def _at_or_above(
    z: torch.Tensor, ids: torch.Tensor, edge: torch.Tensor, edge_id: torch.Tensor
) -> torch.Tensor:
    """Whether (z, id) is on the kept side of an edge: ties go to the lower id."""
    return (z > edge) | ((z == edge) & (ids <= edge_id))


def _uniforms(keys: Keys, num_steps: int) -> torch.Tensor:
    """u [B, K]."""
    each = [uniform_reference(keys, i, Stream.ACCEPT) for i in range(num_steps)]
    return torch.stack(each, 1) if each else keys.seed.new_zeros((keys.seed.shape[0], 0)).float()
