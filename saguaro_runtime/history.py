"""Each row's text as the drafter knows it: what it may repeat, and what its keys can be made of."""

from __future__ import annotations

import torch

from saguaro_kernels import Impl
from saguaro_kernels.ngram import ngram_propose

from .chains import ChainStore
from .round import Turn
from .transfer import CPU, send


class History:
    """Tokens of all rows by position; behind the text stand the drafts of the chain in use."""

    def __init__(self, rows: int, draft_len: int, device: torch.device = CPU) -> None:
        self.tokens = torch.zeros(rows, 64, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows] int64: committed tokens."""
        self._steps = torch.arange(draft_len + 1, device=device)

    def admit(self, row: int, prompt: list[int], slots: int) -> None:
        """Start a row with its prompt; it may grow to `slots` tokens."""
        width = self.tokens.shape[1]
        if slots > width:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, max(slots, 2 * width) - width))
        self.tokens[row, : len(prompt)] = send(self.tokens.device, torch.tensor(prompt))[0]
        self.length[row] = len(prompt)

    def commit(self, turn: Turn, chain: ChainStore) -> None:
        """Take what the last round committed: the accepted drafts of `chain` and one token more.

        A row that has sat the round out brings the same outcome again, which changes nothing.
        """
        rows, accepted = turn.rows, turn.accepted.clamp(min=0).to(torch.int64)
        grown = (turn.base > self.length[rows])[:, None]
        drafts = torch.nn.functional.pad(chain.tokens[rows], (0, 1))
        values = torch.where(self._steps < accepted[:, None], drafts, turn.last[:, None])
        # What lies behind the last token is written there as well: equal values, any order.
        start = (turn.base - 1 - accepted)[:, None]
        where = torch.minimum(start + self._steps, turn.base[:, None] - 1).clamp(min=0)
        old = self.tokens[rows[:, None], where]
        self.tokens[rows[:, None], where] = torch.where(grown, values, old)
        self.length[rows] = turn.base

    def add_chain(self, rows: torch.Tensor, base: torch.Tensor, chain: ChainStore) -> None:
        """Put the chains of `rows` behind their texts of `base` tokens."""
        tokens = chain.tokens[rows]
        where = base[:, None] + self._steps[: tokens.shape[1]]
        self.tokens[rows[:, None], where.clamp(max=self.tokens.shape[1] - 1)] = tokens

    def propose(
        self, rows: torch.Tensor, base: torch.Tensor, count: int, *, impl: Impl
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed the last tokens earlier in the text: [B, count] tokens, [B] how many."""
        # One token alone repeats everywhere and says little of what follows.
        return ngram_propose(self.tokens[rows], base, num_tokens=count, max_n=4, min_n=2, impl=impl)

    def columns(self, rows: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
        """[B, count] tokens at positions start [B] + 0..count-1."""
        where = start[:, None] + torch.arange(count, device=start.device)
        return self.tokens[rows[:, None], where.clamp(max=self.tokens.shape[1] - 1)]
