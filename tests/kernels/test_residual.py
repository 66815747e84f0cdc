"""The residual row: kernel against reference, against float64, and its degenerate cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracles
from bench.traffic import Meter
from saguaro_kernels import Sampling, ShapeError, Status, residual
from saguaro_kernels.residual import Residual, _residual_launch
from saguaro_kernels.verification.launch import VerifyConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rows(count: int, vocab: int, draft_vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(count, vocab, generator=generator)
    noise = torch.randn(count, max(vocab, draft_vocab), generator=generator)
    near = torch.nn.functional.pad(target, (0, max(0, draft_vocab - vocab))) + 0.5 * noise
    return target, near[:, :draft_vocab].contiguous()


def close(actual: Residual, expected: Residual) -> None:
    assert torch.equal(actual.status, expected.status)
    torch.testing.assert_close(actual.mass, expected.mass.float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(actual.probs, expected.probs.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        actual.probs.sum(1), torch.ones(len(actual.probs)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "count, vocab, draft_vocab, dtype",
    [(0, 9, 9, FP32), (1, 1, 1, FP32), (2, 2, 3, BF16), (3, 97, 97, FP16), (3, 8193, 8000, BF16)],
)
def test_kernel_equals_reference(
    count: int, vocab: int, draft_vocab: int, dtype: torch.dtype
) -> None:
    target, draft = (t.to(dtype) for t in rows(count, vocab, draft_vocab, seed=vocab))
    temperature = torch.tensor([0.8, 0.0, 1.3])[:count]
    both = {"target_sampling": Sampling(temperature), "draft_sampling": Sampling(temperature + 0.1)}
    scale = torch.tensor([1.0, 0.9, 0.4])[:count]
    expected = residual(target, draft, **both, scale=scale, impl="reference")
    close(residual(target, draft, **both, scale=scale, impl="triton"), expected)


def test_filtered_rows_equal_the_oracle() -> None:
    target, draft = rows(3, 300, 300, seed=1)
    top_k = torch.tensor([5, 0, 40], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.8, 0.9])
    sampling = Sampling(torch.full((3,), 0.7), top_k, top_p)
    for impl in ("reference", "triton"):
        result = residual(
            target, draft, target_sampling=sampling, draft_sampling=sampling, impl=impl
        )
        for r in range(3):
            p, q = (
                oracles.row_law(row[r].numpy(), 0.7, int(top_k[r]), float(top_p[r]))
                for row in (target, draft)
            )
            excess = np.maximum(p - q, 0)
            assert abs(float(result.mass[r]) - excess.sum()) < 1e-5
            assert np.abs(result.probs[r].numpy() - excess / excess.sum()).max() < 1e-5


def test_equal_rows_and_rows_without_a_law() -> None:
    """p == q gives p; NaN counts as one-hot on the largest valid id, an empty row as id 0."""
    target, draft = rows(4, 5000, 5000, seed=2)
    draft[0] = target[0]
    target[1, 7] = math.nan
    target[2] = -math.inf
    draft[3, 9] = math.inf
    sampling = Sampling(torch.ones(4))
    options = {"target_sampling": sampling, "draft_sampling": sampling}
    expected = residual(target, draft, **options, impl="reference")
    actual = residual(target, draft, **options, impl="triton")
    close(actual, expected)
    assert expected.status.tolist() == [Status.OK, Status.NAN, Status.EMPTY, Status.NAN]
    torch.testing.assert_close(expected.probs[0], target[0].softmax(0))
    best = int(target[1].nan_to_num(-math.inf).argmax())
    assert expected.probs[1].argmax() == best and expected.probs[2, 0] == 1


@pytest.mark.parametrize("config", [VerifyConfig(512, 3), VerifyConfig(8192, 32)])
def test_neither_blocks_nor_neighbours_matter(config: VerifyConfig) -> None:
    """Poisoned outputs, other tiles, another order of the rows: the same residual."""
    target, draft = rows(3, 5000, 4990, seed=4)
    sampling = Sampling(torch.tensor([1.0, 0.0, 0.7]), torch.tensor([0, 0, 50], dtype=torch.int32))
    options = {"target_sampling": sampling, "draft_sampling": sampling}
    expected = residual(target, draft, **options, impl="triton")
    order = torch.tensor([2, 0])
    some = Sampling(sampling.temperature[order], sampling.top_k[order])
    out = Residual(
        torch.full((2, 5000), math.nan), torch.full((2,), math.nan),
        torch.full((2,), -77, dtype=torch.int32),
    )  # fmt: skip
    _residual_launch(target[order], draft[order], some, some, None, out, config=config)
    close(out, Residual(expected.probs[order], expected.mass[order], expected.status[order]))
    again = residual(target[order], draft[order], target_sampling=some, draft_sampling=some)
    assert torch.equal(again.probs, expected.probs[order])


def test_registration_errors_and_cost() -> None:
    target, draft = rows(2, 5000, 5000, seed=3)
    sampling = Sampling(torch.ones(2))
    options = {"target_sampling": sampling, "draft_sampling": sampling}
    out = torch.zeros(2, 5000), torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.saguaro.residual.default,
        (target, draft, sampling.temperature, None, None, None, sampling.temperature, None, None,
         None, None, "reference", *out),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    with pytest.raises(ShapeError, match="draft_logits"):
        residual(target, draft[:1], **options)
    before = target.clone(), draft.clone()
    with Meter() as meter:
        residual(target, draft, **options, impl="triton")
    assert torch.equal(target, before[0]) and torch.equal(draft, before[1])
    assert meter.launches == 3 and meter.syncs == 0
    assert meter.bytes_read <= 1.02 * 3 * 2 * 2 * 5000 * 4
