"""What passes between the two sides of a round: the outcome one way, the next chain the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from saguaro_kernels import PAD, Keys, Sampling
from saguaro_kernels.verification import Draft

from .params import SamplingParams
from .transfer import send


@dataclass(frozen=True)
class Admission:
    """A request that joins: its row, its prompt, how it is sampled and the slots it may fill.

    The prompt is what there is to take in, all but its last token: of a long one a longer piece
    each time, and of a running request, for a draft that was started again, the text so far.
    """

    row: int
    prompt: list[int]
    params: SamplingParams
    slots: int


class Chunk(NamedTuple):
    """A request that joins and the end of its prompt that is new: what stands from `start` on."""

    admission: Admission
    start: int


class Decision(NamedTuple):
    """What the policy wants of one round. It may follow from what has been committed and from the
    clock, never from random numbers still to be used.

    Attributes:
        draft_len: most drafts of a chain; 0 drafts nothing.
        branches: outcomes to prepare; 0 prepares none.
        retry: tokens a missed row redrafts.
        proposal: what a missed row gets where it redrafts nothing: "none", "ngram" or "replay".
        sit_out: missed rows are redrafted while the others go on.
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

    def select(self, mask: torch.Tensor) -> Turn:
        """The turn of the rows where `mask` [B] is true; both on the host."""
        return Turn(self.number, self.decision, *(tensor[mask] for tensor in self.tensors()))


BROKEN = "broken_rows"
"""Name of spans that stand for rows of the draft's logits that are NaN or all -inf."""


class Reply(NamedTuple):
    """A drafter's answer to a turn; the chains lie in its `ChainStore`.

    hit: [B] bool, the outcome was prepared. ready: [B] bool, false where a row sits this round out.
    """

    hit: torch.Tensor
    ready: torch.Tensor


