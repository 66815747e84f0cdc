"""How likely is each accepted length? Learned from the outcomes of the rounds before.

    c_i = sigmoid(w_0 + w_1 log q(d_i) + w_2 log(1 + H_i) + b_i)        draft i is kept if it is
    reached P(k) = c_1 .. c_k (1 - c_{k+1}),   P(num_draft) = c_1 .. c_num_draft

q and H (its entropy) are those of the draft's row at temperature 1 for greedy requests, at their
own otherwise. The estimate ranks branches and does nothing else, so it may be as wrong as it likes.
"""

from __future__ import annotations

import torch


class AcceptanceModel:
    """Online logistic regression, with weights of their own for greedy and sampled requests."""

    def __init__(self, draft_len: int, *, rate: float = 0.3) -> None:
        self.weights = torch.zeros(2, 3 + draft_len, dtype=torch.float64)
        # The first guess: a token is kept about as often as the draft believes in it.
        self.weights[:, 0], self.weights[:, 1] = 1.0, 0.7
        self._squares = torch.full_like(self.weights, 1.0)
        self._rate = rate

    def features(self, logq: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """logq, entropy [B, K] -> [B, K, 3 + K] float64: 1, log q, log(1 + H), and the position."""
        batch, width = logq.shape
        one = torch.ones(batch, width, dtype=torch.float64)
        position = torch.eye(self.weights.shape[1] - 3, dtype=torch.float64)[:width]
        rest = position.expand(batch, -1, -1)
        row = (one, logq.double().clamp(min=-12.0), entropy.double().clamp(min=0.0).log1p())
        return torch.cat((torch.stack(row, dim=-1), rest), dim=-1)

    def keep(self, features: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        """c_i of each draft: [B, K]. greedy [B] bool."""
        weights = self.weights[greedy.long()]
        return (features * weights[:, None]).sum(-1).sigmoid()

    def lengths(
        self, features: torch.Tensor, greedy: torch.Tensor, num_draft: torch.Tensor
    ) -> torch.Tensor:
        """P(k) for k = 0..K: [B, K + 1] float32, 0 beyond num_draft."""
        keep = self.keep(features, greedy)
        batch, width = keep.shape
        index = torch.arange(width + 1)
        reached = torch.cat((keep.new_ones(batch, 1), keep.cumprod(-1)), dim=-1)
        stops = torch.cat((1 - keep, keep.new_ones(batch, 1)), dim=-1)
        last = index == num_draft[:, None]
        law = reached * torch.where(last, 1.0, stops)
        return law.masked_fill(index > num_draft[:, None], 0.0).float()

    def learn(
        self,
        features: torch.Tensor,
        greedy: torch.Tensor,
        num_draft: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """Take the outcomes of a round: accepted [B] of num_draft [B] drafts."""
        error = -self.keep(features, greedy)
        index = torch.arange(error.shape[1])
        error += (index < accepted[:, None]).double()
        seen = (index <= accepted[:, None]) & (index < num_draft[:, None])
        slope = (error * seen)[..., None] * features
        for kind in (0, 1):
            step = slope[greedy.long() == kind].sum((0, 1))
            self._squares[kind] += step**2
            self.weights[kind] += self._rate * step / self._squares[kind].sqrt()
