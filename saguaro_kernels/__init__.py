"""Triton kernels for speculative speculative decoding; pure ops, no host syncs, no runtime."""

from . import _register  # noqa: F401
from ._launch import Impl
from .cache import CacheSize, Lookup, SpeculationCache, optimal_cache_size
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
from .ngram import ngram_propose
from .outcomes import Outcomes, allocate_fan_out, outcomes_workspace_size, predict_outcomes
from .promotion import promote_branch, promote_pages
from .residual import Residual, residual
from .rng import Keys, Stream
from .sampling import Sample, saguaro_sample, sample_geometric, sample_workspace_size
from .tree import Layout, chain_layout, tree_layout
from .tree_attention import AttentionPlan, attention_plan, tree_attention, tree_attention_workspace
from .verification import DRAFT_NAN, Draft, Verdict, verify, verify_workspace_size

__all__ = [
    "DRAFT_NAN",
    "PAD",
    "AttentionPlan",
    "CacheSize",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "Draft",
    "Impl",
    "Keys",
    "Layout",
    "Lookup",
    "Outcomes",
    "Residual",
    "RowStats",
    "SaguaroError",
    "Sample",
    "Sampling",
    "ShapeError",
    "SpeculationCache",
    "Status",
    "Stream",
    "UnsupportedError",
    "Verdict",
    "allocate_fan_out",
    "attention_plan",
    "chain_layout",
    "log_prob_reference",
    "ngram_propose",
    "optimal_cache_size",
    "outcomes_workspace_size",
    "predict_outcomes",
    "promote_branch",
    "promote_pages",
    "residual",
    "row_stats",
    "saguaro_sample",
    "sample_geometric",
    "sample_workspace_size",
    "tree_attention",
    "tree_attention_workspace",
    "tree_layout",
    "verify",
    "verify_workspace_size",
]
