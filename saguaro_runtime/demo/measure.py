"""Decoding methods timed in turn, batch by batch, so that a drifting machine favours none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..config import EngineConfig
from ..engine import Engine
from ..models.draft import whole_vocab
from ..params import SamplingParams
from .report import KEYS, Variant

WARM_UP_TOKENS = 8

Tick = Callable[[], object]
Batch = Sequence[list[int]]


@dataclass(frozen=True)
class Pair:
    """Two loaded models and their tokenizer."""

    target: Any
    draft: Any
    tokenizer: Any

    def open(self, config: EngineConfig) -> Engine:
        return Engine(self.target, self.draft, config, self.tokenizer)


class Run(Protocol):
    """One variant, ready to decode."""

    def decode(self, batch: Batch, params: SamplingParams) -> list[list[int]]:
        """The new tokens of each prompt."""

    def reset(self) -> None:
        """Forget the numbers."""

    def stats(self) -> dict[str, Any]:
        """The numbers since then."""


class EngineRun:
    """One of ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def decode(self, batch: Batch, params: SamplingParams) -> list[list[int]]:
        return [list(output.token_ids) for output in self.engine.generate(batch, params)]

    def reset(self) -> None:
        self.engine.reset_stats()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()


class AssistedRun:
    """transformers' own assisted generation, one prompt at a time; it keeps no numbers: all 0.

    `options` say what assists: assistant_model=..., or prompt_lookup_num_tokens=....
    """

    def __init__(self, target: Any, **options: Any) -> None:
        if "assistant_model" in options:
            options["assistant_model"] = whole_vocab(options["assistant_model"])
        self.target, self.options = target, options

    def decode(self, batch: Batch, params: SamplingParams) -> list[list[int]]:
        sampled = {"do_sample": True, "temperature": params.temperature, "top_k": 0}
        texts = []
        for prompt in batch:
            ids = torch.tensor([prompt])
            out = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_new_tokens,
                pad_token_id=0,
                **self.options,
                **(sampled if params.temperature else {"do_sample": False}),
            )
            texts.append(out[0, len(prompt) :].tolist())
        return texts

    def reset(self) -> None:
        torch.manual_seed(0)

    def stats(self) -> dict[str, Any]:
        return dict.fromkeys(KEYS, 0.0)


@contextlib.contextmanager
def opened(pair: Pair, variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Every variant ready to decode, by name; their draft processes end with the block."""
    with contextlib.ExitStack() as stack:
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        yield {
            variant.name: AssistedRun(pair.target, assistant_model=pair.draft)
            if variant.name == "assisted"
            else EngineRun(stack.enter_context(pair.open(variant.config)))
            for variant in variants
        }


def measure(
    runs: Mapping[str, Run],
    variants: Sequence[Variant],
    batches: Sequence[Batch],
    params: SamplingParams,
    tick: Tick,
) -> dict[str, dict[str, Any]]:
    """Each batch by each variant: its numbers, tokens/s by the wall clock, the texts.

    `rates` are the tokens/s of the single batches. `tick` is called after every decoding.
    """
    texts: dict[str, list[list[int]]] = {variant.name: [] for variant in variants}
    tokens: dict[str, list[int]] = {name: [] for name in texts}
    seconds: dict[str, list[float]] = {name: [] for name in texts}
    for variant in variants:
        _use(variant)
        # Start-up, first touches of memory and the draft's loading are not to be compared.
        runs[variant.name].decode(batches[0], replace(params, max_new_tokens=WARM_UP_TOKENS))
        runs[variant.name].reset()
    for batch in batches:
        for variant in variants:
            _use(variant)
            start = time.perf_counter()
            found = runs[variant.name].decode(batch, params)
            seconds[variant.name].append(time.perf_counter() - start)
            tokens[variant.name].append(sum(map(len, found)))
            texts[variant.name] += found
            tick()
    return {
        name: {
            **runs[name].stats(),
            "tokens_per_s": sum(tokens[name]) / sum(seconds[name]),
            "rates": [n / s for n, s in zip(tokens[name], seconds[name], strict=True)],
            "texts": texts[name],
        }
        for name in texts
    }


def _use(variant: Variant) -> None:
    if variant.config.threads is not None:
        torch.set_num_threads(variant.config.threads)
