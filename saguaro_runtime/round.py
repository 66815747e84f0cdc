"""What passes between the two sides of a round: the outcome one way, the next chain the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from saguaro_kernels import Keys, Sampling

from .chains import Buffers
from .params import SamplingParams
from .transfer import CPU, send


@dataclass(frozen=True)
class Admission:
    """A request that joins: its row, its prompt, how it is sampled and the slots it may fill.

    `prompt` without its last token is what is to be prefilled. A long prompt comes as prefixes of
    growing length; to a draft that was started again, a running request comes with its whole text.
    """

    row: int
    prompt: list[int]
    params: SamplingParams
    slots: int


class Chunk(NamedTuple):
    """A chunk of a prefill: of the admission's prompt, the tokens from `start` on are new."""

    admission: Admission
    start: int


class Decision(NamedTuple):
    """What the policy wants of one round. It may depend on committed tokens and on the clock, never
    on random numbers still to be used, which would bias the text.

    Attributes:
        draft_len: most drafts of a chain; 0 drafts nothing.
        branches: outcomes to prepare; 0 prepares none.
        retry: tokens a missed row redrafts.
        proposal: what a missed row gets if it is not redrafted: "none", "ngram" or "replay".
        sit_out: missed rows skip a round, in which they are redrafted; the others go on.
        ranking: of the outcomes.
        downweight, scale_f: C, and how many of the draft's largest probabilities it scales.
    """

    draft_len: int
    branches: int
    retry: int = 0
    proposal: str = "none"
    sit_out: bool = False
    ranking: str = "auto"
    downweight: float = 1.0
    scale_f: int = 0


@dataclass(frozen=True)
class Turn:
    """The outcome of a round, as the drafter needs it; B active rows.

    Attributes:
        number: round number of the engine; branches of round n answer turn n + 1 alone.
        decision: what the policy wants of the round.
        rows, uid, base, last: [B] int64; base = committed tokens, last = the last of them.
        accepted: [B] int32, accepted drafts of the round that ended; -1 for a row that has just
            joined.
        budget: [B] int32, most tokens the next chain may have.
    """

    number: int
    decision: Decision
    rows: torch.Tensor
    uid: torch.Tensor
    base: torch.Tensor
    last: torch.Tensor
    accepted: torch.Tensor
    budget: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """What is not plain Python, in the order of the fields."""
        return [self.rows, self.uid, self.base, self.last, self.accepted, self.budget]

    def packed(self) -> np.ndarray:
        """The tensors as one array of the host: [6, B] int64."""
        return torch.stack([tensor.to(torch.int64) for tensor in self.tensors()]).numpy()

    @staticmethod
    def unpacked(number: int, decision: Decision, packed: np.ndarray) -> Turn:
        """The turn whose tensors `packed` holds."""
        rows, uid, base, last, accepted, budget = torch.from_numpy(packed).unbind(0)
        lengths = accepted.to(torch.int32), budget.to(torch.int32)
        return Turn(number, decision, rows, uid, base, last, *lengths)

    def on(self, device: torch.device) -> Turn:
        """The turn with its tensors on `device`."""
        if device.type == "cpu":
            return self
        return Turn(self.number, self.decision, *send(device, *self.tensors()))

    @staticmethod
    def dummy(decision: Decision) -> Turn:
        """The turn of a row 0 that has just joined, without a request: to warm up with."""
        zero, two = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        joined, one = torch.full((1,), -1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        return Turn(0, decision, zero, zero, two, zero, joined, one)

    def select(self, mask: torch.Tensor) -> Turn:
        """The turn of the rows where `mask` [B] is true; both on the host."""
        return Turn(self.number, self.decision, *(tensor[mask] for tensor in self.tensors()))


BROKEN = "broken_rows"
"""Name of spans of no length whose rows are rows of draft logits that are NaN or all -inf."""


class Reply(NamedTuple):
    """A drafter's answer to a turn; the chains lie in its `ChainStore`.

    hit: [B] bool, the outcome was prepared. ready: [B] bool, false where a row sits this round out.
    """

    hit: torch.Tensor
    ready: torch.Tensor


class RowTable:
    """Seeds and sampling parameters of all rows, as tensors; which filters are in use is known to
    the host, so that reading them waits for nothing. What was read is good until the next time."""

    def __init__(self, rows: int, device: torch.device = CPU) -> None:
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self._buffers = Buffers(rows, device)
        self._filters: dict[int, tuple[bool, bool, bool]] = {}
        self._used = [False] * 3
        self._greedy: set[int] = set()

    def set(self, row: int, params: SamplingParams) -> None:
        self.seed[row] = params.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k or 0
        self.top_p[row] = 1.0 if params.top_p is None else params.top_p
        self.min_p[row] = params.min_p or 0.0
        filters = params.top_k is not None, params.top_p not in (None, 1.0), bool(params.min_p)
        self._filters[row] = filters
        self._count_filters()
        (self._greedy.discard if params.temperature else self._greedy.add)(row)

    def clear(self, row: int) -> None:
        """The row's request has ended."""
        self._filters.pop(row, None)
        self._count_filters()

    def _count_filters(self) -> None:
        self._used = [any(on) for on in zip(*self._filters.values(), strict=True)] or [False] * 3

    def draws(self, rows: list[int]) -> bool:
        """Whether any of `rows` samples."""
        return not self._greedy.issuperset(rows)

    def sampling(self, rows: torch.Tensor) -> Sampling:
        """Sampling of `rows` of any shape, as one dimension; a filter that no request uses is None,
        which is the cheaper path."""
        filters = zip(("top_k", "top_p", "min_p"), self._used, strict=True)
        used = (self._read(name, rows) if on else None for name, on in filters)
        return Sampling(self._read("temperature", rows), *used)

    def keys(self, rows: torch.Tensor, base: torch.Tensor) -> Keys:
        return Keys(self._read("seed", rows), base.flatten())

    def _read(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        column: torch.Tensor = getattr(self, name)
        out = self._buffers(name, column.dtype, *rows.shape)
        return torch.take(column, rows, out=out).flatten()
