"""Models by path: a folder or a hub name, and drafts that borrow the target's embedding."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from saguaro_kernels.errors import ConfigError, SaguaroError

from .draft import DRAFT_VOCAB, borrows_embedding, own_weights, restrict_vocab


def load_model(
    path: str,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a transformers folder or hub name for inference, on the CPU unless told otherwise.

    Raises:
        ConfigError: there is nothing to load at `path`, or it is damaged or incomplete.
    """
    if path.startswith((".", "/")) and not Path(path).exists():  # a hub would complain of the name
        raise ConfigError(f"model {path!r}: does not exist; want a folder of a transformers model")
    with explained(f"model {path!r}", "want a transformers folder or a hub name"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", output_loading_info=True, **options
        )
    model, found = loaded
    if found["missing_keys"]:  # transformers makes them up, and the text would be nobody's
        names = sorted(found["missing_keys"])
        raise ConfigError(f"model {path!r}: {len(names)} weights are missing, {names[0]!r} first")
    return _placed(model, device)


@contextlib.contextmanager
def explained(what: str, wanted: str) -> Iterator[None]:
    """Inside, whatever a damaged or strange file makes its reader raise becomes a ConfigError."""
    try:
        yield
    except SaguaroError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what}: cannot be loaded ({reason}); {wanted}") from error


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a transformers folder or hub name.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    with explained(f"tokenizer of {path!r}", "want its files beside the model's"):
        return AutoTokenizer.from_pretrained(path)


def load_draft(
    path: str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a draft; where its folder says so, embedding and head are the target's own tensors.

    device: where it goes, by default the CPU, or beside the tensors it shares; on another device
    than the target's it has copies of them.

    Raises:
        ConfigError: it cannot be loaded, or belongs to another target.
    """
    with explained(f"draft {path!r}", "want a folder of distill's making"):
        if borrows_embedding(path):
            return _load_beside(path, target, dtype, device)
    return load_model(path, dtype, device)


def _load_beside(
    path: str, target: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None
) -> PreTrainedModel:
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
    own = own_weights(model).keys()
    # What is shared is never written to: that would be the target's.
    missing, unexpected = sorted(own - weights.keys()), sorted(weights.keys() - own)
    if missing or unexpected:
        raise ConfigError(
            f"draft {path!r}: missing weights {missing[:3]}, unexpected weights {unexpected[:3]}"
        )
    model.load_state_dict(weights, strict=False)
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
    theirs, ours = load_tokenizer(draft_path).get_vocab(), tokenizer.get_vocab()
    differing = [token for token, id in theirs.items() if ours.get(token, id) != id]
    if differing or not theirs.keys() & ours.keys():
        raise ConfigError(
            f"draft {draft_path!r}: its tokenizer is not the target's ({len(differing)} tokens "
            "have other ids); a draft must share the target's vocabulary"
        )
