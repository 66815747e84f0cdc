"""Each row's text as the drafter knows it: the source of n-gram proposals and of tokens to feed."""

from __future__ import annotations

import torch

from saguaro_kernels import Impl
from saguaro_kernels.ngram import ngram_propose

from .chains import Buffers, ChainStore
from .round import Turn
from .transfer import CPU, send


class History:
    """Tokens of all rows by position: the text, then the drafts of the chain in use."""

    def __init__(self, rows: int, draft_len: int, device: torch.device = CPU) -> None:
        self.tokens = torch.zeros(rows, 64, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows] int64: committed tokens."""
        self._steps = torch.arange(draft_len + 1, device=device)
        self._buffers = Buffers(rows, device)

    def admit(self, row: int, prompt: list[int], slots: int) -> None:
        """Start a row with its prompt; it may grow to `slots` tokens."""
        width = self.tokens.shape[1]
        if slots > width:
            with torch.inference_mode(False):  # it outlives the caller's
                more = max(slots, 2 * width) - width
                self.tokens = torch.nn.functional.pad(self.tokens, (0, more))
        self.tokens[row, : len(prompt)] = send(self.tokens.device, torch.tensor(prompt))[0]
        self.length[row] = len(prompt)

    def commit(self, turn: Turn) -> None:
        """Take what the last round committed: the accepted drafts, already in place, and one token.

        A row that has sat a round out brings the same outcome again, which changes nothing.
        """
        self.tokens[turn.rows, turn.base - 1] = turn.last
        self.length[turn.rows] = turn.base

    def add_chain(self, rows: torch.Tensor, base: torch.Tensor, chain: ChainStore) -> None:
        """Put the chains of `rows` after their texts of `base` tokens."""
        tokens = chain.tokens[rows]
        where = base[:, None] + self._steps[: tokens.shape[1]]
        self.tokens[rows[:, None], where.clamp(max=self.tokens.shape[1] - 1)] = tokens

    def propose(
        self, rows: torch.Tensor, base: torch.Tensor, count: int, *, impl: Impl
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed the last tokens earlier in the text: [B, count] tokens, [B] how many."""
        # One token alone repeats everywhere and says little of what follows.
        return ngram_propose(self.tokens[rows], base, num_tokens=count, max_n=4, min_n=2, impl=impl)

    def at(self, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[B] the token of each row at its position [B]."""
        where = self._buffers("where", torch.int64, len(rows))
        torch.add(position, rows, alpha=self.tokens.shape[1], out=where)
        return torch.take(self.tokens, where, out=self._buffers("at", torch.int64, len(rows)))

    def columns(self, rows: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
        """[B, count] tokens at positions start [B] + 0..count-1."""
        where = start[:, None] + torch.arange(count, device=start.device)
        return self.tokens[rows[:, None], where.clamp(max=self.tokens.shape[1] - 1)]
