"""The draft: some of the target's own layers and its final norm, as a transformers folder.

Embedding and head stay the target's: they are frozen, not stored, and taken from the target when
the draft is loaded (`saguaro_shared_embeddings` in its config.json).
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from saguaro_kernels.errors import ConfigError, UnsupportedError

from ..models.draft import SHARED_EMBEDDINGS, own_weights
from ..models.loading import explained
from .settings import written

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


def check_start(config: Any, layers: int | tuple[int, ...], draft: str | None) -> tuple[int, ...]:
    """The target's layers to begin with; () where a draft is trained further. Loads nothing.

    Raises:
        UnsupportedError, ConfigError: it cannot begin so; see the functions below.
    """
    check_family(config)
    if draft is None:
        return choose_layers(layers, config.num_hidden_layers)
    check_draft(draft, config)
    return ()


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


def check_draft(draft: str, config: Any) -> None:
    """See that training can go on from a draft's folder; loads no weights.

    Raises:
        ConfigError: no draft, one with an embedding of its own, or another target's.
    """
    file = Path(draft) / "config.json"
    if not file.is_file():
        raise ConfigError(f"draft {draft!r}: has no config.json; want a folder of distill's making")
    with explained(f"draft {draft!r}", "want a folder of distill's making"):
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    if not found.get(SHARED_EMBEDDINGS):
        raise ConfigError(f"draft {draft!r}: has an embedding of its own, want the target's")
    for name in ("model_type", "vocab_size", "hidden_size"):
        wanted = getattr(config, name)
        # GPT-2 calls its hidden size otherwise in its files.
        got = found.get(config.attribute_map.get(name, name))
        if got != wanted:
            raise ConfigError(f"draft {draft!r}: {name} is {got}, the target's is {wanted}")


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


def copy_student(draft: str, folder: Path) -> None:
    """Copy a draft, once, without its tokenizer; config.json, the last, says that it is there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in [*sorted(Path(draft).glob("*.safetensors")), Path(draft) / "config.json"]:
        shutil.copyfile(file, folder / file.name)


def write_student(
    folder: Path, config: Any, weights: dict[str, torch.Tensor], tokenizer: Any
) -> None:
    """Write a draft's folder; what is there already is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with written(folder / "model.safetensors") as part:
        save_file(stored, part, metadata={"format": "pt"})
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
