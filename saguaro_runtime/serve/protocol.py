"""The OpenAI protocol as far as it is served: what a request may say.

Options that this server has and the protocol has not (top_k, min_p, repetition_penalty, min_tokens,
ignore_eos) are taken too; the openai client sends them by `extra_body`. What cannot be honoured is
refused by name rather than ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from saguaro_kernels.errors import ConfigError, UnsupportedError

from ..config import check_number
from ..params import SamplingParams

DEFAULT_MAX_TOKENS = 1024
"""New tokens of a chat answer whose request names no number; less where the model ends before."""

_SPREAD = 0x9E3779B97F4A7C15


class Body(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def count(self) -> int:
        """Answers per prompt."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= 128:
            raise ConfigError(f"n: got {n}, want 1..128")
        return n

    def top_logprobs_wanted(self) -> int | None:
        return None

    def new_tokens(self, room: int) -> int:
        raise NotImplementedError

    def usage_wanted(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def params(self, room: int, index: int, seed: int, vocab_size: int) -> SamplingParams:
        """Of answer `index`; `room`: tokens the model and the memory have left after the prompt."""
        processor = None
        if self.logit_bias:
            for id, value in self.logit_bias.items():
                if not (id.isdecimal() and len(id) < 10 and int(id) < vocab_size):
                    raise ConfigError(
                        f"logit_bias: got {id!r:.40}, want ids in 0..{vocab_size - 1}"
                    )
                check_number(f"logit_bias of {id}", value, -100, 100)
            bias = {int(id): value for id, value in self.logit_bias.items()}
            processor = functools.partial(_add_bias, bias)
        first = seed if self.seed is None else self.seed
        signed = (first + index * _SPREAD + 2**63) % 2**64 - 2**63
        return SamplingParams(
            max_new_tokens=self.new_tokens(room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=None if self.top_p == 1 else self.top_p,
            min_p=self.min_p or None,
            seed=signed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_new_tokens=self.min_tokens or 0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logits_processor=processor,
            logprobs=self.top_logprobs_wanted(),
        )


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        if self.echo or self.suffix:
            raise UnsupportedError(
                "echo, suffix: want neither; the answer is what follows the text"
            )
        if self.best_of not in (None, self.count()):
            raise UnsupportedError(f"best_of: got {self.best_of}, want n={self.count()} or nothing")
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        several: Any = [self.prompt] if single else self.prompt
        return list(several)

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def new_tokens(self, room: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, text parts joined."""
        if self.tools or (self.response_format or {}).get("type", "text") != "text":
            raise UnsupportedError("tools, response_format: want neither; answers are plain text")
        if not self.messages:
            raise ConfigError("messages: got none, want at least one")
        joined = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                texts = [part.get("text") for part in content if _is_text(part)]
                if len(texts) < len(content):
                    raise UnsupportedError("messages: got parts that are not text, want text")
                content = "".join(texts)
            if not isinstance(content, str) or not isinstance(message.get("role"), str):
                raise ConfigError("messages: each needs a role and a content of text")
            joined.append(message | {"content": content})
        return joined

    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def new_tokens(self, room: int) -> int:
        asked = self.max_completion_tokens
        asked = self.max_tokens if asked is None else asked
        return min(DEFAULT_MAX_TOKENS, max(room, 1)) if asked is None else asked


def _is_text(part: Any) -> bool:
    """Whether a part of a message is a text."""
    of_text = isinstance(part, dict) and part.get("type") == "text"
    return of_text and isinstance(part.get("text"), str)


def _add_bias(
    bias: dict[int, float], prompt: Sequence[int], new: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    for id, value in bias.items():
        logits[id] += value
    return logits
