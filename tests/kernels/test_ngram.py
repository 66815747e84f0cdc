"""N-gram proposals against a search in Python."""

from __future__ import annotations

import pytest
import torch

from saguaro_kernels import ngram as ngram_module
from saguaro_kernels.distribution import PAD
from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.ngram import ngram_propose

IMPLS = ("reference", "triton")


def by_hand(text: list[int], num_tokens: int, max_n: int, min_n: int) -> list[int] | None:
    for n in range(min(max_n, len(text)), min_n - 1, -1):  # the longest suffix first
        suffix = text[len(text) - n :]
        for end in range(len(text) - 1, n - 1, -1):  # its last occurrence that ends before `end`
            if text[end - n : end] == suffix:
                grown = list(text)
                for i in range(num_tokens):  # a copy that may run into what it has written
                    grown.append(grown[end + i])
                return grown[len(text) :]
    return None


def check(rows, impl, device, *, num_tokens=4, max_n=3, min_n=1, width=None) -> list:
    width = width or max(1, *map(len, rows))
    history = torch.full((len(rows), width), PAD, dtype=torch.int64)
    for b, row in enumerate(rows):
        history[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        history[b, len(row) :] = row[-1] if row else 0  # what lies past the length is not read
    length = torch.tensor([len(row) for row in rows], device=device)
    given = history.to(device)
    tokens, count = ngram_propose(
        given, length, num_tokens=num_tokens, max_n=max_n, min_n=min_n, impl=impl
    )
    assert torch.equal(given.cpu(), history)
    assert tokens.dtype == torch.int64 and count.dtype == torch.int32
    for b, row in enumerate(rows):
        want = by_hand(row, num_tokens, max_n, min_n)
        assert count[b] == (0 if want is None else num_tokens)
        assert tokens[b].tolist() == ([PAD] * num_tokens if want is None else want)
    return tokens.tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_examples(impl, device):
    found = check([[1, 2, 3, 7, 1, 2, 3], [5, 5, 5], [1, 2, 1, 2, 1], [1, 2, 3]], impl, device)
    assert found[0] == [7, 1, 2, 3]
    assert found[1] == [5, 5, 5, 5]
    assert found[2] == [2, 1, 2, 1]
    assert found[3] == [PAD] * 4


@pytest.mark.parametrize("impl", IMPLS)
def test_the_longest_match_wins_over_a_later_one(impl, device):
    found = check([[8, 1, 2, 9, 4, 2, 6, 8, 1, 2]], impl, device, num_tokens=2)
    assert found == [[9, 4]]
    assert check([[8, 1, 2, 9, 4, 2, 6, 8, 1, 2]], impl, device, num_tokens=2, max_n=1) == [[6, 8]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("max_n", "min_n"), [(1, 1), (3, 2), (5, 1), (9, 4)])
def test_random_texts(max_n, min_n, impl, device):
    generator = torch.Generator().manual_seed(max_n)
    rows = [
        torch.randint(0, spread, (length,), generator=generator).tolist()
        for length in (0, 1, 2, 3, 17, 60)
        for spread in (1, 2, 4, 50)
    ]
    check(rows, impl, device, num_tokens=5, max_n=max_n, min_n=min_n)


@pytest.mark.parametrize("impl", IMPLS)
def test_texts_longer_than_a_block(impl, device):
    generator = torch.Generator().manual_seed(0)
    block = ngram_module.ngram_config().block
    text = torch.randint(0, 300, (2 * block + 100,), generator=generator).tolist()
    text[40:44] = text[-4:]  # the only long match, in the first block
    rows = [text, text[: block + 1], text[:block]]
    found = check(rows, impl, device, max_n=4)
    assert found[0] == text[44:48]


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_no_requests_no_history(impl, device):
    assert check([[1, 1], [2]], impl, device, num_tokens=0) == [[], []]
    for batch, width in ((0, 5), (2, 0)):
        tokens, count = ngram_propose(
            torch.zeros(batch, width, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            num_tokens=3,
            impl=impl,
        )
        assert tokens.tolist() == [[PAD] * 3] * batch
        assert count.tolist() == [0] * batch


def test_wrong_arguments_are_named(device):
    history = torch.zeros(2, 5, dtype=torch.int64, device=device)
    length = torch.full((2,), 5, device=device)
    with pytest.raises(DTypeError, match="history"):
        ngram_propose(history.int(), length, num_tokens=3)
    with pytest.raises(ShapeError, match="length"):
        ngram_propose(history, length[:1], num_tokens=3)
    with pytest.raises(ConfigError, match="min_n"):
        ngram_propose(history, length, num_tokens=3, max_n=2, min_n=3)
    with pytest.raises(ConfigError, match="num_tokens"):
        ngram_propose(history, length, num_tokens=-1)
