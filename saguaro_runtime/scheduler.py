"""Which requests decode: they wait, get a row, take part in rounds and leave. No models here."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from saguaro_kernels import Keys, Sampling, Status

from .build import Built
from .config import EngineConfig
from .intake import new_request, slots_of
from .metrics import Counts, Served, Source
from .params import SamplingParams
from .policy import Policy
from .requests import Prompt, Request, Round
from .round import Admission, Chunk, RowTable, Turn
from .verifier import Judgement

_BROKEN = (Status.NAN, Status.EMPTY)
"""The target's row defines no distribution to draw from. A broken draft row only costs speed."""


class Scheduler:
    """Rows and their requests, in order of arrival. `add` may be called while a round runs."""

    def __init__(self, config: EngineConfig, built: Built) -> None:
        self.config, self.built = config, built
        self.policy = Policy(config)
        self.counts, self.served = Counts(), Served()
        self.left: list[int] = []
        """Rows whose requests have ended and that are not released yet."""
        self._table = RowTable(config.max_batch, built.model.device)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._filled: dict[int, int] = {}
        """Rows whose prompts are not fully prefilled yet: tokens prefilled so far."""
        self._accepted: dict[int, int] = {}
        self._prepared: dict[int, tuple[int, int, bool]] = {}
        """What the last round of a row prepared: k, branches, and whether the draft had drawn its
        own chain."""
        self._free_rows = list(range(config.max_batch))
        self._free_slots = config.max_tokens
        self._uids = itertools.count(1)
        self._round = 0

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request, or raise ConfigError and queue nothing."""
        return self.add_all([(prompt, params)])[0]

    def add_all(self, asked: Sequence[tuple[Prompt, SamplingParams]]) -> list[Request]:
        """Queue all of them or, if one cannot be served, none."""
        requests = [
            new_request(prompt, params, self.built, self.config, self._uids)
            for prompt, params in asked
        ]
        for request in requests:
            if request.limit > 0:
                self._waiting.append(request)
            else:
                request.finish("length")
                self._count_served(request)
        return requests

    def admit(self) -> None:
        """Give rows and slots to waiting requests, first come first served."""
        while self._waiting and self._free_rows:
            slots = slots_of(self._waiting[0], self.config)
            if slots > self._free_slots:
                break
            request, row = self._waiting[0], self._free_rows[0]
            request.row, request.times.admitted = row, time.monotonic()
            self._table.set(row, request.params)
            self._accepted[row], self._prepared[row] = -1, (0, 0, False)
            # Last, so that a row that an exception interrupts here is never taken for prefilled.
            self._filled[row], self._running[row] = 0, request
            self._free_slots -= slots
            del self._free_rows[0], self._waiting[0]

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of the prompts of new rows, at most `prefill_chunk` tokens in all, first come
        first served. A row takes part in rounds once its last chunk has been taken.

        Where a prompt is cut depends on its own length alone, and so do the logits of its row.
        """
        left = self.config.prefill_chunk
        for row in [row for row in self._filled if row in self._running]:
            request = self._running[row]
            last = len(request.prompt) - 1
            while row in self._filled:
                start = self._filled[row]
                end = min(start + self.config.prefill_chunk, last)
                if end - start > left:
                    return
                left -= end - start
                yield Chunk(self._admission(request, end), start)
                self._filled[row] = end  # not before: prefilling may fail
                if end == last:
                    del self._filled[row]

    def rows(self) -> list[Admission]:
        """All running rows with their texts so far, for a draft that holds none of them."""
        return [
            self._admission(request, self._filled.get(row))
            for row, request in self._running.items()
        ]

    def turn(self) -> Turn | None:
        """The outcomes of all rows whose prompts are prefilled; None if there are none."""
        rows = sorted(self._running.keys() - self._filled.keys())
        if not rows:
            return None
        self._round += 1
        requests = [self._running[row] for row in rows]
        decision = self.policy.decide(len(requests), [r.params.temperature for r in requests])
        room = [min(decision.draft_len, self.built.max_length - r.length) for r in requests]
        return Turn(
            number=self._round,
            decision=decision,
            rows=torch.tensor([r.row for r in requests]),
            uid=torch.tensor([r.uid for r in requests]),
            base=torch.tensor([r.length for r in requests]),
            last=torch.tensor([r.last for r in requests]),
            accepted=torch.tensor([self._accepted[r.row] for r in requests], dtype=torch.int32),
            budget=torch.tensor(room, dtype=torch.int32),
        )

    def requests(self, turn: Turn) -> list[Request]:
        """The requests of the turn's rows, in its order."""
        return [self._running[row] for row in turn.rows.tolist()]

    def load(self) -> dict[str, int]:
        """What is running and waiting, and the slots in use."""
        return {
            "running": len(self._running) - len(self._filled),
            "prefilling": len(self._filled),
            "waiting": len(self._waiting),
            "slots": self.config.max_tokens,
            "slots_used": self.config.max_tokens - self._free_slots,
        }

    def sampling(self, turn: Turn) -> Sampling:
        """How the turn's rows are sampled; the turn, here and for keys, on the target's device."""
        return self._table.sampling(turn.rows)

    def keys(self, turn: Turn) -> Keys:
        return self._table.keys(turn.rows, turn.base)

    def commit(self, turn: Turn, judgement: Judgement, hit: torch.Tensor | None) -> list[Request]:
        """Give each row its tokens; returns the requests that ended."""
        finished = []
        verdict, num_draft, logprobs, errors = judgement
        drafted, accepted = num_draft.tolist(), verdict.num_accepted.tolist()
        tokens, status = verdict.tokens.tolist(), verdict.status.tolist()
        for index, row in enumerate(turn.rows.tolist()):
            request, count = self._running[row], accepted[index]
            found, before = None if hit is None else bool(hit[index]), request.length
            broken = status[index] in _BROKEN
            taken = tokens[index][: count if broken else count + 1]
            request.commit(taken, logprobs.get(index, ()))
            if broken and request.finish_reason is None:
                request.fail(errors.get(index, "the target's logits are NaN or all -inf"))
            source = self._source(row, found)
            committed = request.length - before
            request.rounds.append(Round(before, drafted[index], committed, source))
            went_on = _fallback(turn, drafted[index])
            for counts in (self.counts, request.counts):
                if source in ("hit", "miss"):
                    counts.add_lookup(self._accepted[row], source == "hit", went_on)
                counts.add_round(drafted[index], count, committed, source)
            self.policy.observe_row(source, drafted[index], count, self._prepared[row])
            decision = turn.decision
            by_draft = drafted[index] > 0 and (source != "miss" or decision.retry > 0)
            self._prepared[row] = decision.draft_len, decision.branches, by_draft
            self._accepted[row] = count
            if request.finish_reason is not None:
                self._leave(request)
                finished.append(request)
        return finished

    def cancel(self, request: Request) -> None:
        if request.finish_reason is not None:
            return
        request.finish("cancelled")
        if request in self._waiting:
            self._waiting.remove(request)
            self._count_served(request)
        else:
            self._leave(request)

    def fail(self, rows: list[int], reason: str) -> None:
        """End the requests of `rows`, whose prefill on the target failed."""
        for row in rows:
            request = self._running[row]
            request.fail(reason)
            self._leave(request)

    def _source(self, row: int, found: bool | None) -> Source:
        if self._accepted[row] < 0:
            return "first"
        if self.config.method == "ar":
            return "asked"
        if found is None:
            return "late"
        _, branches, _ = self._prepared[row]
        return "asked" if not branches else "hit" if found else "miss"

    def _count_served(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.served.add(request.finish_reason, len(request.prompt), request.times)

    def _leave(self, request: Request) -> None:
        slots = slots_of(request, self.config)
        self._count_served(request)
        self._table.clear(request.row)
        # Where an interrupt falls between these a row is lost, but none is freed that still runs.
        del self._running[request.row]
        self._filled.pop(request.row, None)
        self.left.append(request.row)
        self._free_slots += slots
        self._free_rows.append(request.row)
        self._free_rows.sort()

    def _admission(self, request: Request, filled: int | None) -> Admission:
        """`filled`: prompt tokens prefilled so far, None if all are."""
        text = request.prompt + request.token_ids
        if filled is not None:
            text = text[: filled + 1]
        params = request.params.without_functions()
        return Admission(request.row, text, params, slots_of(request, self.config))


def _fallback(turn: Turn, drafted: int) -> str:
    """What a row that missed went on with."""
    if turn.decision.retry:
        return "redrafted"
    return "proposed" if drafted else "undrafted"