class RowTable:
    """Seeds and sampling parameters of all rows, as tensors; which filters are in use is known to
    the host, so that reading them waits for nothing."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
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
        self._used = [any(its) for its in zip(*self._filters.values(), strict=True)] or [False] * 3

    def draws(self, rows: list[int]) -> bool:
        """Whether any of `rows` samples."""
        return not self._greedy.issuperset(rows)

    def sampling(self, rows: torch.Tensor) -> Sampling:
        """Sampling of `rows`; a filter that no request uses is None, which is the cheaper path."""
        columns = (self.top_k, self.top_p, self.min_p)
        filters = (its[rows] if on else None for its, on in zip(columns, self._used, strict=True))
        return Sampling(self.temperature[rows], *filters)

    def keys(self, rows: torch.Tensor, base: torch.Tensor) -> Keys:
        return Keys(self.seed[rows], base)


def vocab_map_of(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The column of each of the target's ids, -1 where there is none: [vocab_size] int32."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
    columns[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return columns


Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def allocate_on(device: torch.device) -> Allocate:
    """Zeros on `device`."""
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


class ChainStore:
    """Drafted chains with all that verification needs of them; leading dimensions as given.

    tokens, logq, lse, cutoff, cutoff_id, scale_logit, scale_id [..., K]; logits [..., K + 1, V],
    whose row K is what the draft predicts after the whole chain; num_draft, downweight and one_hot
    (tokens that no distribution was drawn from) [...].

    vocab_map: the column of each of the target's ids in `logits`, see `Draft`; None where they are
    the same. Tokens are the target's ids.
    """

    vocab_map: torch.Tensor | None = None
    tokens: torch.Tensor
    cutoff: torch.Tensor
    cutoff_id: torch.Tensor

    SCALARS = ("logq", "lse", "cutoff", "scale_logit")
    IDS = ("tokens", "cutoff_id", "scale_id")
    WHOLE = ("num_draft", "downweight", "one_hot")

    def __init__(
        self,
        leading: tuple[int, ...],
        draft_len: int,
        vocab_size: int,
        dtype: torch.dtype,
        allocate: Allocate = allocate_zeros,
        logit_rows: int | None = None,
    ) -> None:
        """logit_rows: default K + 1."""
        # Fields of one type lie together, so that a sample is stored by two calls, not by seven.
        self._scalars = allocate((len(self.SCALARS), *leading, draft_len), torch.float32)
        self._ids = allocate((len(self.IDS), *leading, draft_len), torch.int64)
        for names, fields in ((self.SCALARS, self._scalars), (self.IDS, self._ids)):
            for name, field in zip(names, fields.unbind(0), strict=False):
                setattr(self, name, field)
        self.num_draft = allocate(leading, torch.int32)
        self.downweight = allocate(leading, torch.float32)
        self.one_hot = allocate(leading, torch.bool)
        logit_rows = draft_len + 1 if logit_rows is None else logit_rows
        self.logits = allocate((*leading, logit_rows, vocab_size), dtype)

    def put(self, index: tuple[Any, ...], offset: int, sample: object) -> None:
        """Store a Sample as the draft at `offset` of the chains at `index`: rows, or rows and a
        slice of their branches."""
        shape, where = (len(index[0]), -1)[: len(index)], (slice(None), *index)
        for names, fields in ((self.SCALARS, self._scalars), (self.IDS, self._ids)):
            new = torch.stack([getattr(sample, name) for name in names])
            fields[..., offset][where] = new.view(len(names), *shape)

    def take(self, rows: torch.Tensor, other: ChainStore, index: tuple[torch.Tensor, ...]) -> None:
        """Copy the chains of `other` at `index` to `rows`."""
        where: Any = (slice(None), *index)
        self._scalars[:, rows] = other._scalars[where]
        self._ids[:, rows] = other._ids[where]
        for name in self.WHOLE:
            getattr(self, name)[rows] = getattr(other, name)[index]
        self.logits[rows, : other.logits.shape[-2]] = other.logits[index]

    def is_legal(self, rows: torch.Tensor, most: torch.Tensor) -> bool:
        """Whether the chains of `rows` have lengths up to `most` [B] and ids of the vocabulary."""
        num_draft, tokens = self.num_draft[rows].numpy(), self.tokens[rows].numpy()
        behind = np.arange(tokens.shape[1]) >= num_draft[:, None]
        vocab = self.logits.shape[-1] if self.vocab_map is None else len(self.vocab_map)
        lengths = (num_draft >= 0) & (num_draft <= most.numpy())
        return bool(lengths.all() and ((tokens >= 0) & (tokens < vocab) | behind).all())

    def draft(self, rows: torch.Tensor, sampling: Sampling, most: int) -> Draft:
        """The chains of `rows` as `verify` takes them; rows of the vocabulary's size stay where
        they are.

        On a CPU as wide as the longest. On a GPU as wide as any may be, `most`, and with all that
        any may need: what they do need cannot be read without waiting.
        """
        num_draft = self.num_draft[rows]
        known = rows.device.type == "cpu"
        width = int(num_draft.max()) if known else min(most, self.tokens.shape[-1])
        step = torch.arange(width, device=rows.device)
        one_hot = (sampling.temperature == 0) | self.one_hot[rows]
        downweight = self.downweight[rows]
        drawn = not (known and bool(one_hot.all()))
        scaled = not known or bool((downweight != 1).any())
        scalars, ids = self._scalars[:, rows, :width], self._ids[:, rows, :width]
        fields = dict(zip((*self.SCALARS, *self.IDS), (*scalars, *ids), strict=True))
        tokens = fields.pop("tokens").masked_fill(step >= num_draft[:, None], PAD)
        return Draft(
            tokens=tokens,
            num_draft=num_draft,
            logits=self.logits.flatten(0, 1) if drawn else None,
            row_index=rows[:, None] * self.logits.shape[1] + step if drawn else None,
            one_hot=one_hot,
            downweight=downweight if scaled else None,
            sampling=sampling,
            vocab_map=self.vocab_map,
            **fields,
        )
