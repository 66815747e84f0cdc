"""Which outcomes each row is expected to have, and what is learned when they are known."""

from __future__ import annotations

from typing import Any

import torch

from saguaro_kernels import PAD, Impl
from saguaro_kernels.distribution.reference import exp_reference
from saguaro_kernels.outcomes import allocate_fan_out, predict_outcomes

from .acceptance import AcceptanceModel, OutcomeStatistics, kinds
from .chains import ChainStore
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
        self.acceptance = AcceptanceModel(draft_len, device=device)
        self.statistics = OutcomeStatistics(draft_len, device=device)
        zeros = torch.zeros(2, rows, draft_len, device=device)
        self._features = self.acceptance.features(*zeros)
        self._kind = torch.zeros(rows, dtype=torch.int64, device=device)
        self._known = torch.zeros(rows, dtype=torch.bool, device=device)

    def predict(self, turn: Turn, drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor]:
        """The outcomes to prepare for the drafter's chains: accepted length and extra token,
        [B, M] each."""
        rows, branches = turn.rows, turn.decision.branches
        chain, table, width = drafter.chain, drafter.table, turn.decision.draft_len
        logits, drafted = chain.logits[rows, : width + 1], chain.tokens[rows, :width]
        num_draft, temperature = chain.num_draft[rows], table.temperature[rows]
        kind = kinds(temperature, chain.one_hot[rows])
        self._kind[rows], self._known[rows] = kind, True
        if self.allocation == "best":
            columns = drafted if chain.vocab_map is None else chain.vocab_map[drafted].long()
            known = columns.clamp(0, drafter.vocab_size - 1)
            features = self._describe(logits[:, :-1], known, temperature)
            self._features[rows] = features
            law = self.acceptance.lengths(features, kind, num_draft)
            share: dict[str, Any] = {"accept_prob": law[:, : width + 1]}
        elif self.allocation == "histogram":
            share = {"fan_out": self._fan_out(kind, width, branches, drafter.impl)}
        else:
            share = {"allocation": "uniform"}
        outcomes = predict_outcomes(
            logits,
            drafted,
            num_draft,
            table.sampling(rows),
            table.keys(rows, turn.base),
            branches=branches,
            ids=drafter.ids,
            ranking=turn.decision.ranking,  # type: ignore[arg-type]
            impl=drafter.impl,
            **share,
        )
        self.depth[rows] = PAD
        self.depth[rows, :branches] = outcomes.depth
        return outcomes.depth, outcomes.tokens

    def learn(self, turn: Turn, chain: ChainStore, branch: torch.Tensor) -> None:
        """Take the outcomes of the turn's rows, which `chain` had; branch [B]: the one that hit,
        PAD where none did."""
        rows = turn.rows
        known = self._known[rows] & (turn.accepted >= 0)
        self._known[rows] = False
        kind, num_draft = self._kind[rows], chain.num_draft[rows]
        if self.allocation == "best":
            self.acceptance.learn(self._features[rows], kind, num_draft, turn.accepted, known)
        same = self.depth[rows] == turn.accepted[:, None]
        before = same & (torch.arange(same.shape[1], device=same.device) < branch[:, None])
        rank = torch.where(branch >= 0, before.sum(1), same.sum(1))
        self.statistics.learn(kind, turn.accepted, rank, same.sum(1), known & (num_draft > 0))

    def _describe(
        self, logits: torch.Tensor, drafted: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        """What the estimate of each draft's acceptance goes by. logits [B, K, V]."""
        scale = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
        log_prob = (logits.float() / scale).log_softmax(-1)
        logq = log_prob.gather(-1, drafted[..., None])[..., 0]
        # A zero probability adds nothing to the entropy, and a broken row must not spoil the
        # weights.
        entropy = -(exp_reference(log_prob) * log_prob).nan_to_num(0.0).sum(-1)
        return self.acceptance.features(logq.nan_to_num(-12.0), entropy)

    def _fan_out(self, kind: torch.Tensor, width: int, branches: int, impl: Impl) -> torch.Tensor:
        lengths, exponent = self.statistics.lengths, self.statistics.exponent()
        return allocate_fan_out(lengths[kind, : width + 1], branches, exponent[kind], impl=impl)
