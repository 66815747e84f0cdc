"""Pairs of scripted models whose acceptance and hits are chosen: what the runs in scripted.py need.

A greedy pair follows one long path of tokens. At each place of it the draft's first choice is the
target's token ("agree"), or its second is ("near"), or it comes last of all ("far"), so that tokens
per round and hits follow from the order of the places alone, and can be played without a model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from saguaro_runtime.planner import accept_lengths, acceptance_for

PRIME = 31
"""Size of the vocabulary of a greedy pair: a path of PRIME^2 - 1 contexts, each visited once."""
_STEP = (1, 7)
"""x_n = (x_{n-1} + 7 x_{n-2}) mod 31: the recurrence whose period is all of them."""
START = (0, 1)


def path(length: int) -> list[int]:
    """The target's text after START."""
    before, last = START
    tokens = []
    for _ in range(length):
        before, last = last, (_STEP[0] * last + _STEP[1] * before) % PRIME
        tokens.append(last)
    return tokens


@dataclass(frozen=True)
class Play:
    """What rounds over a sequence of places come to."""

    tokens_per_round: float
    hit_rate: float
    rounds: int


def play(places: Sequence[str], k: int) -> Play:
    """Rounds of `k` drafts: as many are kept as places agree; a hit unless the extra is far."""
    at = rounds = hits = 0
    while at + k < len(places):
        kept = 0
        while kept < k and places[at + kept] == "agree":
            kept += 1
        hits += places[at + kept] != "far"
        at += kept + 1
        rounds += 1
    return Play(at / rounds, hits / rounds, rounds)


def places_for(tokens: float, hit_rate: float, k: int, length: int) -> tuple[list[str], float]:
    """Places that play `tokens` per round and `hit_rate`, and the acceptance they stand for.

    Independent places with the right odds, of 400 draws the one that plays nearest to both.
    """
    acceptance = acceptance_for(tokens, k)
    full = accept_lengths(acceptance, k)[k]
    # hits = (1 - full) near + full (acceptance + (1 - acceptance) near)
    near = (hit_rate - full * acceptance) / (1.0 - full * acceptance)
    odds = [acceptance, (1 - acceptance) * near, (1 - acceptance) * (1 - near)]

    def draw(seed: int) -> list[str]:
        return random.Random(seed).choices(("agree", "near", "far"), odds, k=length)

    def distance(seed: int) -> float:
        found = play(draw(seed), k)
        return abs(found.tokens_per_round / tokens - 1) + abs(found.hit_rate - hit_rate)

    return draw(min(range(400), key=distance)), acceptance


def greedy_laws(places: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Laws of target and draft, [PRIME^2, PRIME], that meet `places` along the path."""
    generator = torch.Generator().manual_seed(0)
    size = (PRIME * PRIME, PRIME)
    target = torch.full(size, 1e-4, dtype=torch.float64)
    # What the draft believes of all others; its choices are far above, its last far below.
    draft = 1.0 + 0.5 * torch.rand(size, generator=generator, dtype=torch.float64)
    before, last = START
    for place, token in zip(places, path(len(places)), strict=True):
        context = before * PRIME + last
        target[context, token] = 1.0
        draft[context, token] = {"agree": 90.0, "near": 9.0, "far": 1e-3}[place]
        if place != "agree":
            draft[context, (token + 1) % PRIME] = 90.0
        before, last = last, token
    return tuple(its / its.sum(-1, keepdim=True) for its in (target, draft))  # type: ignore


def sampled_laws(
    vocab: int = 64, spread: float = 1.25, noise: float = 0.7, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A Zipf law over the ids of each context, and one whose logits differ by normal noise."""
    generator = torch.Generator().manual_seed(seed)
    size = (vocab * vocab, vocab)
    rank = torch.rand(size, generator=generator).argsort(-1).double()
    logits = -spread * (1.0 + rank).log()
    other = logits + noise * torch.randn(size, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), other.softmax(-1)
