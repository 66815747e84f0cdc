"""Rounds drawn from small laws, for the tests of what verification makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from saguaro_kernels import (
    Keys,
    Sampling,
    Stream,
    rng,
)

DRAWS = 1 << 17
P_ROW = [0.05, 0.4, 0.1, 0.25, 0.15, 0.05]
Q_ROW = [0.3, 0.3, 0.02, 0.18, 0.1, 0.1]


def noise_of_rows(
    keys: Keys, offset: torch.Tensor | int, stream: Stream, vocab: int
) -> torch.Tensor:
    """gumbel_reference without its search for equal keys: here all keys differ."""
    return rng._gumbel(torch.stack(rng._counters(keys, offset, stream), 1), stream, vocab)


def logs(probabilities: object) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def keys_of(draws: int, seed: int, base: int = 5) -> Keys:
    return Keys(torch.arange(draws) + seed * 2**32, torch.full((draws,), base))


def ones(draws: int) -> Sampling:
    return Sampling(torch.ones(draws))


def draw(
    log_q: torch.Tensor,
    generator: torch.Generator,
    keys: Keys | None = None,
    offset: int = 0,
    stream: Stream | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row of log-probabilities, and its log-probability."""
    if stream is None:
        noise = -torch.empty(log_q.shape).exponential_(generator=generator).log()
    else:
        noise = noise_of_rows(keys, offset, stream, log_q.shape[1])
    token = (log_q + noise).argmax(1)
    return token, log_q.gather(1, token[:, None])[:, 0]


def iid_counts(tokens: torch.Tensor, law: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Histogram of the texts of an iid target, and their law."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.multinomial(torch.tensor(law), tokens.numel(), True, generator=generator)
    text = torch.where(tokens < 0, rest.view(tokens.shape), tokens)
    code = text @ (len(law) ** torch.arange(text.shape[1] - 1, -1, -1))
    joint = law
    for _ in range(text.shape[1] - 1):
        joint = np.outer(joint, law).ravel()
    return np.bincount(code.numpy(), minlength=len(joint)), joint


def first(value: Any, count: int) -> Any:
    """The first requests of a Draft, a Sampling or Keys."""
    if isinstance(value, torch.Tensor):
        return value[:count]
    if not dataclasses.is_dataclass(value):
        return value
    return type(value)(**{name: first(part, count) for name, part in vars(value).items()})
