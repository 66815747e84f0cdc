"""Chains drafted one token after another, and the keys a draft model holds of each row.

Turns have their tensors on the model's device unless a docstring says otherwise. On a GPU nothing
here reads a value back, except `catch_up`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from saguaro_kernels import Impl, Stream, saguaro_sample, sample_workspace_size

from .chains import Allocate, Buffers, ChainStore, Drafts, vocab_map_of
from .history import History
from .metrics import Timeline
from .models.protocol import Model
from .round import Admission, Decision, RowTable, Turn
from .transfer import send


class Draws(NamedTuple):
    """Draws of some rows: where their drafts are written, and what `saguaro_sample` is told."""

    drafts: Drafts
    options: dict[str, Any]


class Drafter:
    """A draft model with the text, the chain and the keys of each row.

    Attributes:
        chain: what is verified next.
        fed: [rows] int64, tokens of each row's text and chain that have been fed to the model.
        behind: some row's text has not been fed in full, as rounds drafted nothing.
        broken: on a CPU, rows of logits that were NaN or all -inf, since it was last read.
        ids: [V] int64, the target's ids that the logits' columns stand for; None for all of them.
        last_id: the largest id that the model can read.
    """

    def __init__(
        self,
        model: Model,
        *,
        rows: int,
        draft_len: int,
        vocab_size: int,
        target_vocab: int,
        stream: Stream,
        impl: Impl,
        allocate: Allocate,
        timeline: Timeline,
    ) -> None:
        self.model, self.draft_len, self.vocab_size = model, draft_len, vocab_size
        self.stream, self.impl, self.timeline = stream, impl, timeline
        self.device = model.device
        self.on_host = self.device.type == "cpu"
        """Values can be read without waiting for queued work."""
        self.table = RowTable(rows, self.device)
        self.history = History(rows, draft_len, self.device)
        self.chain = ChainStore((rows,), draft_len, vocab_size, model.dtype, allocate)
        self.ids: torch.Tensor | None = getattr(model, "vocab_ids", None)
        if self.ids is not None:
            self.chain.vocab_map = vocab_map_of(self.ids, target_vocab)
        # A draft with a part of the target's ids still reads all of them.
        self.last_id = (model.vocab_size if self.ids is None else target_vocab) - 1
        self.fed = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.behind = False
        self.broken = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.buffers = Buffers(rows, self.device)
        self._taken: dict[int, int] = {}
        """Tokens each row had been fed when its text was last prefilled."""
        self._held: set[int] = set()

    def admit(self, new: Admission, scratch_slots: int) -> None:
        """Prefill the text of a row, all but its last token; of a row already held, what is new."""
        row, text = new.row, new.prompt
        if row not in self._held:
            self.table.set(row, new.params)
            self.model.allocate(row, new.slots + scratch_slots)
            self._held.add(row)
            self.fed[row] = self._taken[row] = 0
        fed = self._taken[row]
        if self.on_host:
            # Keys after the known text are of drafts that may have been rejected.
            fed = min(int(self.fed[row]), int(self.history.length[row]))
        self.history.admit(row, text, new.slots + self.draft_len + 1)
        self.chain.num_draft[row] = 0
        self._feed_text(row, fed, len(text) - 1, "prefill")
        self.fed[row] = self._taken[row] = len(text) - 1

    def release(self, rows: list[int]) -> None:
        for row in self._held.intersection(rows):
            self._held.remove(row)
            self.model.release(row)
            self.fed[row] = self.history.length[row] = 0
            self.table.clear(row)

    def commit(self, turn: Turn) -> None:
        """Take what the last round committed; keys after it are of rejected drafts."""
        self.history.commit(turn)
        self.fed[turn.rows] = torch.minimum(self.fed[turn.rows], turn.base - 1)

    def redraft(self, turn: Turn, length: torch.Tensor) -> None:
        """Draft chains token by token, each row up to its length [B]. Turn and lengths are on the
        host."""
        most = int(length.max()) if len(length) else 0
        if most:
            self.catch_up(turn)
        there = turn.on(self.device)
        rows, tokens = there.rows, there.last
        self.chain.num_draft[rows] = send(self.device, length.to(torch.int32))[0]
        self.chain.one_hot[rows] = False
        self.chain.downweight[rows] = turn.decision.downweight
        for step in range(most):
            going = (length > step).nonzero()[:, 0]
            where, active, base = send(self.device, going, turn.rows[going], turn.base[going])
            with self.timeline.span("draft_step", len(active)):
                logits = self.feed(active, tokens[where, None], base - 1 + step)[:, 0]
                draws = self.prepare(active, base, turn.decision)
                drawn = self.draw(draws, logits, step, self.chain, (active,))
            self.chain.logits[active, step] = logits
            tokens = tokens.index_copy(0, where, drawn)
        self.history.add_chain(rows, there.base, self.chain)
        fed = there.base - 1 + self.chain.num_draft[rows]
        self.fed[rows] = torch.maximum(self.fed[rows], fed)

    def propose(self, turn: Turn, count: torch.Tensor) -> None:
        """Make the first `count` [B] tokens of the chains a deterministic proposal (one-hot)."""
        rows, chain = turn.rows, self.chain
        # It ends before an id that the draft cannot read: a rule about the tokens alone.
        legal = (chain.tokens[rows] <= self.last_id).to(torch.int32).cumprod(1).sum(1)
        chain.num_draft[rows] = torch.minimum(count, legal).to(torch.int32)
        chain.one_hot[rows] = count > 0
        chain.downweight[rows] = 1.0
        self.history.add_chain(rows, turn.base, chain)

    def feed_last(self, turn: Turn) -> None:
        """Feed the last token of chains, all that is not fed yet: for its key and the row after it.

        Done once the chain has been handed out: nothing waits for it, and of all branches only the
        one that became the chain needs it.
        """
        chain, rows, buffers = self.chain, turn.rows, self.buffers
        count = buffers.gather("count", chain.num_draft, rows)
        end = torch.add(turn.base, count, out=buffers("end", torch.int64, len(rows)))
        last = torch.sub(end, 1, out=buffers("last", torch.int64, len(rows)))
        with self.timeline.span("feed_last", len(rows)):
            logits = self.feed(rows, self.history.at(rows, last)[:, None], last)[:, 0]
        self.fed[rows] = end
        behind = torch.add(count, rows, alpha=chain.logits.shape[1], out=end)
        chain.logits.flatten(0, 1).index_copy_(0, behind, logits)

    def feed_chains(self, turn: Turn) -> None:
        """Feed what is left of proposed chains, for their keys and the row after each token. Call
        `catch_up` before."""
        rows, base = turn.rows, turn.base
        end = base + self.chain.num_draft[rows]
        if self.on_host:
            fresh = self.fed[rows] < end
            rows, base, end = rows[fresh], base[fresh], end[fresh]
            if not len(rows):
                return
            width = int((end - self.fed[rows]).max())
        else:
            # All rows, and as many columns as any may lack; those past a row's end are ignored.
            width = self.draft_len + 1
        start = self.fed[rows]
        with self.timeline.span("feed_chain"):
            logits = self.feed(rows, self.history.columns(rows, start, width), start)
        for column in range(width):
            at = start + column
            behind = (at - base + 1).clamp(max=self.draft_len)
            old = self.chain.logits[rows, behind]
            used = (at < end)[:, None]
            self.chain.logits[rows, behind] = torch.where(used, logits[:, column], old)
        self.fed[rows] = end

    def catch_up(self, turn: Turn) -> None:
        """Feed the text that rows gained in rounds that drafted nothing. The turn is on the host.
        What the rows lack is read from the device, so on a GPU this waits."""
        if not self.behind:
            return
        fed = self.fed[send(self.device, turn.rows)[0]].tolist()
        for row, first, base in zip(turn.rows.tolist(), fed, turn.base.tolist(), strict=True):
            self._feed_text(row, first, base - 1, "catch_up")
            self.fed[row] = max(first, base - 1)
        self.behind = bool((self.fed < self.history.length - 1).any())

    def _feed_text(self, row: int, first: int, end: int, name: str) -> None:
        """Feed a row the tokens of its text at positions first..end - 1."""
        if first < end:
            with self.timeline.span(name):
                tokens = self.history.tokens[row, first:end].clamp(max=self.last_id)
                self.model.prefill(row, tokens, first)

    def feed(self, rows: torch.Tensor, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Feed tokens [B, N] at positions start [B] + 0..N-1; their logits [B, N, V]."""
        ids = self.buffers("tokens", torch.int64, *tokens.shape)
        torch.clamp(tokens, max=self.last_id, out=ids)
        start = self.buffers("start", torch.int32, len(rows)).copy_(start)
        return self.model.extend(rows, ids, start)[..., : self.vocab_size]

    def prepare(self, rows: torch.Tensor, base: torch.Tensor, decision: Decision) -> Draws:
        """What the draws of `rows` in the rounds of `base`, both [..], have in common."""
        buffers, shape, factor = self.buffers, rows.shape, decision.downweight
        drafts = Drafts(buffers, *shape)
        options: dict[str, Any] = {"scheme": "plain", "scale_f": 0}
        if factor < 1:
            options = {"scheme": "downweight", "scale_f": decision.scale_f}
            each = buffers("downweight", torch.float32, *shape).fill_(factor)
            options["downweight"] = each.flatten()
        size = sample_workspace_size(1, self.vocab_size, 0, options["scale_f"])
        return Draws(
            drafts,
            {
                "sampling": self.table.sampling(rows),
                "keys": self.table.keys(rows, base),
                "stream": self.stream,
                "ids": self.ids,
                "impl": self.impl,
                "out": drafts.sample,
                "workspace": buffers("workspace", torch.int64, *shape, size).flatten(),
                **options,
            },
        )

    def draw(
        self,
        draws: Draws,
        logits: torch.Tensor,
        offset: int,
        store: ChainStore,
        index: tuple[Any, ...],
    ) -> torch.Tensor:
        """Draw the drafts at `offset` of the chains of `store` at `index` from their logits
        [.., V]. Their tokens [..] are good until the next draw."""
        drafts = draws.drafts
        saguaro_sample(logits.flatten(0, -2), offset=offset, **draws.options)
        if self.on_host:
            count = self.buffers("broken", torch.int64, 1)
            self.broken += torch.sum(drafts.sample.status.sign_(), 0, keepdim=True, out=count)
        store.put(index, offset, drafts)
        return drafts.ids[0]
