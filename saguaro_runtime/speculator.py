"""The drafter's side of a round: answer an outcome with a chain, then draft ahead for the next one.

    next_chain(turn)    hit: the branch drafted for this outcome becomes the chain, keys and all
                        miss: the row is redrafted, as far as the turn allows
    look_ahead()        predict the outcomes of the chain, draft a branch for each, file them

With branches = 0 this is the drafter of standard speculative decoding. Only draft probabilities
and the noise the verifier itself will use decide what is prepared; nothing here can change what is
accepted.
"""

from __future__ import annotations

import torch

from saguaro_kernels import PAD, Sample, Stream, saguaro_sample
from saguaro_kernels._launch import Impl
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.distribution.reference import exp_reference
from saguaro_kernels.outcomes import Allocation, Ranking, predict_outcomes

from .acceptance import AcceptanceModel
from .config import Rule
from .metrics import Timeline
from .models.protocol import Model
from .round import Admission, Allocate, ChainStore, RowTable, Turn, allocate_zeros


class Speculator:
    """Chains and branches of all rows. One per draft model; any lane can run it."""

    def __init__(
        self,
        model: Model,
        *,
        rows: int,
        draft_len: int,
        branches: int,
        rule: Rule = "token",
        ranking: Ranking = "auto",
        allocation: Allocation = "uniform",
        target_vocab: int | None = None,
        impl: Impl = "auto",
        allocate: Allocate = allocate_zeros,
        timeline: Timeline | None = None,
    ) -> None:
        self.model, self.draft_len, self.branches, self.impl = model, draft_len, branches, impl
        self.ranking: Ranking = "coupled" if rule == "coupled" else ranking
        self.allocation = allocation
        self.stream = Stream.COUPLED if rule == "coupled" else Stream.DRAFT
        self.timeline = timeline or Timeline("draft")
        self.table = RowTable(rows)
        # Ids the target does not have are never drafted; ids the draft does not have are never fed.
        self.vocab_size = min(model.vocab_size, target_vocab or model.vocab_size)
        sizes = (draft_len, self.vocab_size, model.dtype)
        self.chain = ChainStore((rows,), *sizes, allocate=allocate)
        self.branch = ChainStore((rows, branches), *sizes)
        self.branch.num_draft.fill_(draft_len)
        self.depth = torch.full((rows, branches), PAD, dtype=torch.int32)
        entries = rows * branches
        self.cache = SpeculationCache(max(2 * entries, 2), max(entries, 1), torch.device("cpu"))
        self.acceptance = AcceptanceModel(draft_len)
        self._features = self.acceptance.features(*torch.zeros(2, rows, draft_len))
        self._expected = torch.zeros(rows, dtype=torch.bool)
        self._held: dict[int, int] = {}  # how many slots of a row hold keys of its text
        self._turn: Turn | None = None

    def admit(self, admissions: list[Admission]) -> None:
        """Take in the prompts of new rows, all but the last token, and what the texts of others
        have become."""
        for its in admissions:
            if its.row not in self._held:
                self.table.set(its.row, its.params)
                self.model.allocate(its.row, its.slots + self.scratch_slots)
                self._held[its.row] = 0
            self.chain.num_draft[its.row] = 0
            start = self._held[its.row]
            if len(its.prompt) - 1 > start:
                with self.timeline.span("prefill"):
                    tokens = torch.tensor(its.prompt[start:-1])
                    tokens = tokens.clamp(max=self.model.vocab_size - 1)
                    self.model.prefill(its.row, tokens, start)
                    self._held[its.row] = len(its.prompt) - 1

    @property
    def scratch_slots(self) -> int:
        """Key-value slots a row needs beside its tokens: a chain and all branches."""
        return (self.draft_len + 1) * (self.branches + 1)

    def release(self, rows: list[int]) -> None:
        for row in self._held.keys() & set(rows):
            del self._held[row]
            self.model.release(row)

    def next_chain(self, turn: Turn) -> torch.Tensor:
        """Make each row's next chain; returns whether the outcome was predicted, [B] bool."""
        self._learn(turn)
        found = self.cache.lookup(
            turn.uid,
            torch.full_like(turn.uid, turn.number - 1),
            turn.base - turn.accepted - 1,
            turn.accepted,
            turn.last,
            impl=self.impl,
        )
        hit = found.hit & (turn.accepted >= 0)
        branch = torch.where(hit, found.slot % max(self.branches, 1), PAD).to(torch.int32)
        if bool(hit.any()):
            with self.timeline.span("promote"):
                self._promote(turn, branch)
            rows = turn.rows[hit]
            self.chain.take(rows, self.branch, (rows, branch[hit].to(torch.int64)))
            self.chain.num_draft[rows] = turn.budget[hit].clamp(max=self.draft_len)
        self._redraft(turn, ~hit)
        self._held |= zip(turn.rows.tolist(), (turn.base - 1).tolist(), strict=True)
        self._turn = turn
        return hit

    def look_ahead(self, *, late: bool = False) -> None:
        """Draft a branch for each likely outcome of the chains handed out last.

        late: the next turn has come already; feed what the keys need and leave the branches.
        """
        turn = self._turn
        if turn is None:
            return
        with self.timeline.span("look_ahead"):
            self._feed_last(turn)
            if self.branches and not late:
                self._draft_branches(turn)

    def _promote(self, turn: Turn, branch: torch.Tensor) -> None:
        trunk_len = turn.base - turn.accepted - 2
        self.model.promote(
            turn.rows,
            trunk_len.clamp(min=0).to(torch.int32),
            turn.accepted.clamp(min=0),
            branch,
            self.draft_len,
            self.branches,
        )

    def _redraft(self, turn: Turn, missed: torch.Tensor) -> None:
        """Draft the chains of missed rows token by token; rows leave as their length is reached."""
        length = torch.minimum(turn.retry, turn.budget).clamp(max=self.draft_len)
        length = torch.where(turn.accepted >= 0, length, 0)
        self.chain.num_draft[turn.rows[missed]] = length[missed]
        tokens = turn.last
        for step in range(int(length[missed].max()) if bool(missed.any()) else 0):
            going = missed & (length > step)
            rows, base = turn.rows[going], turn.base[going]
            with self.timeline.span("draft_step"):
                logits = self._feed(rows, tokens[going], base - 1 + step)
                sample = self._sample(logits, rows, base, step)
            self.chain.put((rows,), step, sample)
            self.chain.logits[rows, step] = logits
            tokens = tokens.index_copy(0, going.nonzero()[:, 0], sample.tokens)

    def _feed_last(self, turn: Turn) -> None:
        """Feed the last token of the chains: its key, and the row that follows the chain.

        Left until the chain is on its way: nobody waits for it, and of all branches one needs it.
        """
        count = self.chain.num_draft[turn.rows].to(torch.int64)
        drafted = self.chain.tokens[turn.rows, (count - 1).clamp(min=0)]
        tokens = torch.where(count > 0, drafted, turn.last)
        with self.timeline.span("feed_last"):
            logits = self._feed(turn.rows, tokens, turn.base - 1 + count)
            self.chain.logits[turn.rows, count] = logits

    def _draft_branches(self, turn: Turn) -> None:
        rows = turn.rows
        trunk_len = (turn.base - 1).to(torch.int32)
        with self.timeline.span("predict"):
            logits, drafted = self.chain.logits[rows], self.chain.tokens[rows]
            num_draft = self.chain.num_draft[rows]
            outcomes = predict_outcomes(
                logits,
                drafted,
                num_draft,
                self.table.sampling(rows),
                self.table.keys(rows, turn.base),
                accept_prob=self._accept_prob(rows, logits[:, :-1], drafted, num_draft),
                branches=self.branches,
                ranking=self.ranking,
                allocation=self.allocation,
                impl=self.impl,
            )
        self.depth[rows] = outcomes.depth
        tokens = outcomes.tokens.clamp(min=0)  # unused branches
        bases = turn.base[:, None] + outcomes.depth + 1
        for step in range(self.draft_len):
            with self.timeline.span("tree_step"):
                logits = self.model.decode_tree(
                    rows, tokens, trunk_len, outcomes.depth, self.draft_len, step
                )[..., : self.vocab_size]
            self.branch.logits[rows, :, step] = logits
            with self.timeline.span("sample"):
                sample = self._sample(
                    logits.flatten(0, 1),
                    rows.repeat_interleave(self.branches),
                    bases.flatten(),
                    step,
                )
            self.branch.put((rows,), step, sample)
            tokens = sample.tokens.view_as(tokens)
        self._file(turn, outcomes.depth, outcomes.tokens)

    def _accept_prob(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        drafted: torch.Tensor,
        num_draft: torch.Tensor,
    ) -> torch.Tensor | None:
        """P(k) of the chains, [B, K + 1]; what it is made of is kept to learn from the outcome."""
        if self.allocation != "best":
            return None
        temperature = self.table.temperature[rows]
        greedy = temperature == 0
        scale = torch.where(greedy, 1.0, temperature)[:, None, None]
        log_prob = (logits.float() / scale).log_softmax(-1)
        logq = log_prob.gather(-1, drafted[..., None].clamp(0, self.vocab_size - 1))[..., 0]
        # A zero probability adds nothing to the entropy, and a broken row must not spoil the
        # weights.
        entropy = -(exp_reference(log_prob) * log_prob).nan_to_num(0.0).sum(-1)
        self._features[rows] = self.acceptance.features(logq.nan_to_num(-12.0), entropy)
        self._expected[rows] = True
        return self.acceptance.lengths(self._features[rows], greedy, num_draft)

    def _learn(self, turn: Turn) -> None:
        """Take the outcome of chains whose lengths were estimated."""
        known = self._expected[turn.rows] & (turn.accepted >= 0)
        rows = turn.rows[known]
        if len(rows):
            greedy = self.table.temperature[rows] == 0
            self.acceptance.learn(
                self._features[rows], greedy, self.chain.num_draft[rows], turn.accepted[known]
            )
        self._expected[turn.rows] = False

    def _file(self, turn: Turn, depth: torch.Tensor, extra: torch.Tensor) -> None:
        """Enter the branches in the cache by the outcome they answer; slot = row * M + branch."""
        used = depth >= 0
        slot = turn.rows[:, None] * self.branches + torch.arange(self.branches)
        spread = lambda value: value[:, None].expand_as(used)[used]  # noqa: E731
        self.cache.insert(
            spread(turn.uid),
            torch.full_like(slot[used], turn.number),
            spread(turn.base),
            depth[used],
            extra[used],
            slot[used].to(torch.int32),
            impl=self.impl,
        )

    def _feed(
        self, rows: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Feed one token [B] per row at position [B]; its logits [B, V]."""
        tokens = tokens.clamp(max=self.model.vocab_size - 1)[:, None]
        return self.model.extend(rows, tokens, position.to(torch.int32))[:, 0, : self.vocab_size]

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, base: torch.Tensor, offset: int
    ) -> Sample:
        return saguaro_sample(
            logits,
            self.table.sampling(rows),
            self.table.keys(rows, base),
            offset=offset,
            stream=self.stream,
            impl=self.impl,
        )
