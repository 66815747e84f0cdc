"""What a user asks for and gets: sampling parameters, a request's state, its text and its stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from saguaro_kernels.errors import ConfigError

from .metrics import Counts, Source

FinishReason = Literal["stop", "length", "cancelled", "error"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        whole = isinstance(self.max_new_tokens, int) and isinstance(self.seed, int)
        _require("max_new_tokens, seed", (self.max_new_tokens, self.seed), "integers", whole)
        _require("max_new_tokens", self.max_new_tokens, ">= 0", self.max_new_tokens >= 0)
        _require("temperature", self.temperature, "in [0, 1e6]", 0 <= self.temperature <= 1e6)
        its = self.top_k
        good = its is None or (isinstance(its, int) and 1 <= its < 2**31)
        _require("top_k", its, "an integer in [1, 2^31)", good)
        _require("top_p", self.top_p, "in (0, 1]", self.top_p is None or 0 < self.top_p <= 1)
        _require("min_p", self.min_p, "in [0, 1]", self.min_p is None or 0 <= self.min_p <= 1)
        _require("seed", self.seed, "in [-2^63, 2^63)", -(2**63) <= self.seed < 2**63)
        _require("stop", self.stop, "without empty strings", all(self.stop))


def _require(name: str, got: object, wanted: str, good: bool) -> None:
    if not good:
        raise ConfigError(f"{name}: got {got!r}, want {wanted}")


class Round(NamedTuple):
    """One round: tokens committed before it, drafted for it, committed by it, its Source."""

    base: int
    drafted: int
    committed: int
    source: Source


@dataclass(frozen=True)
class Output:
    """A finished request. `metrics`: sums over its rounds, see metrics.Counts."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)


class TextStream:
    """Turns token ids into text as they come, without half characters and stop strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._hold = max((len(string) for string in stop), default=1) - 1
        self._ids: list[int] = []
        self._decoded = self._window = 0
        self._emitted = 0

    def append(self, token: int) -> None:
        """Take one token; afterwards `stopped` says whether a stop string is complete."""
        self._ids.append(token)
        # A window of earlier ids goes with the new ones: some tokenizers join words by context.
        before = self._decode(self._ids[self._window : self._decoded])
        after = self._decode(self._ids[self._window :])
        if after.endswith("\ufffd"):
            return
        self._accept(after[len(before) :])
        self._window, self._decoded = self._decoded, len(self._ids)

    def finish(self) -> None:
        """Flush what was held back, half characters included."""
        if not self.stopped and self._decoded < len(self._ids):
            before = self._decode(self._ids[self._window : self._decoded])
            self._accept(self._decode(self._ids[self._window :])[len(before) :])
        self._hold = 0

    def take(self) -> str:
        """The text since the last call that no stop string can still cut."""
        end = len(self.text) if self.stopped else max(self._emitted, len(self.text) - self._hold)
        piece, self._emitted = self.text[self._emitted : end], end
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _accept(self, piece: str) -> None:
        start = max(0, len(self.text) - self._hold)
        self.text += piece
        cuts = [cut for s in self._stop if (cut := self.text.find(s, start)) >= 0]
        if cuts:
            self.text, self.stopped = self.text[: min(cuts)], True


@dataclass
class Request:
    """A request in the engine. Tokens are committed one by one, so every stop is exact."""

    uid: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    """Most new tokens: max_new_tokens, or less where the model's length ends before."""
    stream: TextStream | None = None
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    counts: Counts = field(default_factory=Counts)
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
        return self.limit - len(self.token_ids)

    def commit(self, tokens: list[int]) -> None:
        """Take a round's tokens up to the first stop; what lies behind it is dropped."""
        for token in tokens:
            if self.remaining <= 0:
                break
            self.token_ids.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
                break
            if self.stream is not None:
                self.stream.append(token)
                if self.stream.stopped:
                    self.finish_reason = "stop"
                    break
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.finish(self.finish_reason)

    def finish(self, reason: FinishReason) -> None:
        """End the request, if it has not ended by itself."""
        self.finish_reason = self.finish_reason or reason
        if self.stream is not None:
            self.stream.finish()

    def take_text(self) -> str:
        """The text since the last call that no stop can still cut."""
        return self.stream.take() if self.stream is not None else ""

    def output(self) -> Output:
        """What the request returned, so far if it has not finished."""
        text = self.stream.text if self.stream is not None else ""
        reason = self.finish_reason or "cancelled"
        return Output(list(self.token_ids), text, reason, self.counts.summary(), list(self.rounds))
