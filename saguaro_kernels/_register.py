"""Registration of every op with torch.library: its schema and its implementation, in one place.

An op writes tensors that its caller allocated, marked (a!) .. in the schema, and returns nothing:
the fake kernel is then empty for all of them and cannot disagree with the real one. The public
functions allocate, check, `call` the op (see `_call`) and wrap the tensors in a dataclass. To add
an op, write its implementation `_<op>(...)`, which picks the launcher or the reference by `impl`,
and register it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._call import IMPLEMENTATIONS
from .cache.kernels import _cache_insert, _cache_lookup
from .distribution import _row_stats
from .ngram import _ngram_propose
from .outcomes import _predict_outcomes
from .outcomes.fan_out import _allocate_fan_out
from .promotion import _promote_branch, _promote_pages
from .residual import _residual
from .sampling import _saguaro_sample
from .sampling.geometric import _geometric_row
from .tree import _chain_layout, _tree_layout
from .tree_attention import _tree_attention
from .verification import _verify

_LIBRARY = torch.library.Library("saguaro", "DEF")


def _register(schema: str, implementation: Callable[..., None]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"saguaro::{name}", lambda *_: None, lib=_LIBRARY)
    IMPLEMENTATIONS[name] = implementation


_register(
    "row_stats(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? bias, str impl, Tensor(a!) max, Tensor(b!) lse, Tensor(c!) cutoff, Tensor(d!) argmax, "
    "Tensor(e!) cutoff_id, Tensor(f!) status, Tensor(g!) log_sum) -> ()",
    _row_stats,
)

_register(
    "saguaro_sample(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, Tensor seed, Tensor base, Tensor? offsets, int offset, int stream, "
    "int scale_f, Tensor? downweight, Tensor? bias, Tensor? ids, str impl, Tensor(a!) tokens, "
    "Tensor(b!) logq, Tensor(c!) lse, Tensor(d!) cutoff, Tensor(e!) scale_logit, "
    "Tensor(f!) cutoff_id, "
    "Tensor(g!) scale_id, Tensor(h!) top_ids, Tensor(i!) top_logits, Tensor(j!) status, "
    "Tensor(k!)? workspace) -> ()",
    _saguaro_sample,
)

_register(
    "geometric_row(Tensor draft_logits, Tensor temperature, Tensor cutoff, Tensor cutoff_id, "
    "Tensor top, Tensor log_sum, str impl, Tensor(a!) row) -> ()",
    _geometric_row,
)

_register(
    "tree_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, "
    "Tensor trunk_len, Tensor depth, Tensor? device_step, int draft_len, int step, float scale, "
    "float softcap, int window, str impl, Tensor(a!) out, Tensor(b!)? workspace) -> ()",
    _tree_attention,
)

_register(
    "tree_layout(Tensor depth, Tensor tokens, Tensor trunk_len, Tensor? page_table, int draft_len, "
    "int page_size, str impl, Tensor(a!) ids, Tensor(b!) positions, Tensor(c!) slots, "
    "Tensor(d!) physical) -> ()",
    _tree_layout,
)

_register(
    "chain_layout(Tensor tokens, Tensor count, Tensor trunk_len, Tensor? page_table, "
    "int page_size, str impl, Tensor(a!) ids, Tensor(b!) positions, Tensor(c!) slots, "
    "Tensor(d!) physical, Tensor(e!) depth) -> ()",
    _chain_layout,
)

_register(
    "promote_branch(Tensor(a!) kv_pages, Tensor page_table, Tensor trunk_len, Tensor depth, "
    "Tensor branch, int draft_len, int branches, str impl) -> ()",
    _promote_branch,
)

_register(
    "promote_pages(Tensor(a!) page_table, Tensor trunk_len, Tensor depth, Tensor branch, "
    "int draft_len, int branches, str impl) -> ()",
    _promote_pages,
)

_register(
    "verify(Tensor target_logits, Tensor tokens, Tensor num_draft, Tensor? draft_logits, "
    "Tensor? logq, Tensor? draft_cutoff, Tensor? draft_cutoff_id, Tensor? scale_logit, "
    "Tensor? scale_id, Tensor? downweight, Tensor? one_hot, Tensor? draft_bias, "
    "Tensor? vocab_map, Tensor? draft_row_index, Tensor? draft_temperature, Tensor temperature, "
    "Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor base, Tensor? bias, "
    "Tensor? row_index, Tensor? bonus_tokens, bool target_probs, bool draft_probs, str rule, "
    "str impl, Tensor(a!) num_accepted, Tensor(b!) output, Tensor(c!) status, "
    "Tensor(d!) workspace, Tensor(e!)? num_passing) -> ()",
    _verify,
)

_register(
    "cache_insert(Tensor(a!) buckets, Tensor(b!) key_rows, Tensor(c!) dropped, Tensor uid, "
    "Tensor base, Tensor accepted, Tensor extra, Tensor slot, Tensor? device_generation, "
    "int generation, int max_probes, str impl) -> ()",
    _cache_insert,
)

_register(
    "cache_lookup(Tensor buckets, Tensor key_rows, Tensor tokens, Tensor uid, Tensor base, "
    "Tensor accepted, Tensor extra, Tensor? device_generation, int generation, int max_probes, "
    "str impl, Tensor(a!) hit, Tensor(b!) slot, Tensor(c!) out) -> ()",
    _cache_lookup,
)

_register(
    "predict_outcomes(Tensor draft_logits, Tensor draft_tokens, Tensor num_draft, "
    "Tensor temperature, Tensor seed, Tensor base, Tensor? fan_out, Tensor? accept_prob, "
    "Tensor? cutoff, Tensor? bias, Tensor? ids, str ranking, str allocation, str impl, "
    "Tensor(a!) depth, "
    "Tensor(b!) tokens, Tensor(c!) score, Tensor(d!)? workspace) -> ()",
    _predict_outcomes,
)

_register(
    "allocate_fan_out(Tensor accept_hist, int branches, Tensor? device_r, float r, str impl, "
    "Tensor(a!) out) -> ()",
    _allocate_fan_out,
)

_register(
    "ngram_propose(Tensor history, Tensor length, int max_n, int min_n, str impl, "
    "Tensor(a!) tokens, Tensor(b!) count) -> ()",
    _ngram_propose,
)

_register(
    "residual(Tensor target_logits, Tensor draft_logits, Tensor temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, Tensor draft_temperature, Tensor? draft_top_k, "
    "Tensor? draft_top_p, Tensor? draft_min_p, Tensor? scale, str impl, Tensor(a!) probs, "
    "Tensor(b!) mass, Tensor(c!) status) -> ()",
    _residual,
)
