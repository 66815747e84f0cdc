"""Drafted chains, with all that verification needs of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from saguaro_kernels import PAD, Sample, Sampling
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


class Buffers:
    """Memory that every round reuses, by name; allocated for all `rows` at once and kept.

    A buffer is valid until its name is asked for again.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._held: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str | int, ...], torch.Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype, batch: int, *shape: int) -> torch.Tensor:
        """[batch, ...], contiguous; zeros at first, later what was left in it."""
        key: tuple[str | int, ...] = (name, batch, *shape)
        view = self._views.get(key)
        if view is None:
            # It outlives the caller's inference mode, whose tensors nobody else may write to.
            with torch.inference_mode(False):
                view = self._views[key] = self._view(name, dtype, batch, shape)
        return view

    def _view(
        self, name: str, dtype: torch.dtype, batch: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < self._rows * size:
            held = torch.zeros(self._rows * size, dtype=dtype, device=self._device)
            self._held[name] = held
            self._views.clear()  # which frees what it was too small for
        return held[: batch * size].view(batch, *shape)

    def gather(self, name: str, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """source[rows], in the buffer of `name`."""
        out = self(name, source.dtype, len(rows), *source.shape[1:])
        return torch.index_select(source, 0, rows, out=out)


class Drafts:
    """Buffers for one draft of each of some chains, [*shape], in the layout of a ChainStore."""

    def __init__(self, buffers: Buffers, *shape: int) -> None:
        store = ChainStore
        self.scalars = buffers("scalars", torch.float32, *shape, len(store.SCALARS))
        self.scalars = self.scalars.view(-1, *shape)
        self.ids = buffers("ids", torch.int64, *shape, len(store.IDS)).view(-1, *shape)
        scalars, ids = self.scalars.flatten(1), self.ids.flatten(1)
        self.sample = Sample(
            **dict(zip((*store.SCALARS, *store.IDS), (*scalars, *ids), strict=True)),
            top_ids=ids.T[:, :0],
            top_logits=scalars.T[:, :0],
            status=buffers("status", torch.int32, *shape).flatten(),
        )


class ChainStore:
    """Drafted chains with all that verification needs of them; leading dimensions as given.

    tokens, logq, lse, cutoff, cutoff_id, scale_logit, scale_id [..., K]; logits [..., K + 1, V],
    whose row K is what the draft predicts after the whole chain; num_draft, downweight and one_hot
    (the tokens are a deterministic proposal) [...].

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
        self.buffers = Buffers(leading[0], self.logits.device)

    def put(self, index: tuple[Any, ...], offset: int, drafts: Drafts) -> None:
        """Store drafts at `offset` of the chains at `index`: rows, or rows and a slice of their
        branches."""
        where = (slice(None), *index)
        self._scalars[..., offset][where] = drafts.scalars
        self._ids[..., offset][where] = drafts.ids

    def take(self, rows: torch.Tensor, other: ChainStore, index: tuple[torch.Tensor, ...]) -> None:
        """Copy the branches of `other` at `index`, rows and branches, to `rows`."""
        where: Any = (slice(None), *index)
        self._scalars[:, rows] = other._scalars[where]
        self._ids[:, rows] = other._ids[where]
        for name in self.WHOLE:
            getattr(self, name)[rows] = getattr(other, name)[index]
        flat = index[0] * other.logits.shape[1] + index[1]
        logits = self.buffers.gather("logits", other.logits.flatten(0, 1), flat)
        self.logits[rows, : logits.shape[1]] = logits

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

        On a CPU as wide as the longest chain. On a GPU as wide as any may be, `most`, and with all
        optional fields: which of them are needed cannot be read without waiting.
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
