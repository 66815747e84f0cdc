"""Speculative speculative decoding: a draft that works while the target verifies.

Names are imported when they are used: `saguaro --help` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saguaro_kernels.errors import (
        ConfigError,
        DeviceError,
        DTypeError,
        SaguaroError,
        ShapeError,
        UnsupportedError,
    )

    from .config import EngineConfig, Fallback
    from .engine import Engine, generate
    from .params import LogitsProcessor, SamplingParams
    from .processors import Logprobs
    from .requests import Output, Request

__all__ = [
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Engine",
    "EngineConfig",
    "Fallback",
    "LogitsProcessor",
    "Logprobs",
    "Output",
    "Request",
    "SaguaroError",
    "SamplingParams",
    "ShapeError",
    "UnsupportedError",
    "generate",
]

_HOMES = {
    "saguaro_runtime.config": ("EngineConfig", "Fallback"),
    "saguaro_runtime.engine": ("Engine", "generate"),
    "saguaro_runtime.params": ("LogitsProcessor", "SamplingParams"),
    "saguaro_runtime.processors": ("Logprobs",),
    "saguaro_runtime.requests": ("Output", "Request"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "saguaro_kernels.errors")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
