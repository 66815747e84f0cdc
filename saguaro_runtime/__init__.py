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
from .requests import Output, Request, SamplingParams

__all__ = [
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Engine",
    "EngineConfig",
    "Fallback",
    "Output",
    "Request",
    "SaguaroError",
    "SamplingParams",
    "ShapeError",
    "UnsupportedError",
    "generate",
]
