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
from .residual import Residual, residual
from .rng import Keys, Stream
from .sampling import Sample, saguaro_sample, sample_geometric, sample_workspace_size
from .verification import DRAFT_NAN, Draft, Verdict, verify, verify_workspace_size

__all__ = [
    "DRAFT_NAN",
    "PAD",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Draft",
    "Keys",
    "Residual",
    "RowStats",
    "SaguaroError",
    "Sample",
    "Sampling",
    "ShapeError",
    "Status",
    "Stream",
    "UnsupportedError",
    "Verdict",
    "log_prob_reference",
    "residual",
    "row_stats",
    "saguaro_sample",
    "sample_geometric",
    "sample_workspace_size",
    "verify",
    "verify_workspace_size",
]
