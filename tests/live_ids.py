"""Rows of a large vocabulary of which a few ids are live, drawn at the cost of the live ones.

An id of logit -inf never wins, whatever its noise. So the columns of the live ids, under the noise
of these very ids, are drawn as the whole row is; the tests that use this compare the two on a few
draws, token for token.
"""

from __future__ import annotations

import numpy as np
import torch

from saguaro_kernels import Keys, Stream, rng


def noise_of_ids(
    keys: Keys, offset: torch.Tensor | int, stream: Stream, ids: torch.Tensor
) -> torch.Tensor:
    """Noise [R, N] of the ids [N] alone."""
    seed, base, offset = (
        value.numpy().astype(np.uint64)[:, None] for value in rng._counters(keys, offset, stream)
    )
    lane = (ids % 4).numpy()
    lanes = rng.philox_reference(
        seed,
        (ids // 4).numpy().astype(np.uint64)[None],
        base & np.uint64(0xFFFFFFFF),
        offset | np.uint64(int(stream) << 24),
        np.zeros((1, 1), np.uint64),
    )
    words = np.choose(lane, lanes).astype(np.float32)
    below = torch.from_numpy(words).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-rng._BELOW_ONE)
    return below.log1p_().neg_().log_().neg_()


def scattered_ids(vocab: int, count: int) -> torch.Tensor:
    """`count` ids, 4 to 8: both ends, and both sides of what may be edges of tiles and lanes."""
    inner = [1, vocab // 2 - 1, vocab // 2, vocab // 3, vocab - 2, 4 * (vocab // 16) + 3]
    return torch.tensor(sorted({0, *inner[: count - 2], vocab - 1}))


def spread(columns: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """[..., N] logits of the ids as whole rows [..., V], -inf elsewhere."""
    rows = columns.new_full((*columns.shape[:-1], vocab), -torch.inf)
    rows[..., ids] = columns
    return rows
