"""Training of the draft: batches by step number, AdamW with a cosine, checkpoints.

What step s does depends on the seed and s alone, and a checkpoint holds all that the next step
needs: a run that was killed and resumed gives the same draft as one that was not (on the same
machine, with the same number of threads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..models.draft import DRAFT_VOCAB, own_weights
from .losses import distill_losses
from .progress import say
from .settings import written
from .texts import Text, last_hidden, padded

_ROWS_AT_ONCE = 512
"""Rows of logits held at once: a vocabulary of 150k is 300 MB of them."""
_WARM_UP = 0.05
_KL_SHARE = 0.5
_KL_WEIGHT, _REJECTED_WEIGHT = 0.4, 2.0
"""Weights after the first `_KL_SHARE` of the steps, which train the divergence alone."""


class Trainer:
    """Steps of a draft's training.

    Args:
        draft: its own weights in float32; embedding and head are the target's and stay as they are.
        target: used where texts carry no hidden states.
        steps: of the whole training; the schedule follows from them.
        dtype: of the products. The weights themselves are kept and updated in float32.
    """

    def __init__(
        self,
        draft: Any,
        target: Any,
        texts: Sequence[Text],
        *,
        steps: int,
        batch: int,
        learning_rate: float,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self.draft, self.target, self.texts, self.steps = draft, target, texts, steps
        self.batch, self.learning_rate, self.seed, self.dtype = batch, learning_rate, seed, dtype
        self.vocab: torch.Tensor | None = getattr(draft, DRAFT_VOCAB, None)
        self.step = 0
        draft.eval()  # no dropout: it would need a generator's state
        draft.requires_grad_(False)
        self.weights = {
            name: tensor
            for name, tensor in own_weights(draft).items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        for tensor in self.weights.values():
            tensor.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self.weights.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._order: tuple[int, list[int]] = (-1, [])

    def advance(self) -> float:
        """One step; returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * self._schedule()
        loss = self.accumulate(self._texts_of(self.step))
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    def accumulate(self, texts: Sequence[Text]) -> float:
        """Add the gradients of a batch; returns its loss."""
        ids = padded([text.ids for text in texts]).to(self.draft.device)
        index = torch.arange(ids.shape[1] - 1)
        learned = torch.stack(
            [(index >= text.start - 1) & (index < len(text.ids) - 1) for text in texts]
        ).to(ids.device)
        wanted = self._target_hidden(texts, ids)[:, :-1][learned]
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = self.draft.base_model(ids[:, :-1], use_cache=False)[0][learned]
        # The head is frozen: all that is needed of its side is the gradient of the states.
        leaf = states.detach().requires_grad_()
        total = 0.0
        pieces = zip(leaf.split(_ROWS_AT_ONCE), wanted.split(_ROWS_AT_ONCE), strict=True)
        for draft_states, target_states in pieces:
            loss = self._loss(draft_states, target_states) / len(leaf)
            loss.backward()
            total += float(loss.detach())
        states.backward(leaf.grad)
        return total

    def save(self, path: Path) -> None:
        """Write a checkpoint; the one before is there until this one is complete."""
        state = {"step": self.step, "optimizer": self._optimizer.state_dict()}
        with written(path) as part:
            torch.save(state | {"weights": self.weights}, part)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, if there is one; one that a power cut has left in part is none:
        training then begins anew, and ends the same."""
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location=self.draft.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            say(f"{path} is damaged, training begins anew ({type(error).__name__})")
            return
        for name, tensor in self.weights.items():
            tensor.data.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _loss(self, draft_states: torch.Tensor, target_states: torch.Tensor) -> torch.Tensor:
        draft_head = self.draft.get_output_embeddings()
        target_head = self.target.get_output_embeddings()
        with torch.no_grad():
            target_logits = target_head(target_states.to(target_head.weight.dtype))
        draft_logits = draft_head(draft_states.to(draft_head.weight.dtype))
        kl, rejected = distill_losses(draft_logits, target_logits, self.vocab)
        if self.step < self.steps * _KL_SHARE:
            return kl.sum()
        return _KL_WEIGHT * kl.sum() + _REJECTED_WEIGHT * rejected.sum()

    def _target_hidden(self, texts: Sequence[Text], ids: torch.Tensor) -> torch.Tensor:
        kept = [text.hidden for text in texts if text.hidden is not None]
        if len(kept) < len(texts):
            return last_hidden(self.target, ids)
        return padded(kept).to(ids.device)

    def _schedule(self) -> float:
        warm = max(1, round(self.steps * _WARM_UP))
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.step / self.steps))
        return min(1.0, (self.step + 1) / warm) * max(cosine, 0.02)

    def _texts_of(self, step: int) -> list[Text]:
        """A pass over the texts in an order of its own, and then the next pass."""
        chosen = []
        for number in range(step * self.batch, (step + 1) * self.batch):
            turn, place = divmod(number, len(self.texts))
            if self._order[0] != turn:
                generator = torch.Generator().manual_seed((self.seed & 0x7FFFFFFF) * 1009 + turn)
                order = torch.randperm(len(self.texts), generator=generator)
                self._order = turn, order.tolist()
            chosen.append(self.texts[self._order[1][place]])
        return chosen
