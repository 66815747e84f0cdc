"""Variants of decoding, timed prompt by prompt in turn: a machine that drifts favours none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .config import EngineConfig
from .demo_report import KEYS, Variant
from .engine import Engine
from .requests import SamplingParams

WARM_UP_TOKENS = 8

Tick = Callable[[], object]


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

    def tokens(self, prompt: list[int], params: SamplingParams) -> int:
        """Decode one prompt; how many tokens came."""

    def warm_up(self, prompt: list[int], params: SamplingParams) -> None:
        """Touch what is slow the first time, and forget the numbers."""

    def stats(self) -> dict[str, Any]:
        """The numbers since then."""


class EngineRun:
    """One of ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def tokens(self, prompt: list[int], params: SamplingParams) -> int:
        return len(self.engine.generate(prompt, params)[0].token_ids)

    def warm_up(self, prompt: list[int], params: SamplingParams) -> None:
        self.tokens(prompt, params)
        self.engine.reset_stats()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()


class AssistedRun:
    """transformers' assisted generation, which says nothing of itself: its numbers are 0."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def tokens(self, prompt: list[int], params: SamplingParams) -> int:
        ids = torch.tensor([prompt])
        sampled = {"do_sample": True, "temperature": params.temperature, "top_k": 0}
        out = self.pair.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.pair.draft,
            max_new_tokens=params.max_new_tokens,
            pad_token_id=0,
            **(sampled if params.temperature else {"do_sample": False}),
        )
        return int(out.shape[1]) - len(prompt)

    def warm_up(self, prompt: list[int], params: SamplingParams) -> None:
        torch.manual_seed(params.seed)
        self.tokens(prompt, params)

    def stats(self) -> dict[str, Any]:
        return dict.fromkeys(KEYS, 0.0)


@contextlib.contextmanager
def opened(pair: Pair, variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Every variant ready to decode, by name; their draft processes end with the block."""
    with contextlib.ExitStack() as stack:
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        yield {
            variant.name: AssistedRun(pair)
            if variant.name == "assisted"
            else EngineRun(stack.enter_context(pair.open(variant.config)))
            for variant in variants
        }


def measure(
    runs: Mapping[str, Run],
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tick: Tick,
) -> dict[str, dict[str, Any]]:
    """Each prompt by each variant; the variants' numbers, with tokens/s by the wall clock.

    `tick` is called after every prompt of every variant.
    """
    tokens, seconds = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0.0)
    for variant in variants:
        _use(variant)
        runs[variant.name].warm_up(prompts[0], replace(params, max_new_tokens=WARM_UP_TOKENS))
    for prompt in prompts:
        for variant in variants:
            _use(variant)
            start = time.perf_counter()
            tokens[variant.name] += runs[variant.name].tokens(prompt, params)
            seconds[variant.name] += time.perf_counter() - start
            tick()
    return {
        name: {**run.stats(), "tokens_per_s": tokens[name] / seconds[name]}
        for name, run in runs.items()
    }


def _use(variant: Variant) -> None:
    if variant.config.threads is not None:
        torch.set_num_threads(variant.config.threads)
