"""Which outcomes (k, extra) of a verification to draft for: the most promising of all rows at once.

Row k of the draft's logits predicts the extra token of "k drafts accepted". The drafted token
d_{k+1} is excluded for k < num_draft (it was accepted, or the residual is without it), and nothing
for k = num_draft.

    score[k, x]  = z[k, x] / T + g[k, x]
    weight[k, x] = P(k) * exp(score[k, x]) / sum over candidates x' of exp(score[k, x'])

The verifier draws the extra token by Gumbel-argmax under the stream EXTRA at offset k. With
ranking "noise" the drafter ranks with the same g, so it predicts the random draw as well as the
distribution; with "coupled" g is the stream COUPLED; with "probability" g = 0. At T = 0 nothing is
drawn and the ranking is by z. It decides which branches are prepared and nothing else, so it cannot
change the distribution of the output.
"""

from __future__ import annotations

import torch

from .._call import call
from .._launch import (
    FLOATS,
    Impl,
    check_int,
    check_out,
    check_sizes,
    check_tensor,
    check_workspace,
    resolve_impl,
)
from ..distribution import Sampling
from ..errors import ConfigError, ShapeError
from ..rng import Keys
from .fan_out import allocate_fan_out, allocate_fan_out_reference
from .launch import (
    RANKINGS,
    OutcomesConfig,
    _predict_outcomes_launch,
    compile_cases,
    outcomes_workspace_size,
)
from .reference import (
    NOISE_FROM_TEMPERATURE,
    Allocation,
    Outcomes,
    Ranking,
    predict_outcomes_reference,
    resolve_allocation,
)

__all__ = [
    "NOISE_FROM_TEMPERATURE",
    "Allocation",
    "Outcomes",
    "OutcomesConfig",
    "Ranking",
    "allocate_fan_out",
    "allocate_fan_out_reference",
    "compile_cases",
    "outcomes_workspace_size",
    "predict_outcomes",
    "predict_outcomes_reference",
]


