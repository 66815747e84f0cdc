"""Branches by accepted length: shares of a power law, rounded by largest remainders."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.outcomes import allocate_fan_out

IMPLS = ("reference", "triton")


class TestAllocateFanOut:
    @staticmethod
    def _largest_remainders(shares: list[Fraction], branches: int) -> list[int]:
        whole = [int(share) for share in shares]
        order = sorted(range(len(shares)), key=lambda k: (whole[k] - shares[k], k))
        for k in order[: branches - sum(whole)]:
            whole[k] += 1
        return whole

    @pytest.mark.parametrize("impl", IMPLS)
    def test_without_a_power_law_shares_are_those_of_the_histogram(self, impl, device):
        # r = 0 makes the shares rational, so the rounding can be checked exactly.
        hist = torch.tensor([[5, 1, 1, 0, 3], [1, 1, 1, 1, 1], [0, 0, 7, 0, 0], [9, 8, 7, 6, 5]])
        for branches in (0, 1, 7, 20, 64):
            got = allocate_fan_out(hist.to(device), branches, 0.0, impl=impl).cpu()
            for row, counts in zip(got.tolist(), hist.tolist(), strict=True):
                shares = [Fraction(branches * count, sum(counts)) for count in counts]
                assert row == self._largest_remainders(shares, branches)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_shares_follow_the_power(self, impl, device):
        generator = torch.Generator().manual_seed(1)
        hist = torch.rand(40, 6, generator=generator)
        hist[0, 2:] = 0
        r = torch.rand(40, generator=generator) * 2
        got = allocate_fan_out(hist.to(device), 24, r.to(device), impl=impl).cpu()
        assert got.dtype == torch.int32
        assert (got.sum(-1) == 24).all()
        share = hist.double() ** (1 / (1 + r.double()))[:, None]
        share = 24 * share / share.sum(-1, keepdim=True)
        assert ((got - share).abs() < 1 + 1e-4).all()
        assert (got[0, 2:] == 0).all()

    @pytest.mark.parametrize("impl", IMPLS)
    def test_it_is_close_to_the_best_of_all_splits(self, impl, device):
        # The expected miss, sum of P(k) F_k^-r over splits of 12 branches, found by trying all.
        chance, r, branches = [0.45, 0.2, 0.35], 0.6, 12
        miss = lambda split: sum(p * f**-r for p, f in zip(chance, split, strict=True))  # noqa: E731
        splits = [
            (a, b, branches - a - b) for a in range(1, branches) for b in range(1, branches - a)
        ]
        got = allocate_fan_out(torch.tensor(chance, device=device), branches, r, impl=impl)
        assert miss(got.tolist()) <= 1.01 * min(map(miss, splits))

    @pytest.mark.parametrize("impl", IMPLS)
    def test_no_counts_and_any_leading_shape(self, impl, device):
        zeros = torch.zeros(2, 3, 4, device=device)
        assert allocate_fan_out(zeros, 8, 0.7, impl=impl).tolist() == [[[2] * 4] * 3] * 2
        assert allocate_fan_out(zeros[0, 0], 6, 0.7, impl=impl).tolist() == [2, 2, 1, 1]
        assert allocate_fan_out(zeros[:0], 6, 0.7, impl=impl).shape == (0, 3, 4)

    def test_wrong_arguments_are_named(self, device):
        hist = torch.ones(2, 4, device=device)
        with pytest.raises(ShapeError, match="accept_hist"):
            allocate_fan_out(hist[:, :0], 4, 0.5)
        with pytest.raises(DTypeError, match="accept_hist"):
            allocate_fan_out(hist > 0, 4, 0.5)
        with pytest.raises(ConfigError, match="branches"):
            allocate_fan_out(hist, -1, 0.5)
        with pytest.raises(ConfigError, match="r: got"):
            allocate_fan_out(hist, 4, -0.5)
        with pytest.raises(ShapeError, match="r: got"):
            allocate_fan_out(hist, 4, torch.ones(3, device=device))
