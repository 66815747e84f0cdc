"""What a verification launches and moves, at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.inputs import verify_inputs
from bench.traffic import Meter
from saguaro_kernels import (
    Draft,
    Keys,
    Sampling,
    verify,
)

BF16 = torch.bfloat16


def measured(case: dict[str, Any], rule: str) -> Meter:
    with Meter() as meter:
        verify(**case, rule=rule, impl="triton")
    assert meter.syncs == 0
    assert not meter.wide_writes(vocab=case["target_logits"].shape[-1])
    return meter


def traffic_case(temperature: float, tokens: torch.Tensor | None = None) -> dict[str, Any]:
    """B = 1, K = 4, V = 128256, bfloat16; the target's rows are flat but for 16 ids."""
    vocab, steps = 128256, 4
    target = torch.full((1, steps + 1, vocab), -10.0)
    target[..., :16] = torch.linspace(0, 2, 16)
    draft = target[:, :steps] + 0.01
    tokens = torch.full((1, steps), 15) if tokens is None else tokens
    logq = (draft / max(temperature, 1e-3)).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    num_draft = torch.full((1,), steps, dtype=torch.int32)
    sampling = Sampling(torch.full((1,), temperature))
    keys = Keys(torch.zeros(1, dtype=torch.int64), torch.full((1,), 40))
    return {
        "target_logits": target.to(BF16),
        "draft": Draft(tokens, num_draft, draft.to(BF16), logq=logq, sampling=sampling),
        "target_sampling": sampling,
        "keys": keys,
    }


@pytest.mark.parametrize(
    "rule, temperature, rows, launches",
    [
        # K + 2 rows and 15 %; what 3.2 MB are of a row of 128256; one refusal of K rows and 5 %.
        ("token", 0.7, 1.15 * 9, 3),
        ("block", 1.0, 12.47, 4),
        ("greedy", 0.0, 1.055 * 7, 2),
    ],
)
def test_traffic_of_a_batch(rule: str, temperature: float, rows: float, launches: int) -> None:
    """B = 8, K = 7, rows as a model's; `python -m bench traffic` counts the same at V = 128256."""
    vocab, requests = 8192, 8
    shape = {"B": requests, "K": 7, "V": vocab, "T": temperature, "rule": rule}
    inputs = verify_inputs(shape, BF16, "cpu")
    case = {
        "target_logits": inputs.target, "draft": inputs.draft,
        "target_sampling": inputs.sampling, "keys": inputs.keys,
    }  # fmt: skip
    meter = measured(case, "token" if rule == "greedy" else rule)
    assert meter.launches <= launches
    assert meter.bytes_moved <= rows * requests * 2 * vocab


def test_traffic_of_the_token_rule() -> None:
    """K + 2 rows: the normalisers of the judged rows and one row pair; 2 launches."""
    case = traffic_case(0.7)
    case["draft"].logq[0, 2] = 50.0  # q(d) overstated: refused
    meter = measured(case, "token")
    assert meter.launches == 2
    assert meter.bytes_read + meter.bytes_written <= 1.05 * 6 * 2 * 128256


def test_traffic_of_greedy_requests() -> None:
    case = traffic_case(0.0)
    case["draft"].tokens[0, 3] = 3
    meter = measured(case, "token")
    assert meter.launches == 2
    assert meter.bytes_read + meter.bytes_written <= 1.05 * 4 * 2 * 128256


def test_traffic_of_the_block_rule_at_its_worst() -> None:
    """Every R is computed: K normalisers, K - 1 row pairs, and the pair of the extra token."""
    case = traffic_case(1.0, tokens=torch.full((1, 4), 20))
    # a falls slowly from the first step on, and the last draft is refused.
    case["draft"].logq[0] += 1e-3
    case["draft"].logq[0, 3] = 80.0
    meter = measured(case, "block")
    assert meter.kernels["_verify_mass_kernel"].bytes_read >= 6 * 2 * 128256
    assert meter.launches == 3
    assert meter.bytes_read + meter.bytes_written <= 1.04 * 12 * 2 * 128256
