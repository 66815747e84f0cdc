"""Tokens a request is likely to repeat: what followed the longest earlier match of its own last tokens.

    match(e) = max m <= max_n with history[e - t] = history[length - 1 - t] for t = 0..m-1,   e < length - 1
    e*       = the last e of the longest match;   period = length - 1 - e*
    tokens[i] = history[e* + 1 + i mod period]

The copy may run into the suffix it continues and then repeats with the period, as in LZ77, so a loop of
one token is proposed in full. Deterministic, so it is verified as a one-hot proposal.

Source: prompt lookup decoding (Saxena, 2023); Ziv and Lempel, 1977.
"""

from __future__ import annotations

import torch

PAD = -1


def ngram_propose_reference(
    history: torch.Tensor,
    length: torch.Tensor,
    *,
    num_tokens: int,
    max_n: int = 3,
    min_n: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, width = history.shape
    end = torch.arange(width, device=history.device)[None, :]
    last = length.long()[:, None] - 1
    alive = (end < last).expand(batch, width)
    match = torch.zeros_like(history)
    for t in range(max_n):
        suffix = history.gather(1, (last - t).clamp(min=0))
        alive = alive & (end >= t) & (history.roll(t, 1) == suffix)
        match += alive
    # One maximum finds the longest match and the last of them.
    best = (match * width + end).amax(1, keepdim=True)
    longest, where = best // width, best % width
    period = (last - where).clamp(min=1)
    step = torch.arange(num_tokens, device=history.device)[None, :]
    tokens = history.gather(1, (where + 1 + step % period).clamp(max=width - 1))
    found = longest >= min_n
    count = torch.where(found[:, 0], num_tokens, 0).to(torch.int32)
    return torch.where(found, tokens, PAD), count


def ngram_propose(
    history: torch.Tensor,
    length: torch.Tensor,
    *,
    num_tokens: int,
    max_n: int = 3,
    min_n: int = 1,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    return ngram_propose_reference(history, length, num_tokens=num_tokens, max_n=max_n, min_n=min_n)
