"""How one request is sampled and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from saguaro_kernels.errors import ConfigError

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
        repetition_penalty: > 0; logits of ids in prompt or text are divided by it where positive,
            multiplied where negative; 1 is off.
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = tuple(dict.fromkeys(allowed))
            object.__setattr__(self, "allowed_token_ids", allowed)
        most = self.max_new_tokens
        whole = isinstance(most, int) and isinstance(self.seed, int)
        _require("max_new_tokens, seed", (most, self.seed), "integers", whole)
        _require("max_new_tokens", most, ">= 0", most >= 0)
        _require("temperature", self.temperature, "in [0, 1e6]", 0 <= self.temperature <= 1e6)
        top_k = self.top_k
        good = top_k is None or (isinstance(top_k, int) and 1 <= top_k < 2**31)
        _require("top_k", top_k, "an integer in [1, 2^31)", good)
        _require("top_p", self.top_p, "in (0, 1]", self.top_p is None or 0 < self.top_p <= 1)
        _require("min_p", self.min_p, "in [0, 1]", self.min_p is None or 0 <= self.min_p <= 1)
        _require("seed", self.seed, "in [-2^63, 2^63)", -(2**63) <= self.seed < 2**63)
        _require("stop", self.stop, "without empty strings", all(self.stop))
        least = self.min_new_tokens
        good = isinstance(least, int) and 0 <= least <= most
        _require("min_new_tokens", least, f"an integer in 0..max_new_tokens={most}", good)
        penalty = self.repetition_penalty
        good = math.isfinite(penalty) and penalty > 0
        _require("repetition_penalty", penalty, "finite and > 0", good)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(name, value, "in [-100, 100]", -100 <= value <= 100)
        _require("allowed_token_ids", allowed, "at least one id", allowed is None or bool(allowed))
        call = self.logits_processor
        _require("logits_processor", call, "a callable", call is None or callable(call))
        count = self.logprobs
        good = count is None or (isinstance(count, int) and 0 <= count <= 1024)
        _require("logprobs", count, "an integer in 0..1024", good)

    def without_functions(self) -> SamplingParams:
        """The same without what cannot be sent to another process."""
        return replace(self, logits_processor=None) if self.logits_processor else self


def _require(name: str, got: object, wanted: str, good: bool) -> None:
    if not good:
        raise ConfigError(f"{name}: got {got!r}, want {wanted}")
