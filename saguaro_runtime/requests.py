"""A request's state, its text and stop rules, and the output that the user gets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .metrics import Counts, Source, Times
from .params import SamplingParams
from .processors import LogitsEditor, Logprobs

FinishReason = Literal["stop", "length", "cancelled", "error"]
Prompt = str | Sequence[int]


class Round(NamedTuple):
    """A request's round: tokens committed before it, drafted for it, committed by it; Source."""

    base: int
    drafted: int
    committed: int
    source: Source


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        metrics: sums over its rounds, see metrics.Counts, and its times, see metrics.Times.
        logprobs: one entry per token where SamplingParams.logprobs asked for them.
        error: what happened where finish_reason is "error".
        prompt_tokens: ids of the prompt.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    error: str | None = None
    prompt_tokens: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens under the names of the OpenAI protocol."""
        new = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }


class TextStream:
    """Incremental detokenizer: holds back partial characters and what a stop string may cut."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._hold = max((len(string) for string in stop), default=1) - 1
        self._ids: list[int] = []
        self._decoded = self._window = 0
        self._emitted = 0

    def append(self, token: int, *, may_stop: bool = True) -> None:
        """Take one token; afterwards `stopped` says whether it completed a stop string."""
        self._ids.append(token)
        # Decoded together with some earlier ids: how words are joined may depend on context.
        before = self._decode(self._ids[self._window : self._decoded])
        after = self._decode(self._ids[self._window :])
        if after.endswith("\ufffd"):
            return
        self._accept(after[len(before) :], may_stop)
        self._window, self._decoded = self._decoded, len(self._ids)

    def finish(self) -> None:
        """Flush what was held back, partial characters included."""
        if not self.stopped and self._decoded < len(self._ids):
            before = self._decode(self._ids[self._window : self._decoded])
            self._accept(self._decode(self._ids[self._window :])[len(before) :])
        self._hold = 0

    def take(self) -> str:
        """The text since the last call, without what a stop string may still cut."""
        hold, text = 0 if self.stopped else self._hold, self.text
        end = max(self._emitted, len(text) - hold)
        piece, self._emitted = text[self._emitted : end], end
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _accept(self, piece: str, may_stop: bool = True) -> None:
        text = self.text + piece
        starts = ((string, max(0, len(self.text) - len(string) + 1)) for string in self._stop)
        cuts = [cut for string, at in starts if (cut := text.find(string, at)) >= 0]
        # Assigned once: another thread may be taking text.
        self.text = text[: min(cuts)] if cuts and may_stop else text
        self.stopped = bool(cuts) and may_stop


@dataclass
class Request:
    """A request in the engine. Tokens are committed one by one, so every stop is exact."""

    uid: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    """Most new tokens: max_new_tokens, or what is left of the model's length if that is less."""
    editor: LogitsEditor
    stream: TextStream | None = None
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    counts: Counts = field(default_factory=Counts)
    times: Times = field(default_factory=Times)
    rounds: list[Round] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Committed tokens, the prompt included: the next round's base."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def last(self) -> int:
        """The last committed token, which no model has been fed yet."""
        return (self.token_ids or self.prompt)[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still get."""
        return self.limit - len(self.token_ids)

    def commit(self, tokens: list[int], logprobs: Sequence[Logprobs] = ()) -> None:
        """Append a round's tokens up to the first stop; those after it are dropped."""
        before = len(self.token_ids)
        try:
            self._take(tokens)
        except Exception as error:  # from the tokenizer: other requests must not fail with it
            self.fail(f"{type(error).__name__}: {error}")
        self.logprobs += logprobs[: len(self.token_ids) - before]
        if self.token_ids and self.times.first is None:
            self.times.first = time.monotonic()
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.finish(self.finish_reason)

    def finish(self, reason: FinishReason) -> None:
        """End the request, if it has not ended by itself."""
        self.finish_reason = self.finish_reason or reason
        if self.stream is None or self.finish_reason == "error":
            return
        try:
            self.stream.finish()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        if self.stream.stopped and self.finish_reason == "length":
            self.finish_reason = "stop"  # what was held back completed a stop string

    def fail(self, reason: str) -> None:
        """End the request with an error; it keeps the tokens it has."""
        self.finish_reason, self.error = "error", reason
        if self.stream is not None:
            with contextlib.suppress(Exception):
                self.stream.finish()

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            if self.remaining <= 0:
                break
            self.token_ids.append(token)
            count, least = len(self.token_ids), self.params.min_new_tokens
            if token in self.stop_ids and count > least:
                self.finish_reason = "stop"
                break
            if self.stream is not None:
                self.stream.append(token, may_stop=count >= least)
                if self.stream.stopped:
                    self.finish_reason = "stop"
                    break

    def take_text(self) -> str:
        """The text since the last call, without what a stop string may still cut."""
        return self.stream.take() if self.stream is not None else ""

    def output(self) -> Output:
        """What the request has produced, finished or not."""
        return Output(
            token_ids=list(self.token_ids),
            text=self.stream.text if self.stream is not None else "",
            finish_reason=self.finish_reason or "cancelled",
            metrics=self.counts.summary() | self.times.summary(len(self.token_ids)),
            rounds=list(self.rounds),
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            error=self.error,
            prompt_tokens=len(self.prompt),
        )
