"""The target's side of a round: one forward over the chain, one verification."""

from __future__ import annotations

import dataclasses

import torch

from saguaro_kernels import Keys, Sampling, Status
from saguaro_kernels._launch import Impl
from saguaro_kernels.verification import Draft, Verdict, verify

from .config import Rule
from .metrics import Timeline
from .models.protocol import Model
from .round import Turn


class Verifier:
    """Feeds [last, d_1..d_K] at the row's end and judges the drafts by the target's rows."""

    def __init__(self, model: Model, *, rule: Rule, impl: Impl, timeline: Timeline) -> None:
        self.model, self.rule, self.impl, self.timeline = model, rule, impl, timeline

    def verify(self, turn: Turn, draft: Draft, sampling: Sampling, keys: Keys) -> Verdict:
        """The outcome of the turn's chains: a Verdict of B rows."""
        tokens = torch.cat((turn.last[:, None], draft.tokens.clamp(min=0)), dim=1)
        with self.timeline.span("verify"):
            with self.timeline.span("target_forward"):
                logits = self.model.extend(turn.rows, tokens, (turn.base - 1).to(torch.int32))
            verdict = verify(logits, draft, sampling, keys, rule=self.rule, impl=self.impl)
        return _only_used_rows(verdict, logits) if bool(verdict.status.any()) else verdict


def _only_used_rows(verdict: Verdict, logits: torch.Tensor) -> Verdict:
    """A broken row behind the extra token's is not the text's: only rows 0..k count."""
    used = torch.arange(logits.shape[1]) <= verdict.num_accepted[:, None]
    legal = (logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)
    status = verdict.status.masked_fill((legal | ~used).all(-1), int(Status.OK))
    return dataclasses.replace(verdict, status=status)
