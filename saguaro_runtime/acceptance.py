"""How likely is each outcome? Learned from the outcomes of the rounds before.

    c_i = sigmoid(w_0 + w_1 log q(d_i) + w_2 log(1 + H_i) + b_i)        draft i is kept if it is
    reached P(k) = c_1 .. c_k (1 - c_{k+1}),   P(num_draft) = c_1 .. c_num_draft

q and H (its entropy) are those of the draft's row at temperature 1 for greedy requests, at their
own otherwise. Beside it a histogram of accepted lengths and the exponent r of the miss probability
of F candidates, F^-r, for the fan-out of arXiv 2603.03251, Theorem 12. All of it ranks branches and
does nothing else, so errors in it cost hits and never change the text.
"""

from __future__ import annotations

import torch

from .chains import Buffers
from .transfer import CPU

GREEDY, COOL, HOT, PROPOSED = range(4)
"""Kinds of chains: temperature 0, below 1/2, from 1/2 on; and deterministic proposals."""
KINDS = 4
_PRIOR_R = 0.5


class AcceptanceModel:
    """Online logistic regression with weights of their own for each kind of chain.

    features [B, 3, K] float64: 1, log q and log(1 + H) of each draft.
    """

    def __init__(
        self, rows: int, draft_len: int, *, rate: float = 0.3, device: torch.device = CPU
    ) -> None:
        self.weights = torch.zeros(KINDS, 3 + draft_len, dtype=torch.float64, device=device)
        # The first guess: acceptance grows with the draft's own probability of the token.
        self.weights[:, 0], self.weights[:, 1] = 1.0, 0.7
        self._squares = torch.full_like(self.weights, 1.0)
        self._rate = rate
        self._bounds = torch.tensor([torch.finfo(torch.float32).tiny, 0.5], device=device)
        self._index = torch.arange(draft_len, device=device)
        self._buffers = Buffers(rows, device)

    def kinds(self, temperature: torch.Tensor, one_hot: torch.Tensor) -> torch.Tensor:
        """The kind of each row's chain: [B] int64. Writes one_hot [B]."""
        kind = self._buffers("kind", torch.int64, len(temperature))
        torch.bucketize(temperature, self._bounds, right=True, out=kind)
        return kind.masked_fill_(one_hot.logical_and_(kind), PROPOSED)

    def features(self, logq: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """logq, entropy [B, W <= K] -> [B, 3, K], of any values behind W."""
        batch, width = logq.shape
        features = self._buffers("features", torch.float64, batch, 3, len(self._index))
        features[:, 0].fill_(1.0)
        features[:, 1, :width].copy_(logq).clamp_(min=-12.0)
        features[:, 2, :width].copy_(entropy).clamp_(min=0.0).log1p_()
        return features

    def keep(self, features: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """c_i of each draft: [B, K]. kind [B] int64."""
        weights = self._buffers.gather("weights", self.weights, kind)[:, None]
        keep = self._buffers("keep", torch.float64, len(kind), 1, len(self._index))
        torch.baddbmm(weights[..., 3:], weights[..., :3], features, out=keep)
        return keep[:, 0].sigmoid_()

    def lengths(
        self, features: torch.Tensor, kind: torch.Tensor, num_draft: torch.Tensor
    ) -> torch.Tensor:
        """P(k) for k = 0..K: [B, K + 1] float32, 0 beyond num_draft."""
        keep = self.keep(features, kind)
        batch, width = keep.shape
        # No draft is kept behind the last one; P(k) = P(reach k) - P(reach k + 1).
        none = self._buffers("none", torch.bool, batch, width)
        torch.ge(self._index, num_draft[:, None], out=none)
        reach = self._buffers("reach", torch.float64, batch, width + 2)
        reach[:, 0].fill_(1.0)
        reach[:, -1].fill_(0.0)
        torch.cumprod(keep.masked_fill_(none, 0.0), 1, out=reach[:, 1:-1])
        law = self._buffers("law", torch.float32, batch, width + 1)
        return torch.sub(reach[:, :-1], reach[:, 1:], out=law)

    def learn(
        self,
        features: torch.Tensor,
        kind: torch.Tensor,
        num_draft: torch.Tensor,
        accepted: torch.Tensor,
        known: torch.Tensor,
    ) -> None:
        """Take a round's outcomes: accepted [B] of num_draft [B] drafts, where `known` [B]."""
        error = self.keep(features, kind).neg_().add_(self._index < accepted[:, None])
        judged = torch.minimum(accepted + 1, num_draft) * known
        error.masked_fill_(self._index >= judged[:, None], 0.0)
        slope = torch.cat(((features * error[:, None]).sum(-1), error), dim=-1)
        step = torch.zeros_like(self.weights).index_add_(0, kind, slope)
        self._squares.addcmul_(step, step)
        self.weights.addcdiv_(step, self._squares.sqrt(), value=self._rate)


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
