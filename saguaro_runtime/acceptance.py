"""How likely is each outcome? Learned from the outcomes of the rounds before.

    c_i = sigmoid(w_0 + w_1 log q(d_i) + w_2 log(1 + H_i) + b_i)        draft i is kept if it is
    reached P(k) = c_1 .. c_k (1 - c_{k+1}),   P(num_draft) = c_1 .. c_num_draft

q and H (its entropy) are those of the draft's row at temperature 1 for greedy requests, at their
own otherwise. Beside it a histogram of accepted lengths and the exponent r of the miss probability
of F candidates, F^-r, for the fan-out of arXiv 2603.03251, Theorem 12. All of it ranks branches and
does nothing else, so it may be as wrong as it likes.
"""

from __future__ import annotations

import torch

from .transfer import CPU

GREEDY, COOL, HOT, PROPOSED = range(4)
"""Kinds of chains: temperature 0, below and from 1/2 on, and drafts that nobody drew."""
KINDS = 4
_PRIOR_R = 0.5


def kinds(temperature: torch.Tensor, one_hot: torch.Tensor) -> torch.Tensor:
    """The kind of each row's chain: [B] int64."""
    kind = torch.where(temperature < 0.5, COOL, HOT).masked_fill(temperature == 0, GREEDY)
    return kind.masked_fill(one_hot & (temperature > 0), PROPOSED)


class AcceptanceModel:
    """Online logistic regression with weights of their own for each kind of chain."""

    def __init__(self, draft_len: int, *, rate: float = 0.3, device: torch.device = CPU) -> None:
        self.weights = torch.zeros(KINDS, 3 + draft_len, dtype=torch.float64, device=device)
        # The first guess: a token is kept about as often as the draft believes in it.
        self.weights[:, 0], self.weights[:, 1] = 1.0, 0.7
        self._squares = torch.full_like(self.weights, 1.0)
        self._rate = rate

    def features(self, logq: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """logq, entropy [B, W <= K] -> [B, K, 3 + K] float64: 1, log q, log(1 + H), position."""
        positions = self.weights.shape[1] - 3
        missing = (0, positions - logq.shape[1])
        logq = torch.nn.functional.pad(logq.double().clamp(min=-12.0), missing)
        spread = torch.nn.functional.pad(entropy.double().clamp(min=0.0).log1p(), missing)
        row = torch.stack((torch.ones_like(logq), logq, spread), dim=-1)
        position = torch.eye(positions, dtype=row.dtype, device=row.device).expand(
            len(logq), -1, -1
        )
        return torch.cat((row, position), dim=-1)

    def keep(self, features: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """c_i of each draft: [B, K]. kind [B] int64."""
        return (features * self.weights[kind][:, None]).sum(-1).sigmoid()

    def lengths(
        self, features: torch.Tensor, kind: torch.Tensor, num_draft: torch.Tensor
    ) -> torch.Tensor:
        """P(k) for k = 0..K: [B, K + 1] float32, 0 beyond num_draft."""
        keep = self.keep(features, kind)
        batch, width = keep.shape
        index = torch.arange(width + 1, device=keep.device)
        reached = torch.cat((keep.new_ones(batch, 1), keep.cumprod(-1)), dim=-1)
        stops = torch.cat((1 - keep, keep.new_ones(batch, 1)), dim=-1)
        last = index == num_draft[:, None]
        law = reached * torch.where(last, 1.0, stops)
        return law.masked_fill(index > num_draft[:, None], 0.0).float()

    def learn(
        self,
        features: torch.Tensor,
        kind: torch.Tensor,
        num_draft: torch.Tensor,
        accepted: torch.Tensor,
        known: torch.Tensor,
    ) -> None:
        """Take a round's outcomes: accepted [B] of num_draft [B] drafts, where `known` [B]."""
        index = torch.arange(features.shape[1], device=features.device)
        error = (index < accepted[:, None]).double() - self.keep(features, kind)
        seen = (index <= accepted[:, None]) & (index < num_draft[:, None]) & known[:, None]
        slope = ((error * seen)[..., None] * features).sum(1)
        step = torch.zeros_like(self.weights).index_add_(0, kind, slope)
        self._squares += step**2
        self.weights += self._rate * step / self._squares.sqrt()


class OutcomeStatistics:
    """Accepted lengths by kind of chain, and how fast the miss probability falls with F."""

    THRESHOLDS = (1, 2, 4, 8)

    def __init__(self, draft_len: int, *, keep: float = 0.98, device: torch.device = CPU) -> None:
        self.lengths = torch.full((KINDS, draft_len + 1), 0.5, device=device)
        self.asked = torch.zeros(KINDS, len(self.THRESHOLDS), device=device)
        self.missed = torch.zeros(KINDS, len(self.THRESHOLDS), device=device)
        self._keep = keep
        self._thresholds = torch.tensor(self.THRESHOLDS, device=device)

    def learn(
        self,
        kind: torch.Tensor,
        accepted: torch.Tensor,
        rank: torch.Tensor,
        fan: torch.Tensor,
        known: torch.Tensor,
    ) -> None:
        """Take outcomes: `rank` [B] of the extra token among the `fan` [B] candidates of its length
        (fan where it was none of them)."""
        width = self.lengths.shape[1]
        one = torch.arange(width, device=accepted.device) == accepted[:, None]
        seen = (
            torch.zeros(KINDS, device=kind.device)
            .index_add_(0, kind, known.float())
            .clamp(max=1.0)[:, None]
        )
        fade = 1 - (1 - self._keep) * seen
        asked = (fan[:, None] >= self._thresholds) & known[:, None]
        missed = asked & (rank[:, None] >= self._thresholds)
        for table, new in (
            (self.lengths, one & known[:, None]),
            (self.asked, asked),
            (self.missed, missed),
        ):
            table.mul_(fade).index_add_(0, kind, new.float())

    def exponent(self) -> torch.Tensor:
        """r of each kind: [KINDS] float32, the slope of log miss over log F by least squares.

        Each threshold counts by the misses behind it; the prior by ten of them.
        """
        x = self._thresholds.float().log()
        y = ((self.missed + 0.5) / (self.asked + 1.0)).log()
        weight = self.missed
        total = weight.sum(-1, keepdim=True).clamp(min=1e-6)
        x_mean, y_mean = ((weight * v).sum(-1, keepdim=True) / total for v in (x, y))
        spread = (weight * (x - x_mean) ** 2).sum(-1)
        slope = -(weight * (x - x_mean) * (y - y_mean)).sum(-1)
        return ((slope + 10 * _PRIOR_R) / (spread + 10)).clamp(0.0, 4.0)
