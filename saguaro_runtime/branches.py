"""The chains drafted ahead: one for each likely outcome, found again by the outcome."""

from __future__ import annotations

import torch

from saguaro_kernels import PAD
from saguaro_kernels.cache import SpeculationCache

from .chains import Buffers, ChainStore, allocate_on
from .drafting import Drafter
from .expectations import Predictor
from .round import Turn
from .transfer import CPU, Mailbox


class Branches:
    """Branches of all rows, at most `count` each, in buffers of fixed size.

    They lie on the draft's device, and so do the turns unless a docstring says otherwise. The cache
    of the outcomes that they answer is on the host: on a GPU the outcomes are copied there while
    the branches are still being drafted.
    """

    def __init__(self, drafter: Drafter, rows: int, count: int, allocation: str) -> None:
        self.drafter, self.count = drafter, count
        sizes = (drafter.draft_len, drafter.vocab_size, drafter.model.dtype)
        # The row behind a whole chain is made once the chain is in use.
        device = drafter.device
        self.store = ChainStore(
            (rows, count), *sizes, allocate_on(device), logit_rows=drafter.draft_len
        )
        self.predictor = Predictor(rows, drafter.draft_len, count, allocation, device)
        self.cache = SpeculationCache(max(2 * rows * count, 2), max(rows * count, 1), "cpu")
        self._impl = drafter.impl if drafter.on_host else "reference"
        self._outcomes = Mailbox(device)
        self._unfiled: Turn | None = None
        """The turn whose predicted outcomes are on their way."""
        self._base = torch.full((rows,), -1, dtype=torch.int64, device=device)
        """The round whose outcomes a row's branches answer."""
        self._shape = (drafter.draft_len, count)
        self._generation = torch.zeros(1, dtype=torch.int64)
        self._slots = torch.arange(rows * count, dtype=torch.int32).view(rows, count)
        self._keys = Buffers(rows, CPU)

    def forget(self, row: int) -> None:
        """The row has a new request: its branches are for nothing now."""
        self._base[row] = -1

    def lookup(self, turn: Turn) -> torch.Tensor:
        """The branch that answers each row's outcome, PAD where none does: [B] int32. The turn and
        the result are on the host."""
        if self._unfiled is not None:
            self._file(self._unfiled, *self._outcomes.take())
            self._unfiled = None
        self._generation.fill_(turn.number - 1)
        found = self.cache.lookup(
            turn.uid,
            self._generation,
            turn.base - turn.accepted - 1,
            turn.accepted,
            turn.last,
            impl=self._impl,
        )
        hit = found.hit & (turn.accepted >= 0)
        return torch.where(hit, found.slot % max(self.count, 1), PAD)

    def learn(self, turn: Turn, branch: torch.Tensor) -> None:
        """Take the outcomes of the turn's rows, before their chains are replaced."""
        self.predictor.learn(turn, self.drafter.chain, branch)

    def promote(self, turn: Turn, branch: torch.Tensor) -> None:
        """Make branch [B] the chain of each row; only the key of its last token is missing then."""
        drafter, rows, base = self.drafter, turn.rows, turn.base
        draft_len, branches = self._shape
        with drafter.timeline.span("promote"):
            drafter.model.promote(
                rows,
                (base - turn.accepted - 2).to(torch.int32),
                turn.accepted,
                branch,
                draft_len,
                branches,
            )
        chain = drafter.chain
        chain.take(rows, self.store, (rows, branch.to(torch.int64)))
        chain.num_draft[rows] = torch.minimum(chain.num_draft[rows], turn.budget)
        drafter.history.add_chain(rows, base, chain)
        drafter.fed[rows] = base - 1 + draft_len

    def replay(self, turn: Turn) -> torch.Tensor:
        """Copy the likeliest branch of the accepted length to the chain; its number of drafts [B].

        Its noise is that of the coming round. A branch of another length holds another round's,
        which would bias the text.
        """
        rows = turn.rows
        same = self.predictor.depth[rows] == turn.accepted[:, None]
        same &= (self._base[rows] == turn.base - turn.accepted - 1)[:, None]
        first = torch.where(same, torch.arange(self.count, device=same.device), self.count).amin(1)
        chain = self.drafter.chain
        chain.take(rows, self.store, (rows, first.clamp(max=self.count - 1)))
        return torch.where(first < self.count, chain.num_draft[rows], 0)

    def draft(self, turn: Turn, on_host: Turn) -> None:
        """Draft ahead for the chains of the turn, step by step and without waiting for a value.
        `on_host`: the same turn with its tensors on the host."""
        drafter, rows, decision = self.drafter, turn.rows, turn.decision
        draft_len, branches, buffers = decision.draft_len, decision.branches, drafter.buffers
        trunk_len = torch.sub(turn.base, 1, out=buffers("trunk", torch.int32, len(rows)))
        with drafter.timeline.span("predict", len(rows)):
            depth, extra = self.predictor.predict(turn, drafter)
        if not drafter.on_host:
            self._outcomes.post(depth, extra)
            self._unfiled = on_host
        each = rows[:, None].expand_as(depth)
        bases = buffers("bases", torch.int64, *depth.shape)
        torch.add(turn.base[:, None], depth, out=bases).add_(1)
        draws = drafter.prepare(each, bases, decision)
        tokens = buffers("extra", torch.int64, *extra.shape)
        torch.clamp(extra, min=0, out=tokens)  # unused branches
        for step in range(draft_len):
            with drafter.timeline.span("tree_step", depth.numel()):
                logits = drafter.model.decode_tree(rows, tokens, trunk_len, depth, draft_len, step)
                logits = logits[..., : drafter.vocab_size]
            self.store.logits[rows, :branches, step] = logits
            with drafter.timeline.span("sample", depth.numel()):
                where = rows, slice(0, branches)
                tokens = drafter.draw(draws, logits, step, self.store, where)
        self.store.num_draft.index_fill_(0, rows, draft_len)
        self.store.downweight.index_fill_(0, rows, decision.downweight)
        self._base[rows] = turn.base
        self._shape = (draft_len, branches)
        if drafter.on_host:
            self._file(turn, depth, extra)

    def _file(self, turn: Turn, depth: torch.Tensor, extra: torch.Tensor) -> None:
        """Enter the branches in the cache by the outcome they answer; slot = row * count + i."""
        self._generation.fill_(turn.number)
        shape = depth.shape
        self.cache.insert(
            self._keys("uid", torch.int64, *shape).copy_(turn.uid[:, None]).flatten(),
            self._generation,
            self._keys("base", torch.int64, *shape).copy_(turn.base[:, None]).flatten(),
            depth.flatten(),
            extra.flatten(),
            self._keys.gather("slot", self._slots[:, : shape[1]], turn.rows).flatten(),
            impl=self._impl,
        )
