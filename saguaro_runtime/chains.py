"""Drafted chains, with all that verification needs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from saguaro_kernels import PAD, Sampling
from saguaro_kernels.verification import Draft


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
            for name, field in zip(names, fields.unbind(0), strict=True):
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
