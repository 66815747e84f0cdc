"""The draft: some of the target's own layers and its final norm, as a transformers folder.

Embedding and head stay the target's: they are frozen, not stored, and taken from the target when
the draft is loaded (`saguaro_shared_embeddings` in its config.json).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from saguaro_kernels.errors import ConfigError, UnsupportedError

from ..models.draft import own_weights
from ..models.transformers import SHARED_EMBEDDINGS

FAMILIES = {
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    **dict.fromkeys(
        ("llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
        "model.layers",
    ),
}
"""model_type -> where its layers are. The logits of these are head(last hidden state), no more."""
_PER_LAYER = ("layer_types", "no_rope_layers")
"""Entries of a config that list something of every layer."""


def check_family(config: Any) -> None:
    """Raise UnsupportedError for a target that no draft can be cut from; loads nothing."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"target: got model_type {config.model_type!r}, want one of {', '.join(FAMILIES)}"
        )


def choose_layers(layers: int | tuple[int, ...], total: int) -> tuple[int, ...]:
    """The layers to keep: those given, or as many of the first and of the last ones.

    Raises:
        ConfigError: none, all or more than the target's `total`, or not in ascending order.
    """
    if isinstance(layers, int):
        first = -(-layers // 2)
        if not 1 <= layers < total:
            raise ConfigError(f"layers: got {layers}, want 1..{total - 1} of the target's {total}")
        return (*range(first), *range(total - layers + first, total))
    legal = all(0 <= layer < total for layer in layers) and len(layers) > 0
    if not legal or list(layers) != sorted(set(layers)):
        raise ConfigError(f"layers: got {list(layers)}, want ascending numbers of 0..{total - 1}")
    return tuple(layers)


def student_config(config: Any, layers: tuple[int, ...]) -> Any:
    """The target's config for these layers alone."""
    config = copy.deepcopy(config)
    kept = {
        name: [values[layer] for layer in layers]
        for name in _PER_LAYER
        if isinstance(values := getattr(config, name, None), list)
    }
    config.num_hidden_layers = len(layers)
    for name, values in kept.items():
        setattr(config, name, values)
    setattr(config, SHARED_EMBEDDINGS, True)
    return config


def student_weights(target: Any, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The weights a draft of these layers begins with; embedding and head are not among them."""
    prefix = FAMILIES[target.config.model_type] + "."
    place = {str(layer): str(index) for index, layer in enumerate(layers)}
    weights = {}
    for name, tensor in own_weights(target).items():
        if name.startswith(prefix):
            layer, _, rest = name.removeprefix(prefix).partition(".")
            if layer not in place:
                continue
            name = f"{prefix}{place[layer]}.{rest}"
        weights[name] = tensor
    return weights


def write_student(
    folder: Path, config: Any, weights: dict[str, torch.Tensor], tokenizer: Any
) -> None:
    """Write a draft's folder; what is there already is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
