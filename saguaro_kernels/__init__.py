"""Triton kernels for speculative speculative decoding; pure ops, no host syncs, no runtime."""

from . import _register  # noqa: F401
from .distribution import (
    PAD,
    RowStats,
    Sampling,
    Status,
    log_prob_reference,
    row_stats,
)
from .errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    SaguaroError,
    ShapeError,
    UnsupportedError,
)
from .rng import Keys, Stream
from .sampling import Sample, saguaro_sample, sample_geometric, sample_workspace_size

__all__ = [
    "PAD",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Keys",
    "RowStats",
    "SaguaroError",
    "Sample",
    "Sampling",
    "ShapeError",
    "Status",
    "Stream",
    "UnsupportedError",
    "log_prob_reference",
    "row_stats",
    "saguaro_sample",
    "sample_geometric",
    "sample_workspace_size",
]
