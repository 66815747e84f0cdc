"""How one request is sampled and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError

from .config import check_number

LogitsProcessor = Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]
"""(prompt ids, new ids, logits [V] float32) -> logits [V], for the token that follows them."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Logits are changed in this order: penalties, `logits_processor`, `allowed_token_ids`,
    `min_new_tokens`; then temperature and filters. All of it happens at every position with the
    tokens before that position, drafts included, so speculation does not change the law.

    Args:
        max_new_tokens: most tokens to generate, >= 0.
        temperature: >= 0; 0 is greedy.
        top_k, top_p, min_p: filters, in this order; None is off. top_k >= 1, 0 < top_p <= 1, 0 <=
            min_p <= 1.
        seed: the text is a function of it; two requests with one seed and one prompt give one text.
        stop: strings that end the text; they are cut off.
        stop_token_ids: ids that end the text, beside the model's end-of-sequence ids; kept in
            token_ids.
        ignore_eos: do not end at the model's end-of-sequence ids.
        min_new_tokens: before so many, ids that end the text are forbidden and stop strings are
            text like any other.
        repetition_penalty: in [1e-6, 1e6]; logits of ids in prompt or text are divided by it where
            positive, multiplied where negative; 1 is off.
        frequency_penalty, presence_penalty: taken from an id's logit for each time it is in the
            text, and once if it is; in [-100, 100], 0 is off.
        allowed_token_ids: all other ids are forbidden; None is off.
        logits_processor: (prompt ids, new ids, logits [V] float32) -> logits [V]. It may write to
            the logits it is given. It is called for drafts too, which may be refused: what it
            returns must depend on its arguments alone. If it raises where the text needs it, the
            request ends with "error".
        logprobs: None, or how many of the likeliest ids are reported with their log-probabilities
            beside each token's own, 0..1024. They are the model's own: of its logits before
            penalties, temperature and filters.

    Raises:
        ConfigError: a value is outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processor: LogitsProcessor | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop or ())
        _require("stop", stop, "strings, none empty", all(isinstance(i, str) and i for i in stop))
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (ids := getattr(self, name)) is None and name == "allowed_token_ids":
                continue
            ids = _items(name, ids)
            _require(name, ids, "integers", all(isinstance(id, Integral) for id in ids))
            object.__setattr__(self, name, tuple(dict.fromkeys(map(int, ids))))
        allowed = self.allowed_token_ids
        _require("allowed_token_ids", allowed, "at least one id", allowed is None or bool(allowed))
        most = self.max_new_tokens
        check_number("max_new_tokens", most, 0, 2**63 - 1, whole=True)
        check_number("min_new_tokens", self.min_new_tokens, 0, most, whole=True)
        check_number("seed", self.seed, -(2**63), 2**63 - 1, whole=True)
        check_number("temperature", self.temperature, 0, 1e6)
        check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        for name in ("frequency_penalty", "presence_penalty"):
            check_number(name, getattr(self, name), -100, 100)
        for name, low, high, whole, above in (
            ("top_k", 1, 2**31 - 1, True, False),
            ("top_p", 0, 1, False, True),
            ("min_p", 0, 1, False, False),
            ("logprobs", 0, 1024, True, False),
        ):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, low, high, whole=whole, above=above)
        call, ignore = self.logits_processor, self.ignore_eos
        _require("logits_processor", call, "a callable", call is None or callable(call))
        _require("ignore_eos", ignore, "True or False", isinstance(ignore, bool))

    def without_functions(self) -> SamplingParams:
        """The same without what cannot be sent to another process."""
        return replace(self, logits_processor=None) if self.logits_processor else self


def _require(name: str, got: object, wanted: str, good: bool) -> None:
    if not good:
        raise ConfigError(f"{name}: got {got!r}, want {wanted}")


def _items(name: str, value: Any) -> tuple[Any, ...]:
    good = isinstance(value, Collection) and not isinstance(value, str | bytes)
    _require(name, value, "a list", good)
    return tuple(value)