def predict_outcomes(
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
    out: Outcomes | None = None,
    workspace: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Outcomes:
    """Return M distinct outcomes per request, by depth and within a depth the best first.

    Equal scores rank by id, equal weights by depth, the lowest first; NaN, +inf and -inf logits
    are no candidates. Fewer candidates than branches: the rest is PAD. Deterministic.

    Args:
        draft_logits: [B, K+1, V] float16 | bfloat16 | float32, last dimension contiguous. Rows
            beyond num_draft are not read.
        draft_tokens: [B, K] int64; an id that no column has excludes nothing.
        num_draft: [B] int32 | int64, clamped to 0..K. 0 gives the whole budget to the single row 0.
        sampling: temperature [B] float32 >= 0 of the request; its filters are not used, as the
            extra token follows the target's row.
        keys: seed and base [B] int64, of the round whose outcome is predicted.
        branches: M.
        fan_out: [K+1] or [B, K+1] int32, >= 0: branches of each depth, the budget cut off at M.
        accept_prob: [B, K+1] float32, P(k), any scale; negative or NaN: 0. Default: 1.
        cutoff: [B, K+1] float32: ids of lower logits are no candidates (a filter of the draft).
        bias: broadcasts to draft_logits, float32, last dimension contiguous; added to the logits.
        ids: [V] int64, ascending: the id of each column, where the rows are of a part of a larger
            vocabulary. Noise, draft_tokens and the outcomes' tokens are by these ids. Default: the
            columns' numbers.
        ranking: "probability", "noise", "coupled", or "auto": noise from temperature 0.5 on, else
            probability, per request.
        allocation: "best": the M largest weights over all (k, x); "uniform": equal shares of
            k = 0..num_draft, what is left over one each to the largest k; "auto": fan_out if
            given, else best if accept_prob is given, else uniform.
            What fan_out and accept_prob say of k > num_draft counts for k = num_draft.
        out: Outcomes of contiguous tensors, overwritten and returned. workspace: int64,
            `outcomes_workspace_size`. Default: new.
    Returns:
        Outcomes(depth, tokens, score), [B, M] each.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError. Values are not checked.
    Cost:
        rows 0..num_draft read once, 8 bytes a candidate; 2 launches; 0 host syncs.
    Source:
        arXiv 2603.03251: outcomes (k, x), and fan_out by Theorem 12. Noise, and "best" over all
        (k, x) at once: docs/theory.md, "Predicting the dice" and "Speed".
    """
    _check(draft_logits, draft_tokens, num_draft, sampling, keys, branches)
    if ranking not in RANKINGS:
        raise ConfigError(f"ranking: got {ranking!r}, want one of {', '.join(RANKINGS)}")
    if allocation not in ("auto", "best", "uniform"):
        raise ConfigError(f"allocation: got {allocation!r}, want 'auto', 'best' or 'uniform'")
    if fan_out is not None and allocation != "auto":
        raise ConfigError(f"allocation: got {allocation!r} and a fan_out; drop one of them")
    batch, rows, vocab = draft_logits.shape
    device = draft_logits.device
    if fan_out is not None:
        shape = (batch, rows) if fan_out.dim() == 2 else (rows,)
        check_tensor("fan_out", fan_out, shape, torch.int32, device, contiguous_last=True)
        fan_out = fan_out.expand(batch, rows)
    for name, value in (("accept_prob", accept_prob), ("cutoff", cutoff)):
        if value is not None:
            check_tensor(name, value, (batch, rows), torch.float32, device)
    if bias is not None:
        try:
            bias = bias.expand(draft_logits.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"bias: got shape {list(bias.shape)}, want one that broadcasts to "
                f"{list(draft_logits.shape)}"
            ) from error
        check_tensor("bias", bias, bias.shape, torch.float32, device, contiguous_last=True)
    if ids is not None:
        check_tensor("ids", ids, (draft_logits.shape[2],), torch.int64, device)
        ids = ids.contiguous()
    if out is None:
        out = Outcomes(
            torch.empty(batch, branches, dtype=torch.int32, device=device),
            torch.empty(batch, branches, dtype=torch.int64, device=device),
            torch.empty(batch, branches, dtype=torch.float32, device=device),
        )
    else:
        for name, dtype in (
            ("depth", torch.int32),
            ("tokens", torch.int64),
            ("score", torch.float32),
        ):
            check_out(f"out.{name}", getattr(out, name), (batch, branches), dtype, device)
    if workspace is not None:
        size = outcomes_workspace_size(batch, rows, vocab, branches)
        check_workspace(workspace, size, torch.int64, device)
    call(
        "predict_outcomes",
        draft_logits, draft_tokens.contiguous(), num_draft.contiguous(),
        sampling.temperature.contiguous(), keys.seed.contiguous(), keys.base.contiguous(),
        fan_out, *(None if v is None else v.contiguous() for v in (accept_prob, cutoff)), bias,
        ids, ranking, resolve_allocation(allocation, fan_out, accept_prob),
        resolve_impl(impl, device), out.depth, out.tokens, out.score, workspace,
    )  # fmt: skip
    return out


def _predict_outcomes(
    draft_logits, draft_tokens, num_draft, temperature, seed, base, fan_out, accept_prob, cutoff,
    bias, ids, ranking, allocation, impl, depth, tokens, score, workspace,
) -> None:  # fmt: skip
    if impl == "triton":
        _predict_outcomes_launch(
            draft_logits, draft_tokens, num_draft, temperature, Keys(seed, base), fan_out,
            accept_prob, cutoff, bias, ids, Outcomes(depth, tokens, score),
            ranking=ranking, best=allocation == "best", workspace=workspace,
        )  # fmt: skip
        return
    found = predict_outcomes_reference(
        draft_logits, draft_tokens, num_draft, Sampling(temperature), Keys(seed, base),
        branches=depth.shape[1], fan_out=fan_out, accept_prob=accept_prob, cutoff=cutoff, bias=bias,
        ids=ids, ranking=ranking, allocation=allocation,
    )  # fmt: skip
    depth.copy_(found.depth)
    tokens.copy_(found.tokens)
    score.copy_(found.score)


def _check(draft_logits, draft_tokens, num_draft, sampling, keys, branches) -> None:
    check_tensor("draft_logits", draft_logits, (None,) * 3, FLOATS, contiguous_last=True)
    batch, rows, vocab = draft_logits.shape
    check_sizes("draft_logits", draft_logits, **{"K+1": rows}, V=vocab)
    check_int("branches", branches, 0, 1024)
    device = draft_logits.device
    check_tensor("draft_tokens", draft_tokens, (batch, rows - 1), torch.int64, device)
    check_tensor("num_draft", num_draft, (batch,), (torch.int32, torch.int64), device)
    check_tensor("temperature", sampling.temperature, (batch,), torch.float32, device)
    check_tensor("seed", keys.seed, (batch,), torch.int64, device)
    check_tensor("base", keys.base, (batch,), torch.int64, device)
