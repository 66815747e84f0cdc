"""The random numbers: published Philox vectors, one word per key, the law of the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import oracles
from saguaro_kernels import Keys, Stream
from saguaro_kernels.rng import (
    _gumbel_at,
    _gumbel_block,
    _uniform,
    _uniform_to_gumbel,
    _words_to_uniform,
    gumbel_reference,
    philox_reference,
    uniform_reference,
)

# Random123's kat_vectors for philox4x32-10: counter, key, output.
VECTORS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip
SEEDS = (0, 1, 7 << 40, -1, -(2**63), 2**63 - 1)


@triton.jit
def _noise_kernel(
    gumbel_ptr, scattered_ptr, uniform_ptr, seed_ptr, base_ptr, offset, first,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    seed, base = tl.load(seed_ptr + r), tl.load(base_ptr + r)
    ids = first + tl.arange(0, BLOCK)
    out = r * BLOCK + tl.arange(0, BLOCK)
    tl.store(gumbel_ptr + out, _gumbel_block(seed, base, offset, first, STREAM, BLOCK))
    tl.store(scattered_ptr + out, _gumbel_at(seed, base, offset, ids, STREAM))
    tl.store(uniform_ptr + r, _uniform(seed, base, offset, STREAM))


@triton.jit
def _philox_kernel(out_ptr, counter_ptr, key_ptr):
    c = (
        tl.load(counter_ptr), tl.load(counter_ptr + 1),
        tl.load(counter_ptr + 2), tl.load(counter_ptr + 3),
    )  # fmt: skip
    words = tl.philox(
        tl.load(key_ptr), c[0].to(tl.uint32), c[1].to(tl.uint32), c[2].to(tl.uint32),
        c[3].to(tl.uint32),
    )  # fmt: skip
    for i in tl.static_range(4):
        tl.store(out_ptr + i, words[i].to(tl.int64))


@triton.jit
def _words_kernel(uniform_ptr, noise_ptr, words_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    uniform = _words_to_uniform(tl.load(words_ptr + at).to(tl.uint32))
    tl.store(uniform_ptr + at, uniform)
    tl.store(noise_ptr + at, _uniform_to_gumbel(uniform))


def _keys(device, seeds=SEEDS) -> Keys:
    seed = torch.tensor(seeds, device=device)
    return Keys(seed, torch.arange(len(seeds), device=device) * 1000 + 17)


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS, ids=("zeros", "ones", "pi"))
def test_published_vectors(counter, key, output, device):
    counter, key, output = (
        [int(word, 16) for word in text.split()] for text in (counter, key, output)
    )
    column = lambda word: np.array([word], np.uint64)  # noqa: E731
    seed = key[0] | key[1] << 32
    words = philox_reference(column(seed), *(column(word) for word in counter))
    assert [int(word[0]) for word in words] == output
    assert oracles.philox4x32(counter, key) == output
    out = torch.full((4,), -1, device=device)
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    _philox_kernel[(1,)](
        out, torch.tensor(counter, device=device), torch.tensor([signed], device=device)
    )
    assert out.tolist() == output


@pytest.mark.parametrize("stream", Stream, ids=lambda s: s.name)
def test_key_layout(stream):
    keys, offset, vocab = _keys("cpu"), 5, 11
    noise = gumbel_reference(keys, offset, stream, vocab)
    uniform = uniform_reference(keys, offset, stream)
    for r, (seed, base) in enumerate(zip(keys.seed.tolist(), keys.base.tolist(), strict=True)):
        words = [oracles.random_word(seed, base, offset, int(stream), i) for i in range(vocab)]
        assert uniform[r].item() == oracles.uniform(words[0])
        exact = np.array([oracles.gumbel(word) for word in words])
        np.testing.assert_allclose(noise[r].numpy(), exact, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("stream", Stream, ids=lambda s: s.name)
@pytest.mark.parametrize(("first", "block"), [(0, 4), (8, 64), (128248, 16)])
def test_kernels_draw_the_same_numbers(stream, first, block, device):
    keys, rows = _keys(device), len(SEEDS)
    block_noise, scattered = (torch.full((rows, block), torch.nan, device=device) for _ in "ab")
    uniform = torch.full((rows,), torch.nan, device=device)
    _noise_kernel[(rows,)](
        block_noise, scattered, uniform, keys.seed, keys.base, 3, first, int(stream), block
    )
    assert torch.equal(uniform, uniform_reference(keys, 3, stream))
    expected = gumbel_reference(keys, 3, stream, first + block)[:, first:]
    assert torch.equal(block_noise, scattered)
    # The uniform is the same bit for bit; logarithms differ by an ulp between libraries.
    torch.testing.assert_close(block_noise, expected, rtol=1e-6, atol=2e-7)


def test_noise_depends_on_nothing_but_its_key():
    keys = _keys("cpu", (3, 4, 3, 4, 4))
    keys = Keys(keys.seed, torch.tensor([10, 10, 10, 11, 10]))
    noise = gumbel_reference(keys, torch.tensor([0, 0, 1, 0, 0]), Stream.DRAFT, 103)
    assert torch.equal(noise[1], noise[4])  # equal keys
    for a, b in ((0, 1), (0, 2), (1, 3)):  # seed, offset, base
        assert not (noise[a] == noise[b]).any()
    # A row alone, and a shorter vocabulary: a prefix of the same numbers.
    for r, offset in enumerate((0, 0, 1, 0, 0)):
        alone = Keys(keys.seed[r : r + 1], keys.base[r : r + 1])
        assert torch.equal(gumbel_reference(alone, offset, Stream.DRAFT, 50)[0], noise[r, :50])
    # And a longer one, whose rows are kept from call to call: writing into a result spoils nothing.
    for _ in range(2):
        longer = gumbel_reference(keys, torch.tensor([0, 0, 1, 0, 0]), Stream.DRAFT, 1 << 15)
        assert torch.equal(longer[:, :103], noise)
        longer.zero_()
    streams = torch.stack([gumbel_reference(keys, 0, s, 103)[0] for s in Stream])
    assert len(streams.flatten().unique()) == streams.numel()


def test_coupled_noise_is_keyed_by_position():
    seed = torch.tensor([9, 9, 9])
    keys = Keys(seed, torch.tensor([20, 21, 22]))
    noise = gumbel_reference(keys, torch.tensor([2, 1, 0]), Stream.COUPLED, 40)
    assert torch.equal(noise[0], noise[1])
    assert torch.equal(noise[0], noise[2])
    drafts = gumbel_reference(keys, torch.tensor([2, 1, 0]), Stream.DRAFT, 40)
    assert not (drafts[0] == drafts[1]).any()


def test_extreme_words(device):
    # The smallest 100 words all differ: 24-bit uniforms never draw an id of probability 1e-8.
    words = [*range(100), 2**24, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    uniform, noise = (torch.full((128,), torch.nan, device=device) for _ in "ab")
    padded = torch.tensor(words + [0] * (128 - len(words)), device=device)
    _words_kernel[(1,)](uniform, noise, padded, 128)
    uniform, noise = uniform[: len(words)], noise[: len(words)]
    assert uniform.tolist() == [oracles.uniform(word) for word in words]
    assert len(uniform[:100].unique()) == 100
    assert uniform.min().item() == 2.0**-33
    assert uniform.max().item() == 1 - 2.0**-24
    exact = np.array([oracles.gumbel(word) for word in words])
    np.testing.assert_allclose(noise.cpu().numpy(), exact, rtol=3e-6, atol=3e-7)
    assert noise.max() < 22.9
    assert noise.min() > -2.9


def test_uniforms_are_uniform_and_noise_is_gumbel():
    keys = Keys(torch.arange(1 << 15), torch.full((1 << 15,), 4))
    uniform = uniform_reference(keys, 0, Stream.ACCEPT).numpy()
    assert ((uniform > 0) & (uniform < 1)).all()
    counts = np.histogram(uniform, 64, (0, 1))[0]
    assert oracles.follows(counts, np.full(64, 1 / 64))
    noise = gumbel_reference(Keys(keys.seed[:4], keys.base[:4]), 0, Stream.DRAFT, 1 << 15)
    cdf = lambda x: np.exp(-np.exp(-x))  # noqa: E731
    for lane in range(4):
        assert oracles.kolmogorov_p(noise[:, lane::4].flatten().numpy(), cdf) > 1e-6
    # The control: noise a tenth narrower is not taken for it.
    assert oracles.kolmogorov_p(noise[0].numpy() * 0.9, cdf) < 1e-6
