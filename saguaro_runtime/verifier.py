"""The target's side of a round: one forward over the chain, one verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from saguaro_kernels import Impl, Keys, Sampling, Status
from saguaro_kernels.verification import Draft, Verdict, verify

from .chains import ChainStore
from .config import Rule
from .graphs import Graphs
from .metrics import Timeline
from .models.protocol import Model
from .processors import Logprobs, edit_rows, logprobs_of
from .requests import Request
from .round import Decision, Turn
from .transfer import Mailbox


class Judgement(NamedTuple):
    """The outcome of a round, on the host.

    num_draft: [B] int32, drafts that were judged.
    logprobs, errors: of the requests that asked for them, and of those whose logits processor
    raised, by index in the turn.
    """

    verdict: Verdict
    num_draft: torch.Tensor
    logprobs: dict[int, list[Logprobs]]
    errors: dict[int, str]


class Verifier:
    """Feeds [last, d_1..d_K] at the row's end and judges the drafts by the target's rows."""

    def __init__(self, model: Model, *, rule: Rule, impl: Impl, timeline: Timeline) -> None:
        self.model, self.rule, self.impl, self.timeline = model, rule, impl, timeline
        self._mailbox = Mailbox(model.device)

    def warm_up(self, chain: ChainStore) -> None:
        """On a GPU, judge a chain without a request, so that graphs are captured and kernels
        compiled before the first request."""
        if self.model.device.type == "cpu":
            return
        if isinstance(self.model, Graphs):
            self.model.warm_up()
        draft_len = chain.tokens.shape[1]
        there = Turn.dummy(Decision(draft_len, branches=0)).on(self.model.device)
        sampling = Sampling(torch.ones(1, device=self.model.device))
        draft = chain.draft(there.rows, sampling, draft_len)
        self.verify(there, draft, sampling, Keys(there.rows, there.base))
        self.timeline.drain()

    def verify(
        self,
        turn: Turn,
        draft: Draft,
        sampling: Sampling,
        keys: Keys,
        requests: Sequence[Request] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Judgement:
        """Judge the turn's chains; all tensors are on the model's device.

        requests: those of its rows, for their logits editors and log-probabilities; none in a
        warm-up. meanwhile: called when all work is queued, before the one wait for its result.
        """
        tokens = torch.cat((turn.last[:, None], draft.tokens.clamp(min=0)), dim=1)
        with self.timeline.span("verify", tokens.numel()):
            with self.timeline.span("target_forward"):
                logits = self.model.extend(turn.rows, tokens, (turn.base - 1).to(torch.int32))
            edited, errors = _edit(logits, draft, requests)
            verdict = verify(edited, draft, sampling, keys, rule=self.rule, impl=self.impl)
        self._mailbox.post(verdict.num_accepted, verdict.tokens, verdict.status, draft.num_draft)
        meanwhile()
        *outcome, num_draft = self._mailbox.take()
        verdict = Verdict(*outcome)
        if bool(verdict.status.any()):
            verdict = _only_used_rows(verdict, edited)
        return Judgement(verdict, num_draft, _logprobs(logits, verdict, requests), errors)


def _edit(
    logits: torch.Tensor, draft: Draft, requests: Sequence[Request]
) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits with the penalties, masks and functions of their requests; errors by index."""
    if not any(request.editor.changes(len(request.token_ids)) for request in requests):
        return logits, {}
    counts = draft.num_draft.tolist()
    drafts = [ids[:count] for ids, count in zip(draft.tokens.tolist(), counts, strict=True)]
    editors = [request.editor for request in requests]
    return edit_rows(logits, editors, [request.token_ids for request in requests], drafts)


def _logprobs(
    logits: torch.Tensor, verdict: Verdict, requests: Sequence[Request]
) -> dict[int, list[Logprobs]]:
    found = {}
    for index, request in enumerate(requests):
        if request.params.logprobs is not None:
            count = int(verdict.num_accepted[index]) + 1
            tokens = verdict.tokens[index, :count].to(logits.device)
            found[index] = logprobs_of(logits[index, :count], tokens, request.params.logprobs)
    return found


def _only_used_rows(verdict: Verdict, logits: torch.Tensor) -> Verdict:
    """The verdict without what is broken after row k, the extra token's: the text needs no more."""
    used = torch.arange(logits.shape[1]) <= verdict.num_accepted[:, None]
    legal = ((logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)).cpu()
    status = verdict.status.masked_fill((legal | ~used).all(-1), int(Status.OK))
    return dataclasses.replace(verdict, status=status)
