"""Which devices the two models run on; impossible combinations raise before anything is loaded."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from saguaro_kernels.errors import ConfigError, UnsupportedError

from .config import EngineConfig
from .transfer import CPU


class Places(NamedTuple):
    """Devices of a target and of a draft that are given by path."""

    target: torch.device
    draft: torch.device


def places(config: EngineConfig, loaded: torch.device | None = None) -> Places:
    """What `device` and `draft_device` mean on this machine; a warning where a GPU is left idle
    that nobody has spoken of.

    "auto" is a GPU for the target and another one for the draft, as far as there are GPUs. The
    draft's default is the target's device, and "auto" with device="auto".

    loaded: device of a target that is already loaded, not given by path.

    Raises:
        ConfigError: this machine has no such device, or one model would be on a CPU and the other
            on a GPU.
    """
    gpus = torch.cuda.device_count()
    if loaded is not None:
        target = loaded
        check_loaded("device", config.device, target)
    elif config.device == "auto":
        target = torch.device("cuda", 0) if gpus else CPU
    else:
        target = device_of("device", config.device or "cpu")
        if gpus and config.device is None:
            warnings.warn(
                "a GPU is here, and models given by path go onto the CPU: device='auto' "
                "(--device auto) takes the GPU, device='cpu' says that this is meant",
                stacklevel=4,  # who makes the engine
            )
    name = config.draft_device or ("auto" if config.device == "auto" else None)
    if name == "auto" and target.type == "cuda" and gpus > 1:
        draft = torch.device("cuda", 0 if target.index else 1)
    else:
        draft = target if name in (None, "auto") else device_of("draft_device", str(name))
    check_kinds(draft, target)
    return Places(target, draft)


def device_of(option: str, name: str) -> torch.device:
    """The device of this name, as torch writes it; "cuda" is the first GPU.

    Raises:
        ConfigError: this machine has no such device, or models cannot run on it.
    """
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    found = "cuda:0" if name == "cuda" else name
    if found not in here:
        raise ConfigError(
            f"{option}: got {name!r}, torch {torch.__version__} finds {', '.join(here)}"
        )
    return torch.device(found)


def check_loaded(option: str, name: str | None, device: torch.device) -> None:
    """Raise ConfigError where a model lies on another device than the one that was asked for."""
    if name not in (None, "auto") and device_of(option, str(name)) != device:
        raise ConfigError(
            f"{option}: got {name!r}, but the model was loaded on {device}; move it with "
            f".to({name!r}), or leave {option} out"
        )


def device_of_model(name: str, model: Any) -> torch.device:
    """Where a loaded model lies.

    Raises:
        UnsupportedError: on something that is neither a CPU nor a CUDA GPU.
    """
    device = torch.device(model.device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"{name}: lies on {device}; the runtime runs models on the CPU or on CUDA GPUs, so "
            "move it with .to('cpu') or .to('cuda')"
        )
    return device


def check_kinds(draft: torch.device, target: torch.device) -> None:
    """Raise ConfigError for a pair of a CPU and a GPU."""
    if draft.type != target.type:
        raise ConfigError(
            f"draft on {draft}, target on {target}: want both on the CPU, or both on GPUs; move "
            "one with .to(), or see device and draft_device"
        )


def check_pair(draft: torch.device, target: torch.device, lane: str) -> None:
    """Raise ConfigError for devices that this lane cannot join."""
    check_kinds(draft, target)
    where = f"draft on {draft}, target on {target}"
    wanted = ("process", "inline") if draft.type == "cpu" else ("stream", "inline")
    if lane not in wanted:
        raise ConfigError(f"lane: got {lane!r} with the {where}, want one of {wanted}")
    if lane == "inline" and draft != target:
        raise ConfigError(f"lane: got 'inline' with the {where}, want 'stream' for two devices")
