"""What generate() prepares for a decoding method, taken apart: which parts the engine does itself.

generate() hands over one list of logits processors and one of stopping criteria. Temperature and
the filters at the end of the first, and the length and end-of-sequence criteria of the second, are
options of a request; the rest is called, per row and per token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

from saguaro_kernels.errors import UnsupportedError

_STATEFUL = tuple(
    getattr(logits_process, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
    )
)
"""Must see every token once and in order; they would also see drafts that are rejected."""


class Sampled(NamedTuple):
    """`options` of SamplingParams, and the processors that come before them."""

    options: dict[str, Any]
    processors: list[Any]


def split_processors(processors: Iterable[Any], do_sample: bool) -> Sampled:
    """Temperature, top-k, top-p and min-p at the list's end, in this order, and what precedes them.

    Raises:
        UnsupportedError: a processor that cannot be called for drafts that may be rejected.
    """
    rest = list(processors)
    if rest and type(rest[-1]) is logits_process.LogitNormalization:
        rest.pop()  # the law is the same
    options: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    for kind, name in (
        (logits_process.MinPLogitsWarper, "min_p"),
        (logits_process.TopPLogitsWarper, "top_p"),
        (logits_process.TopKLogitsWarper, "top_k"),
        (logits_process.TemperatureLogitsWarper, "temperature"),
    ):
        if do_sample and rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            options[name] = getattr(rest.pop(), name)
    for processor in rest:
        name = type(processor).__name__
        if isinstance(processor, _STATEFUL):
            raise UnsupportedError(f"{name}: keeps a state from token to token, which drafts upset")
        # As LogitsProcessorList counts them: the callee's own, without `self`.
        if len(inspect.signature(processor.__call__).parameters) > 2:
            raise UnsupportedError(f"{name}: takes more than input_ids and scores")
    return Sampled(options, rest)


def processors_of_row(processors: Iterable[Any], row: int, rows: int) -> LogitsProcessorList:
    """The processors as row `row` of `rows` needs them: called with that row alone.

    The only ones of transformers' that know which row they see are replaced by such of one row.
    """
    adapted = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor) and ignored.ndim == 1 and len(ignored) == rows:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        elif isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
            batch = row // processor._num_beams
            allowed = partial(_allowed, processor._prefix_allowed_tokens_fn, batch)
            processor = logits_process.PrefixConstrainedLogitsProcessor(allowed, 1)
        adapted.append(processor)
    return adapted


def _allowed(function: Any, batch: int, _: int, ids: torch.Tensor) -> list[int]:
    return list(function(batch, ids))


def request_options(
    processors: Sequence[Any], row: int, rows: int, padded: torch.Tensor, padding: int
) -> dict[str, Any]:
    """The processors that precede temperature and filters, as options of SamplingParams.

    `padded` [n]: the row's prompt as generate() has it, its first `padding` ids not the text's.
    """
    adapted = processors_of_row(processors, row, rows)
    options: dict[str, Any] = {}
    if adapted and type(adapted[0]) is logits_process.RepetitionPenaltyLogitsProcessor:
        ignored = getattr(adapted[0], "prompt_ignore_length", None)
        if (0 if ignored is None else int(ignored)) == padding:
            options["repetition_penalty"] = adapted.pop(0).penalty
    if adapted:
        options["logits_processor"] = partial(_call, adapted, padded)
    return options


def _call(
    processors: Any,
    padded: torch.Tensor,
    _: Sequence[int],
    new: Sequence[int],
    logits: torch.Tensor,
) -> torch.Tensor:
    ids = torch.cat((padded, padded.new_tensor(new)))
    out: torch.Tensor = processors(ids[None], logits[None])[0]
    return out


class Stops(NamedTuple):
    """The longest a row may be, the ids that end it, and the criteria that must be asked."""

    max_length: int | None
    stop_ids: tuple[int, ...]
    criteria: stopping_criteria.StoppingCriteriaList


def split_criteria(criteria: Iterable[Any]) -> Stops:
    """Length and end-of-sequence ids, and the rest of the criteria."""
    lengths: list[int] = []
    ids: list[int] = []
    rest = stopping_criteria.StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is stopping_criteria.MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is stopping_criteria.EosTokenCriteria:
            ids += criterion.eos_token_id.flatten().tolist()
        else:
            rest.append(criterion)
    return Stops(min(lengths, default=None), tuple(ids), rest)


def _is_plain(warper: Any) -> bool:
    """A filter that removes tokens, and may leave one alone."""
    return bool(
        getattr(warper, "filter_value", -torch.inf) == -torch.inf
        and getattr(warper, "min_tokens_to_keep", 1) == 1
    )
