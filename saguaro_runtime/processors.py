"""A request's changes to logits before they are sampled, and the log-probabilities it asks for.

    row i of a round predicts the token after   prompt + new tokens + d_1 .. d_i

Each row is changed by the tokens before it alone, so with penalties, masks and the user's function
the target's distribution is that of plain decoding, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from saguaro_kernels.errors import ShapeError

from .params import SamplingParams


class Logprobs(NamedTuple):
    """`token`: of the token itself, by the model's own distribution; `top`: the likeliest ids."""

    token: float
    top: dict[int, float]


class LogitsEditor:
    """The changes of one request, in the order that SamplingParams names."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], stop_ids: frozenset[int], vocab: int
    ) -> None:
        self.params, self.prompt = params, prompt
        self._stop_ids = torch.tensor([id for id in stop_ids if 0 <= id < vocab], dtype=torch.int64)
        self._forbidden: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self._forbidden = torch.ones(vocab, dtype=torch.bool)
            self._forbidden[list(params.allowed_token_ids)] = False

    def _follow(self, device: torch.device) -> None:
        """Move the masks to the rows' device."""
        if self._stop_ids.device != device:
            self._stop_ids = self._stop_ids.to(device)
            if self._forbidden is not None:
                self._forbidden = self._forbidden.to(device)

    def changes(self, length: int) -> bool:
        """Whether a row after `length` new tokens is changed at all."""
        params = self.params
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
            or params.logits_processor is not None
            or params.allowed_token_ids is not None
            or length < params.min_new_tokens
        )

    def edit(self, row: torch.Tensor, new: Sequence[int]) -> torch.Tensor:
        """The row [V] float32 that follows `new`; may write to the one given."""
        params = self.params
        self._follow(row.device)
        if params.repetition_penalty != 1:
            seen = torch.tensor([*self.prompt, *new]).unique().to(row.device)
            logits, penalty = row[seen], params.repetition_penalty
            row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
        if new and (params.frequency_penalty or params.presence_penalty):
            ids, counts = (
                tensor.to(row.device) for tensor in torch.tensor(new).unique(return_counts=True)
            )
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty
        if params.logits_processor is not None:
            shape = row.shape
            row = params.logits_processor(self.prompt, new, row)
            if not isinstance(row, torch.Tensor) or row.shape != shape:
                got = list(row.shape) if isinstance(row, torch.Tensor) else type(row).__name__
                raise ShapeError(f"logits_processor: returned {got}, want {list(shape)}")
        if self._forbidden is not None:
            row = row.masked_fill(self._forbidden, -torch.inf)
        if len(new) < params.min_new_tokens:
            row = row.index_fill(0, self._stop_ids, -torch.inf)
        return row


def edit_rows(
    logits: torch.Tensor,
    editors: Sequence[LogitsEditor],
    texts: Sequence[list[int]],
    drafts: Sequence[list[int]],
) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits [B, K+1, V] with each request's changes, and error messages by index.

    `logits` is not written to. texts: new tokens so far; drafts: the num_draft drafts after them.
    A row whose editor raised is NaN: only a text that needs it ends there.
    """
    changed = [at for at, editor in enumerate(editors) if editor.changes(len(texts[at]))]
    errors: dict[int, str] = {}
    if not changed:
        return logits, errors
    logits = logits.to(torch.float32, copy=True)
    for at in changed:
        for count in range(len(drafts[at]) + 1):
            row = logits[at, count]
            try:
                row.copy_(editors[at].edit(row, texts[at] + drafts[at][:count]))
            except Exception as error:
                row.fill_(torch.nan)
                errors.setdefault(at, f"{type(error).__name__}: {error}")
    return logits, errors


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[Logprobs]:
    """Log-probabilities of tokens [N] and the `count` likeliest ids, by logits [N, V]."""
    law = logits.float().log_softmax(-1)
    own = law.gather(1, tokens[:, None])[:, 0].tolist()
    best = law.topk(min(count, law.shape[1]))
    return [
        Logprobs(value, dict(zip(ids, values, strict=True)))
        for value, ids, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
