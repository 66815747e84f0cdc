"""Scripted models and engines over them, for tests of laws, order and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.models.scripted import ScriptedModel


def law_of_two(rows: Sequence[Sequence[float]], vocab: int) -> torch.Tensor:
    """A law given the last two tokens, [V * V, V], from one given none, one or two of them."""
    law = torch.tensor(rows, dtype=torch.float64).reshape(-1, vocab)
    return law.repeat(vocab * vocab // len(law), 1)


def random_law(vocab: int, seed: int, near: torch.Tensor | None = None) -> torch.Tensor:
    """A random law, or one like `near`."""
    noise = torch.randn(vocab * vocab, vocab, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(noise * 1.5 if near is None else near.log() + 0.5 * noise, -1)


def engine(target: Any, draft: Any, *, tokenizer: Any = None, **options: Any) -> Engine:
    """An engine on the torch reference, reproducible unless told otherwise."""
    defaults = {"rule": "token", "k": 3, "branches": 8, "lane": "inline", "reproducible": True}
    config = EngineConfig(**(defaults | {"impl": "reference"} | options))
    return Engine(target, draft, config, tokenizer)


def model(law: torch.Tensor, rows: int = 8, **options: Any) -> ScriptedModel:
    return ScriptedModel(law, rows=rows, **options)


def texts(
    running: Engine, prompt: Sequence[int], count: int, new_tokens: int, seed: int = 0
) -> np.ndarray:
    """New tokens of `count` sampled requests with seeds of their own: [count, new_tokens]."""
    each = [
        SamplingParams(max_new_tokens=new_tokens, temperature=1.0, seed=seed * 1_000_003 + index)
        for index in range(count)
    ]
    outputs = running.generate([list(prompt)] * count, each)
    return np.array([output.token_ids for output in outputs])


def joint(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """How often each joint value of the columns came, most significant first: [V ** columns]."""
    index = np.zeros(len(tokens), dtype=np.int64)
    for column in tokens.T:
        index = index * vocab + column
    return np.bincount(index, minlength=vocab ** tokens.shape[1])


def sampled(seed: int, new_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=new_tokens, **({"temperature": 1.0, "seed": seed} | options)
    )
