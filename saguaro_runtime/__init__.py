"""Speculative speculative decoding: a draft that works while the target verifies."""

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
