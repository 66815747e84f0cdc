"""Predicts the outcomes of each row's chain, and learns from them once they are known."""

from __future__ import annotations

from typing import Any

import torch

from saguaro_kernels import PAD, Impl
from saguaro_kernels.distribution.reference import log_tiny
from saguaro_kernels.outcomes import (
    Outcomes,
    allocate_fan_out,
    outcomes_workspace_size,
    predict_outcomes,
)

from .acceptance import AcceptanceModel, OutcomeStatistics
from .chains import Buffers, ChainStore
from .drafting import Drafter
from .round import Turn
from .transfer import CPU


class Predictor:
    """Shares a budget of branches among the accepted lengths of each row's chain.

    depth: [rows, count] int32, accepted lengths of the outcomes predicted last, PAD where unused.
    """

    def __init__(
        self, rows: int, draft_len: int, count: int, allocation: str, device: torch.device = CPU
    ) -> None:
        self.allocation = allocation
        self.depth = torch.full((rows, count), PAD, dtype=torch.int32, device=device)
        self.acceptance = AcceptanceModel(rows, draft_len, device=device)
        self.statistics = OutcomeStatistics(draft_len, device=device)
        self._features = torch.zeros(rows, 3, draft_len, dtype=torch.float64, device=device)
        self._kind = torch.zeros(rows, dtype=torch.int64, device=device)
        self._known = torch.zeros(rows, dtype=torch.bool, device=device)
        self._buffers = Buffers(rows, device)

    def predict(self, turn: Turn, drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor]:
        """The outcomes to prepare for the drafter's chains: accepted length and extra token,
        [B, M] each; good until the next call."""
        rows, branches = turn.rows, turn.decision.branches
        chain, table, width = drafter.chain, drafter.table, turn.decision.draft_len
        buffers, batch = self._buffers, len(rows)
        logits = chain.buffers.gather("logits", chain.logits, rows)[:, : width + 1]
        drafted = buffers.gather("drafted", chain.tokens[:, :width], rows)
        num_draft = buffers.gather("num_draft", chain.num_draft, rows)
        sampling = table.sampling(rows)
        share: dict[str, Any] = {"allocation": "uniform"}
        if self.allocation != "uniform":
            one_hot = buffers.gather("one_hot", chain.one_hot, rows)
            kind = self.acceptance.kinds(sampling.temperature, one_hot)
            self._kind[rows] = kind
            self._known.index_fill_(0, rows, True)
        if self.allocation == "best":
            columns = drafted
            if chain.vocab_map is not None:
                columns = buffers("mapped", torch.int32, batch, width)
                torch.take(chain.vocab_map, drafted, out=columns)
            known = buffers("known", torch.int64, batch, width).copy_(columns)
            known.clamp_(0, drafter.vocab_size - 1)
            features = self._describe(logits[:, :-1], known, sampling.temperature)
            self._features[rows] = features
            law = self.acceptance.lengths(features, kind, num_draft)
            share = {"accept_prob": law[:, : width + 1]}
        elif self.allocation == "histogram":
            share = {"fan_out": self._fan_out(kind, width, branches, drafter.impl)}
        size = outcomes_workspace_size(batch, width + 1, logits.shape[-1], branches)
        outcomes = predict_outcomes(
            logits,
            drafted,
            num_draft,
            sampling,
            table.keys(rows, turn.base),
            branches=branches,
            ids=drafter.ids,
            ranking=turn.decision.ranking,  # type: ignore[arg-type]
            impl=drafter.impl,
            out=Outcomes(
                buffers("depth", torch.int32, batch, branches),
                buffers("extra", torch.int64, batch, branches),
                buffers("score", torch.float32, batch, branches),
            ),
            workspace=buffers("workspace", torch.int64, batch, size // batch).flatten(),
            **share,
        )
        self.depth.index_fill_(0, rows, PAD)
        self.depth[rows, :branches] = outcomes.depth
        return outcomes.depth, outcomes.tokens

    def learn(self, turn: Turn, chain: ChainStore, branch: torch.Tensor) -> None:
        """Learn from the outcomes of `chain`, which the turn brings; branch [B]: the one that hit,
        PAD where none did."""
        if self.allocation == "uniform":
            return
        rows, accepted = turn.rows, turn.accepted
        known = self._known[rows] & (accepted >= 0)
        self._known.index_fill_(0, rows, False)
        kind, num_draft = self._kind[rows], chain.num_draft[rows]
        if self.allocation == "best":
            self.acceptance.learn(self._features[rows], kind, num_draft, accepted, known)
            return
        same = self.depth[rows] == accepted[:, None]
        before = same & (torch.arange(same.shape[1], device=same.device) < branch[:, None])
        rank = torch.where(branch >= 0, before.sum(1), same.sum(1))
        self.statistics.learn(kind, accepted, rank, same.sum(1), known & (num_draft > 0))

    def _describe(
        self, logits: torch.Tensor, drafted: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        """The features of each draft for the acceptance model, [B, 3, K]. logits [B, K, V]."""
        buffers, shape = self._buffers, logits.shape
        greedy = torch.eq(temperature, 0, out=buffers("greedy", torch.bool, len(logits)))
        scale = torch.add(temperature, greedy, out=buffers("scale", torch.float32, len(logits)))
        logq = buffers("logq", torch.float32, *shape[:2])
        entropy = buffers("entropy", torch.float32, *shape[:2])
        # One draft of each row at a time: what has the vocabulary's size is kept.
        scaled = buffers("scaled", torch.float32, shape[0], shape[2])
        log_prob = buffers("log_prob", torch.float32, shape[0], shape[2])
        for at in range(shape[1]):
            torch.div(logits[:, at], scale[:, None], out=scaled)
            torch.log_softmax(scaled, -1, out=log_prob)
            torch.gather(log_prob, -1, drafted[:, at, None], out=logq[:, at, None])
            # Probabilities that underflow add nothing to the entropy, and a broken row must not
            # spoil the weights.
            log_prob.clamp_(min=log_tiny(torch.float32))
            torch.exp(log_prob, out=scaled).mul_(log_prob)
            torch.sum(scaled, -1, out=entropy[:, at])
        return self.acceptance.features(logq.nan_to_num_(-12.0), entropy.neg_().nan_to_num_(0.0))

    def _fan_out(self, kind: torch.Tensor, width: int, branches: int, impl: Impl) -> torch.Tensor:
        lengths, exponent = self.statistics.lengths, self.statistics.exponent()
        return allocate_fan_out(lengths[kind, : width + 1], branches, exponent[kind], impl=impl)
