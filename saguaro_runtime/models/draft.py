"""What a draft shares with its target, and the part of the target's ids that it has logits for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from saguaro_kernels.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_EMBEDDINGS = "saguaro_shared_embeddings"
"""Set in a draft's config.json when its embedding and head are the target's and not stored."""

DRAFT_VOCAB = "saguaro_draft_vocab"
"""Ascending ids [D] int64 among a draft's weights: it has logits for these ids of the target alone.

It still reads all of the target's tokens. The loaded model has them as a buffer of this name.
"""


def borrows_embedding(draft: Any) -> bool:
    """Whether `draft` is a folder whose embedding and head are those of its target."""
    if not isinstance(draft, str | Path):
        return False
    config = Path(draft) / "config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get(SHARED_EMBEDDINGS))


def head_of(model: Any) -> Any:
    """What turns a model's states into logits.

    Raises:
        UnsupportedError: it has none, as a base model.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(
            f"{type(model).__name__}: has no head that gives logits; want a ..ForCausalLM"
        )
    return head


def restrict_vocab(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Give a model logits for `ids` [D] int64 alone, ascending: rows of its head are copied.

    Raises:
        ConfigError: ids that are not ascending or that the head does not have.
    """
    head: Any = model.get_output_embeddings()
    rows = head.weight.shape[0]
    if not len(ids) or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= rows:
        raise ConfigError(f"{DRAFT_VOCAB}: want ascending ids of 0..{rows - 1}")
    part = torch.nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    ids = ids.to(head.weight.device)
    part.weight = torch.nn.Parameter(head.weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        part.bias = torch.nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    model.set_output_embeddings(part)
    model.register_buffer(DRAFT_VOCAB, ids, persistent=False)


class _WholeHead(torch.nn.Module):
    """A draft's head with columns for all of the target's ids, -inf where it has no logits."""

    ids: torch.Tensor

    def __init__(self, part: Any, ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.part, self.vocab_size = part, vocab_size
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.part(states)
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.ids] = logits
        return full


def whole_vocab(model: Any) -> Any:
    """A draft as transformers' own generation takes it: its columns are the target's ids.

    It is the model itself, or, where that has logits for some ids alone, a copy on the same
    weights.
    """
    ids = getattr(model, DRAFT_VOCAB, None)
    if ids is None:
        return model
    whole = copy.copy(model)
    whole._modules, whole._buffers = dict(model._modules), dict(model._buffers)
    del whole._buffers[DRAFT_VOCAB]
    embedding: Any = model.get_input_embeddings()
    head = _WholeHead(model.get_output_embeddings(), ids, embedding.weight.shape[0])
    whole.set_output_embeddings(head)
    return whole


def all_logits(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """A plain forward's logits over all of the target's ids, -inf where a draft has none."""
    logits: torch.Tensor = model(ids, use_cache=False, **options).logits
    columns = getattr(model, DRAFT_VOCAB, None)
    if columns is None:
        return logits
    embedding: Any = model.get_input_embeddings()
    full = logits.new_full((*logits.shape[:-1], embedding.weight.shape[0]), -torch.inf)
    full[..., columns] = logits
    return full


def own_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All of a model's weights but its embedding's and its head's."""
    outside: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    shared = {id(tensor) for module in outside for tensor in module.parameters()}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) not in shared}
