"""Models by path: a folder or a hub name, and drafts that borrow the target's embedding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from saguaro_kernels.errors import ConfigError

from .draft import DRAFT_VOCAB, SHARED_EMBEDDINGS, own_weights, restrict_vocab


def load_model(
    path: str,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a transformers folder or hub name for inference, on the CPU unless told otherwise.

    Raises:
        ConfigError: there is nothing to load at `path`.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {path!r}: cannot be loaded ({error}); want a transformers folder or a hub name"
        ) from error
    return _placed(model, device)


def load_draft(
    path: str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a draft; where its folder says so, embedding and head are the target's own tensors.

    device: where it goes, by default the CPU, or beside the tensors it shares; on another device
    than the target's it has copies of them.
    """
    marker = Path(path) / "config.json"
    if not marker.is_file() or not json.loads(marker.read_text()).get(SHARED_EMBEDDINGS):
        return load_model(path, dtype, device)
    config = AutoConfig.from_pretrained(path)
    shared: Any = torch.nn.ModuleList(
        (target.get_input_embeddings(), target.get_output_embeddings())
    )
    if device not in (None, target.device):  # to move them would move the target's
        shared = copy.deepcopy(shared).to(device)
    embedding, head = shared
    wanted = (config.vocab_size, config.hidden_size)
    if tuple(embedding.weight.shape) != wanted:
        raise ConfigError(
            f"draft {path!r}: takes the target's embedding, want {list(wanted)}, "
            f"got {list(embedding.weight.shape)}; it belongs to another target"
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype or target.dtype)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        weights |= load_file(file)
    ids = weights.pop(DRAFT_VOCAB, None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if name in own_weights(model)]
    if missing or unexpected:
        raise ConfigError(
            f"draft {path!r}: missing weights {missing[:3]}, unexpected weights {unexpected[:3]}"
        )
    if ids is not None:
        restrict_vocab(model, ids)
    return _placed(model, device or target.device)


def _placed(model: Any, device: torch.device | None) -> PreTrainedModel:
    """The model on `device`, for inference."""
    placed: PreTrainedModel = model.eval() if device is None else model.eval().to(device)
    return placed


def check_same_tokenizer(draft_path: str, tokenizer: Any) -> None:
    """Raise ConfigError where the draft's folder has a tokenizer of another vocabulary."""
    if tokenizer is None or not any(Path(draft_path).glob("tokenizer*")):
        return
    theirs, ours = AutoTokenizer.from_pretrained(draft_path).get_vocab(), tokenizer.get_vocab()
    differing = [token for token, id in theirs.items() if ours.get(token, id) != id]
    if differing or not theirs.keys() & ours.keys():
        raise ConfigError(
            f"draft {draft_path!r}: its tokenizer is not the target's ({len(differing)} tokens "
            "have other ids); a draft must share the target's vocabulary"
        )
