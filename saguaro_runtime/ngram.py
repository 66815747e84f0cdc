"""The drafter without a model: proposes what followed a row's last tokens earlier in its text.

Good for code and for text that repeats what it was given. A proposal takes a fraction of a
millisecond, so there is nothing to prepare while the target verifies: with it, method="ssd" is
"sd". The proposal is deterministic, so it is verified as one-hot: each token is accepted with the
target's own probability of it.
"""

from __future__ import annotations

import torch

from saguaro_kernels import Impl

from .chains import ChainStore, allocate_on
from .history import History
from .metrics import Span, Timeline
from .round import Admission, Reply, Turn
from .transfer import CPU

NGRAM = "ngram"
"""Given instead of a draft model; a folder of that name is ./ngram."""


class NgramDrafter:
    """Chains of all rows out of their own texts. It does what a Speculator does for a lane."""

    def __init__(
        self, *, rows: int, draft_len: int, impl: Impl = "auto", device: torch.device = CPU
    ) -> None:
        """`device`: the target's, where the texts and the chains lie."""
        self.draft_len, self.impl = draft_len, impl
        self.timeline = Timeline("draft")
        self.device = device
        self.history = History(rows, draft_len, device)
        self.chain = ChainStore((rows,), draft_len, 1, torch.float32, allocate_on(device))
        self.chain.one_hot.fill_(True)
        self.chain.downweight.fill_(1.0)

    def admit(self, admissions: list[Admission]) -> None:
        """Take the texts of rows."""
        for new in admissions:
            self.history.admit(new.row, new.prompt, new.slots + self.draft_len + 1)

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self.history.length[row] = 0

    def next_chain(self, turn: Turn) -> Reply:
        """Propose each row's next chain; none where its last tokens are new."""
        prepared = torch.zeros(len(turn.rows), dtype=torch.bool)
        turn = turn.on(self.device)
        rows, chain = turn.rows, self.chain
        with self.timeline.span("draft_step"):
            self.history.commit(turn)
            tokens, count = self.history.propose(rows, turn.base, self.draft_len, impl=self.impl)
            chain.tokens[rows] = tokens.clamp(min=0)
            chain.num_draft[rows] = torch.minimum(count, turn.budget)
            self.history.add_chain(rows, turn.base, chain)
        return Reply(prepared, ~prepared)

    def spans(self) -> list[Span]:
        """Its work since the last call."""
        return self.timeline.drain()

    def look_ahead(self, *, late: bool = False) -> None:
        """Nothing: the next proposal takes no time."""
