"""Drafts for texts that come back longer: the drafter's side of a loop that is not ours.

Other people's loops say what a request's text is now, not what became of the last drafts. A text is
known again by its beginning; what follows it is the outcome of the round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from saguaro_kernels.errors import ConfigError, UnsupportedError

from ..build import Built, build_lane, lane_on
from ..config import EngineConfig
from ..lanes import Lane
from ..models import Model
from ..models.draft import borrows_embedding
from ..ngram import NGRAM
from ..params import SamplingParams
from ..policy import decide
from ..round import Admission, Turn

_ROOM = 512
"""Slots given to a text beyond its length; when they are used up it is prefilled anew."""

_OURS: dict[str, Any] = {
    # Their random numbers decide the extra token: ours would predict nothing.
    "rule": "token",
    "ranking": "probability",
    # Their loop waits for an answer, and assumes it was drawn from the draft's own rows.
    "fallback": "batched_retry",
    "proposal": "none",
    "downweight": 1.0,
}


@dataclass
class _Known:
    """A text the draft holds keys of: as it was, what was drafted after it, when it was used."""

    uid: int
    slots: int
    text: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: int = -1
    used: int = 0


class TextDrafter:
    """Chains for texts, drafted ahead in a lane while their owner verifies.

    Args:
        draft: a loaded transformers model, a folder, or a Model.
        vocab_size: the target's; a chain has no ids beyond it.
        target: the target itself, whose embedding a draft's folder may borrow. None: it may not.
        config: see EngineConfig: `max_batch` texts are kept, of `max_tokens` slots together. What
            rests on our own verification is set aside: rule, ranking, fallback, downweight.
        max_length: most tokens a text may have.
        params: how chains are sampled.
    """

    def __init__(
        self,
        draft: Any,
        *,
        vocab_size: int,
        config: EngineConfig,
        max_length: int,
        target: Any = None,
        params: SamplingParams | None = None,
    ) -> None:
        if config.method == "ar":
            raise ConfigError("method: got 'ar', want 'sd' or 'ssd': this only drafts")
        if isinstance(draft, str) and draft == NGRAM:
            raise UnsupportedError(
                "draft 'ngram': want a model; other loops have n-grams of their own"
            )
        if target is None and borrows_embedding(draft):
            raise ConfigError(
                f"draft {str(draft)!r}: takes its embedding from the target, which is not at hand; "
                "want a draft with one of its own"
            )
        config = dataclasses.replace(config, **_OURS)
        self.config, self.max_length = config, max_length
        self.params = params or SamplingParams()
        on = torch.device(getattr(draft, "device", "cpu"))
        if on.type != "cpu":
            raise UnsupportedError(
                f"draft: lies on {on}; in another's loop it runs on the CPU, want .to('cpu')"
            )
        model = cast(Model, SimpleNamespace(vocab_size=vocab_size, device=on))
        built = Built(model, target, None, frozenset(), max_length, lane_on(on, config))
        lane = build_lane(draft, built, config)
        assert lane is not None
        self.lane: Lane = lane
        self._known: dict[int, _Known] = {}
        self._uid = self._number = 0

    def begin(self, params: SamplingParams, max_length: int) -> None:
        """Forget all texts; those that come now are drafted with these parameters."""
        self.lane.release(sorted(self._known))
        self._known.clear()
        self.params, self.max_length = params, max_length

    @torch.no_grad()
    def chains(self, texts: Sequence[Sequence[int]]) -> list[int | None]:
        """The row of `lane.chain` that holds each text's chain; None where there is none.

        A new text has none yet: its prompt is being read.
        """
        self._number += 1
        if getattr(self.lane, "empty", False):
            self._known.clear()
        rows = self._recognise(texts)
        for index, text in enumerate(texts):
            if rows[index] is None:
                rows[index] = self._admit(list(text), rows)
        taken = sorted(row for row in rows if row is not None)
        if not taken or not self.lane.next_chain(self._turn(taken)):
            return [None] * len(texts)
        chain = self.lane.chain
        for row in taken:
            self._known[row].drafted = chain.tokens[row, : int(chain.num_draft[row])].tolist()
        return [None if row is None or not self._known[row].drafted else row for row in rows]

    def close(self) -> None:
        """End the draft. Safe to call twice."""
        self._known.clear()
        self.lane.close()

    def _recognise(self, texts: Sequence[Sequence[int]]) -> list[int | None]:
        """Rows of the texts that continue a known one by an accepted run and one token more."""
        rows: list[int | None] = []
        free = dict(self._known)
        for text in texts:
            found = next((row for row, known in free.items() if _continues(known, text)), None)
            rows.append(found)
            if found is None:
                continue
            known = free.pop(found)
            known.accepted = len(text) - len(known.text) - 1
            known.text, known.used = list(text), self._number
        return rows

    def _admit(self, text: list[int], taken: Sequence[int | None]) -> int | None:
        """A row for a new text, in place of those unused longest; None where it cannot fit."""
        slots = min(self.max_length, len(text) + _ROOM) + self.config.k + 1
        unused = sorted((known.used, row) for row, known in self._known.items() if row not in taken)
        free = set(range(self.config.max_batch)) - self._known.keys()
        room = self.config.max_tokens - sum(known.slots for known in self._known.values())
        while not free or slots > room:
            if not unused:
                return None
            row = unused.pop(0)[1]
            room += self._known.pop(row).slots
            self.lane.release([row])
            free.add(row)
        row = min(free)
        self._uid += 1
        self._known[row] = _Known(self._uid, slots, text, used=self._number)
        self.lane.admit([Admission(row, text, self.params, slots)])
        return row

    def _turn(self, rows: list[int]) -> Turn:
        texts = [self._known[row] for row in rows]
        limits = (
            min(self.max_length - len(known.text), known.slots - len(known.text) - self.config.k)
            for known in texts
        )
        budget = [max(0, min(self.config.k, limit - 1)) for limit in limits]
        return Turn(
            number=self._number,
            decision=decide(self.config, len(rows))._replace(sit_out=False),
            rows=torch.tensor(rows),
            uid=torch.tensor([known.uid for known in texts]),
            base=torch.tensor([len(known.text) for known in texts]),
            last=torch.tensor([known.text[-1] for known in texts]),
            accepted=torch.tensor([known.accepted for known in texts], dtype=torch.int32),
            budget=torch.tensor(budget, dtype=torch.int32),
        )


def _continues(known: _Known, text: Sequence[int]) -> bool:
    before, added = len(known.text), len(text) - len(known.text)
    return (
        0 < added <= len(known.drafted) + 1
        and len(text) < known.slots
        and list(text[:before]) == known.text
        and list(text[before:-1]) == known.drafted[: added - 1]
    )
