"""The drafter's side of a round: answer an outcome with a chain, then draft ahead for the next one.

    next_chain(turn)    hit: the branch drafted for this outcome becomes the chain, keys and all
                        miss: the row is redrafted, gets a deterministic proposal, or no draft
    look_ahead()        predict the outcomes of the chain, draft a branch for each, file them

With branches = 0 this is the drafter of standard speculative decoding. Only draft probabilities
and the noise the verifier itself will use decide what is prepared; nothing here can change what is
accepted.

Turns, hits and misses are on the host; the work that they cause is queued on the draft's device.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from saguaro_kernels import Impl, Stream

from .branches import Branches
from .chains import Allocate, allocate_on
from .config import Rule
from .drafting import Drafter
from .graphs import Graphs
from .metrics import Span, Timeline
from .models.protocol import Model
from .params import SamplingParams
from .round import BROKEN, Admission, Decision, Reply, Turn
from .transfer import send


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
        allocation: str = "uniform",
        target_vocab: int | None = None,
        impl: Impl = "auto",
        allocate: Allocate | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`draft_len`, `branches`: the most that any round may ask for."""
        self.model, self.coupled, self.device = model, rule == "coupled", model.device
        self.timeline = timeline or Timeline("draft")
        self.drafter = Drafter(
            model,
            rows=rows,
            draft_len=draft_len,
            # Ids the target does not have are never drafted; ids the draft lacks are never fed.
            vocab_size=min(model.vocab_size, target_vocab or model.vocab_size),
            target_vocab=target_vocab or model.vocab_size,
            stream=Stream.COUPLED if self.coupled else Stream.DRAFT,
            impl=impl,
            allocate=allocate or allocate_on(model.device),
            timeline=self.timeline,
        )
        self.chain = self.drafter.chain
        self.branches = Branches(self.drafter, rows, branches, allocation)
        self._waited = torch.full((rows,), -1, dtype=torch.int64)
        """The base for which a row was redrafted while it sat out."""
        self._awake: Turn | None = None
        self._there: Turn | None = None
        """The turn of `_awake` on the draft's device."""
        self._asleep: Turn | None = None
        self._unfed = False
        """Some chain is a proposal that has not been fed to the draft."""

    @property
    def scratch_slots(self) -> int:
        """Key-value slots a row needs beside its tokens: a chain and all branches."""
        return (self.drafter.draft_len + 1) * (self.branches.count + 1)

    def warm_up(self) -> None:
        """Draft for a row without a request, on every path, so that graphs are captured and kernels
        compiled before the first request."""
        if isinstance(self.model, Graphs):
            self.model.warm_up()
        draft_len = self.drafter.draft_len
        self.admit([Admission(0, [0, 0], SamplingParams(temperature=1.0), 2)])
        for retry, proposal in ((draft_len, "none"), (0, "ngram")):
            turn = Turn.dummy(Decision(draft_len, self.branches.count, retry, proposal))
            self.next_chain(turn)
            self.look_ahead()
        if self.branches.count:
            first = torch.zeros(1, dtype=torch.int64)
            self.branches.promote(turn.on(self.device), *send(self.device, first))
        self.branches.lookup(turn)
        self.release([0])

    def admit(self, admissions: list[Admission]) -> None:
        """Prefill the texts of rows, all but the last token."""
        for new in admissions:
            self._waited[new.row] = -1
            self.branches.forget(new.row)
            self.drafter.admit(new, self.scratch_slots)

    def spans(self) -> list[Span]:
        """Its spans since the last call; a BROKEN one counts unusable rows of logits."""
        spans, drafter = self.timeline.drain(), self.drafter
        if drafter.on_host and (broken := int(drafter.broken)):
            drafter.broken.zero_()
            now = time.monotonic()
            spans.append(Span(self.timeline.lane, BROKEN, now, now, broken))
        return spans

    def release(self, rows: list[int]) -> None:
        self.drafter.release(rows)

    def next_chain(self, turn: Turn) -> Reply:
        """Make each row's next chain, and say whether its outcome was predicted."""
        if self.coupled:
            decision = turn.decision._replace(ranking="coupled")
            turn = dataclasses.replace(turn, decision=decision)
        branch = self.branches.lookup(turn)
        there = turn.on(self.device)
        (branch_there,) = send(self.device, branch)
        self.drafter.commit(there)
        waited = self._waited[turn.rows] == turn.base
        hit = (branch >= 0) & ~waited
        self.branches.learn(there, branch_there)
        ready, everybody = torch.ones_like(hit), bool(hit.all())
        self._unfed = False
        if everybody:
            self.branches.promote(there, branch_there)
        else:
            if bool(hit.any()):
                hits = turn.select(hit).on(self.device)
                self.branches.promote(hits, *send(self.device, branch[hit]))
            missed = ~(hit | waited)
            asleep = missed & (turn.accepted >= 0)
            if turn.decision.sit_out and not bool(asleep.all()):
                ready, missed = ~asleep, missed & ~asleep
            self._answer_misses(turn.select(missed))
            everybody = bool(ready.all())
        self._awake = turn if everybody else turn.select(ready)
        self._there = there if everybody else self._awake.on(self.device)
        self._asleep = None if everybody else turn.select(~ready)
        return Reply(hit, ready)

    def look_ahead(self, *, late: bool = False) -> None:
        """Draft a branch for each likely outcome of the chains handed out last.

        late: the next turn has arrived already; skip the branches, and feed the chains later.
        """
        turn, there, asleep = self._awake, self._there, self._asleep
        self._awake = self._there = self._asleep = None
        if turn is None or there is None:
            return
        if late or not turn.decision.draft_len:
            self.drafter.behind = True
            return
        with self.timeline.span("look_ahead"):
            if asleep is not None:
                self.drafter.redraft(asleep, asleep.budget.clamp(max=asleep.decision.retry))
                self._waited[asleep.rows] = asleep.base
            if self._unfed or self.drafter.behind:
                self.drafter.catch_up(turn)
                self.drafter.feed_chains(there)
            else:
                self.drafter.feed_last(there)
            if turn.decision.branches:
                self.branches.draft(there, turn)

    def _answer_misses(self, turn: Turn) -> None:
        """Chains for rows whose outcome was not predicted, or which have just joined. The turn is
        on the host."""
        if not len(turn.rows):
            return
        decision, drafter = turn.decision, self.drafter
        budget = torch.where(turn.accepted >= 0, turn.budget, 0)
        if decision.retry:
            drafter.redraft(turn, budget.clamp(max=decision.retry))
            return
        there = turn.on(self.device)
        (budget,) = send(self.device, budget)
        count = torch.zeros_like(budget)
        if decision.proposal == "ngram" and decision.draft_len:
            tokens, count = drafter.history.propose(
                there.rows, there.base, drafter.draft_len, impl=drafter.impl
            )
            drafter.chain.tokens[there.rows] = tokens.clamp(min=0)
        elif decision.proposal == "replay" and self.branches.count:
            count = self.branches.replay(there)
        self._unfed = decision.proposal != "none"
        drafter.propose(there, torch.minimum(count, budget))
