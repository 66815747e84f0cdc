"""The law of what is sampled, over large vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from live_ids import noise_of_ids, scattered_ids, spread

import oracles
from saguaro_kernels import (
    Keys,
    Sampling,
    Stream,
)
from saguaro_kernels.sampling import reference, saguaro_sample_reference

DRAWS, CHUNK = 1 << 17, 1 << 12


def draw_many(
    logits: torch.Tensor, draws: int, ids: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """Tokens drawn by the reference from one row under seeds 0, 1, ..; of `ids`, its columns."""
    sampling, tokens = options.pop("sampling", {}), []
    for start in range(0, draws, CHUNK):
        rows = min(CHUNK, draws - start)
        per_row = {name: torch.full((rows,), value) for name, value in sampling.items()}
        if "top_k" in per_row:
            per_row["top_k"] = per_row["top_k"].int()
        given = dict(options)
        if "downweight" in given:
            given["downweight"] = torch.full((rows,), given["downweight"])
        keys = Keys(torch.arange(start, start + rows), torch.full((rows,), 11))
        with pytest.MonkeyPatch.context() as patch:
            if ids is not None:
                noise = noise_of_ids(keys, 0, Stream.DRAFT, ids), torch.arange(rows)
                patch.setattr(reference, "distinct_gumbel_reference", lambda *_, n=noise: n)
            sample = saguaro_sample_reference(
                logits.expand(rows, -1),
                Sampling(**{"temperature": torch.ones(rows), **per_row}),
                keys,
                offset=0,
                **given,
            )
        tokens.append(sample.tokens)
    return torch.cat(tokens)


def histogram(tokens: torch.Tensor, cells: int) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=cells)


@pytest.mark.parametrize("vocab", [4096, 128256])
@pytest.mark.parametrize("scheme", ["filtered", "downweight"])
def test_law_of_ids_scattered_over_tiles(vocab, scheme):
    """The law of the live ids' columns; whole rows give the same tokens."""
    row = torch.tensor([1.0, 0.2, 1.5, -0.5, 0.9, 0.0, 2.0, -1.0])
    ids = scattered_ids(vocab, 8)
    if scheme == "downweight":
        options = {"scale_f": 3, "downweight": 0.3}
        law = oracles.row_law(row.numpy(), **options)
        wrong = [
            oracles.row_law(row.numpy()),
            oracles.row_law(row.numpy(), downweight=0.3, scale_f=4),
        ]
    else:
        filters = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.2}
        options, law = {"sampling": filters}, oracles.row_law(row.numpy(), **filters)
        wrong = [
            oracles.row_law(row.numpy(), **{**filters, **one})
            for one in ({"temperature": 0.85}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.5})
        ]
    tokens = draw_many(row, DRAWS, ids, **options)
    assert oracles.follows(histogram(tokens, 8), law)
    assert not any(oracles.follows(histogram(tokens, 8), other) for other in wrong)
    count = 2**20 // vocab
    whole = draw_many(spread(row, ids, vocab), count, **options)
    assert torch.equal(whole, ids[tokens[:count]])


def test_law_beside_a_tail():
    # C = .3 on the 3 largest; 4,096 other ids have a mass of .01 together, .02 of q. Of 2^16 draws
    # that is 1,330: five standard deviations are 14 % of it, and 20 % more or less of a tail is
    # seen with a probability of .99.
    live = torch.tensor([1.0, 0.2, 1.5, -0.5, 0.9, 0.0, 2.0, -1.0])
    ids = scattered_ids(4104, 8)
    tail = 0.1 * torch.randn(4104, generator=torch.Generator().manual_seed(0))
    row = tail + np.log(0.01 / 4096)
    row[ids] = live - live.logsumexp(0)
    draws = 1 << 16
    tokens = draw_many(row, draws, scale_f=3, downweight=0.3)
    law = oracles.row_law(row.numpy(), downweight=0.3, scale_f=3)
    counts = histogram(tokens, 4104)
    tail_of = lambda x: np.delete(x, ids)  # noqa: E731
    mass, drawn = tail_of(law).sum(), tail_of(counts).sum()
    z = lambda mass: abs(drawn - draws * mass) / (draws * mass * (1 - mass)) ** 0.5  # noqa: E731
    assert z(mass) < 5
    # The controls: a tail a fifth lighter, and one a fifth heavier.
    assert z(mass / 1.2) > 5 and z(mass * 1.2) > 5
    # The live ids, and eighths of the tail; a tail of which the last eighth is never drawn.
    grouped = lambda x: np.append(x[ids], tail_of(x).reshape(8, 512).sum(1))  # noqa: E731
    cells = grouped(law)
    assert oracles.follows(grouped(counts), cells)
    cells[-1] = 1e-9
    assert not oracles.follows(grouped(counts), cells / cells.sum())
