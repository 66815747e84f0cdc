"""Faults that users of such software have met elsewhere, and the tests that keep each out.

The list names the tests; those that fit nowhere else are here.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from drafting import FIELDS, draw_draft, random_case

import oracles
from bench.traffic import Meter
from saguaro_kernels import Draft, Keys, Sampling, Status, row_stats, saguaro_sample, verify
from saguaro_kernels._launch import on_device
from saguaro_kernels.compat import chain_speculative_sampling
from saguaro_kernels.verification import verify_reference

IMPLS = ("reference", "triton")
FAULTS: dict[str, tuple[str, ...]] = {
    # The law
    "q is not what the token was drawn from: unfiltered, of another precision, of an argmax": (
        "test_laws_verification::test_unfiltered_q_is_caught",
        "test_laws_verification::test_scaled_drafts",
        "test_verification::test_one_hot_drafts_per_request",
        "test_faults::test_rows_count_as_the_model_wrote_them",
    ),
    "one noise for drafting and recovery; the recovered token's law given a refusal": (
        "test_laws_verification::test_extra_under_the_drafts_noise_is_caught",
        "test_laws_verification::test_joint_and_outcome_laws",
    ),
    "sampling parameters reach some of the tokens only": (
        "test_laws_verification::test_filters_on_both_sides",
        "test_verification::test_bias_is_applied_per_position",
    ),
    "a penalty once per step, not once per position": (
        "test_verification::test_bias_is_applied_per_position",
        "test_verification::test_every_option_at_once",
    ),
    "ties at the edge of top-k let more in, or are broken in two ways": (
        "test_distribution::test_ties_go_to_the_lowest_ids",
        "test_sampling::test_exactly_f_ids_are_scaled",
        "test_faults::test_sampler_and_verifier_break_ties_alike",
    ),
    "a logarithm of 1 - x that rounds to 0": (
        "test_rng::test_extreme_words",
        "test_laws_vocabulary::test_tail_of_rare_ids",
    ),
    "floating-point atomics: two runs disagree": ("test_compiled::test_atomics_count_only",),
    "a draft is kept only if it is the target's own sample": (
        "test_verification::test_acceptance_rate_is_the_overlap",
        "test_laws_verification::test_one_hot_drafts_and_accept_if_argmax",
    ),
    # Numbers
    "NaN logits: an id beyond the vocabulary, a stall, the refused token again": (
        "test_verification::test_target_rows_without_a_law",
        "test_verification::test_unusable_draft_rows",
        "test_distribution::test_broken_rows_are_marked_and_leave_their_neighbours_alone",
        "test_sampling::test_broken_rows",
    ),
    "a last tile without mass ties with the padding behind it": (
        "test_faults::test_a_last_tile_without_mass",
    ),
    "division by a temperature of 0 or nearly": (
        "test_verification::test_temperatures_in_one_batch",
        "test_distribution::test_tiny_temperatures",
    ),
    "rows that do not sum to 1": ("test_compat::test_chain_law_of_unnormalised_rows",),
    "a weight of 0 is drawn": (
        "test_verification::test_zero_probability_is_never_emitted",
        "test_faults::test_a_uniform_of_zero_accepts_nothing_impossible",
    ),
    # Shapes, indices, memory
    "row times V in 32 bits": (
        "test_compiled::test_rows_are_addressed_in_64_bits",
        "test_verification::test_row_offsets_beyond_int32",
        "test_distribution::test_row_offsets_past_two_to_the_31",
    ),
    "vocabularies padded to different widths": (
        "test_verification::test_vocabularies_of_different_width",
        "test_distribution::test_padded_rows_and_expanded_sampling",
    ),
    "ids of padding reach a gather": ("test_faults::test_ids_beyond_num_draft_are_never_used",),
    "requests without drafts among others": ("test_verification::test_no_requests_and_no_drafts",),
    "rows in another order than their drafts": ("test_verification::test_batch_invariance",),
    "inputs modified, scratch read before it is written": (
        "test_verification::test_poisoned_outputs_and_untouched_inputs",
        "test_sampling::test_outputs_are_written_and_nothing_else",
    ),
    "launched on the current device, not on the tensors'": (
        "test_compiled::test_launches_are_on_the_tensors_device",
        "test_faults::test_the_tensors_device_is_made_current",
    ),
    "compiled anew as B or K changes": (
        "test_compiled::test_few_binaries_for_all_batches_and_lengths",
    ),
    "a generator of the host inside a captured region": (
        "test_faults::test_nothing_is_drawn_on_the_host",
        "test_register::test_a_steady_round_allocates_and_waits_for_nothing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_tests(fault: str) -> None:
    for name in FAULTS[fault]:
        file, _, test = name.partition("::")
        source = Path(__file__).with_name(f"{file}.py").read_text()
        assert f"\ndef {test}(" in source, name


def test_rows_count_as_the_model_wrote_them() -> None:
    """Drafts drawn from bfloat16 rows are judged by these, not by what was rounded to them."""
    draws = 1 << 16
    p, q = np.array([0.1, 0.4, 0.3, 0.2]), np.array([0.3, 0.3, 0.25, 0.15])
    exact = torch.tensor(np.log(q) + 40).float()  # where a step of bfloat16 is 1/4
    rounded = exact.bfloat16()
    keys = Keys(torch.arange(draws), torch.full((draws,), 3))
    num_draft, sampling = torch.ones(draws, dtype=torch.int32), Sampling(torch.ones(draws))
    draft = draw_draft(rounded.expand(draws, 1, 4), num_draft, sampling, keys)
    whole = exact.log_softmax(-1)[draft.tokens]
    wrong = dataclasses.replace(draft, logits=exact.expand(draws, 1, 4), logq=whole)
    target = torch.tensor(p).log().float().expand(draws, 2, 4)
    for its, right in ((draft, True), (wrong, False)):
        first = verify_reference(target, its, sampling, keys, rule="token").tokens[:, 0]
        assert oracles.follows(np.bincount(first.numpy(), minlength=4), p) == right


@pytest.mark.parametrize("impl", IMPLS)
def test_sampler_and_verifier_break_ties_alike(impl: str, device: str) -> None:
    """Four ids tie, top-k keeps two: both sides keep the lowest, so that p = q and all stand."""
    requests, vocab = 4, 5000
    row = torch.full((vocab,), -3.0, device=device)
    row[[7, 900, 2500, 4999]] = 4.0
    sampling = Sampling(
        torch.ones(requests, device=device),
        torch.full((requests,), 2, dtype=torch.int32, device=device),
    )
    keys = Keys(*(torch.arange(requests, device=device) + i for i in (0, 5)))
    sample = saguaro_sample(row.expand(requests, -1), sampling, keys, offset=0, impl=impl)
    draft = Draft(
        sample.tokens[:, None],
        torch.ones(requests, dtype=torch.int32, device=device),
        row.expand(requests, 1, -1),
        logq=sample.logq[:, None],
        cutoff=sample.cutoff[:, None],
        cutoff_id=sample.cutoff_id[:, None],
        sampling=sampling,
    )
    verdict = verify(row.expand(requests, 2, -1), draft, sampling, keys, rule="token", impl=impl)
    assert torch.equal(verdict.num_accepted, torch.ones_like(verdict.num_accepted))
    assert set(verdict.tokens.flatten().tolist()) == {7, 900}


@pytest.mark.parametrize(
    ("impl", "bottom"), [("reference", -math.inf), ("reference", -1e4), ("triton", -math.inf)]
)
def test_a_last_tile_without_mass(impl: str, bottom: float, device: str) -> None:
    vocab = 4100  # the last tile holds four ids
    logits = torch.full((3, 2, vocab), bottom, device=device)
    logits[:, :, 1] = 0.0
    ones = torch.ones(3, device=device)
    keys = Keys(*(torch.arange(3, device=device) + i for i in (0, 5)))
    k4 = torch.full((3,), 4, dtype=torch.int32, device=device)
    for sampling in (Sampling(ones), Sampling(ones * 0), Sampling(ones, k4)):
        stats = row_stats(logits[:, 0], sampling, impl=impl)
        sample = saguaro_sample(logits[:, 0], sampling, keys, offset=0, top_f=4, impl=impl)
        assert stats.argmax.tolist() == sample.tokens.tolist() == [1, 1, 1]
        rest = [-1, -1, -1] if bottom == -math.inf else [0, 2, 3]
        assert sample.top_ids.tolist() == [[1, *rest]] * 3
        draft = Draft(torch.full((3, 1), vocab - 1, device=device), k4 // 4)  # refused, one-hot
        verdict = verify(logits, draft, sampling, keys, rule="token", impl=impl)
        assert verdict.tokens.tolist() == [[1, -1]] * 3
        assert verdict.status.tolist() == [int(Status.OK)] * 3


def test_a_uniform_of_zero_accepts_nothing_impossible() -> None:
    case = random_case(4, 2, 30)
    draft = case["draft"]
    draft.num_draft.fill_(2)
    draft.tokens.copy_(torch.arange(8).view(4, 2))
    case["target_logits"][:, 0].scatter_(1, draft.tokens[:, :1], -torch.inf)
    zeros = torch.zeros(4, 2)
    token = verify_reference(**case, rule="token", uniforms=zeros)
    assert token.num_accepted.tolist() == [0] * 4
    # a_1 = 0 stays 0: block accepts none of what follows either.
    block = verify_reference(**case, rule="block", uniforms=zeros)
    assert block.num_accepted.tolist() == [0] * 4


@pytest.mark.parametrize("impl", IMPLS)
def test_ids_beyond_num_draft_are_never_used(impl: str) -> None:
    case = random_case(3, 3, 500, seed=4)
    expected = verify(**case, rule="block", impl=impl)
    draft, beyond = case["draft"], torch.arange(3) >= case["draft"].num_draft[:, None]
    assert beyond.any()
    for id_ in (-(2**40), 500, 2**40):
        tokens = torch.where(beyond, id_, draft.tokens)
        other = {**case, "draft": dataclasses.replace(draft, tokens=tokens)}
        verdict = verify(**other, rule="block", impl=impl)
        for name in FIELDS:
            assert torch.equal(getattr(verdict, name), getattr(expected, name))


def test_the_tensors_device_is_made_current() -> None:
    assert on_device(torch.device("cuda", 3)).idx == 3


def test_nothing_is_drawn_on_the_host() -> None:
    """With a seed no generator is asked; without, the device's is, once, and nothing waits."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(2, 4, 50, generator=generator)
    target = weights / weights.sum(-1, keepdim=True)
    draft, tokens = target[:, :3].contiguous(), torch.randint(50, (2, 3), generator=generator)
    seed, offset = torch.tensor([5]), torch.tensor([7])
    with Meter() as meter:
        chain_speculative_sampling(draft, tokens, target, seed=seed, offset=offset, impl="triton")
    assert meter.syncs == 0
    assert not [name for name in meter.kernels if "rand" in name]
    with Meter() as meter:
        chain_speculative_sampling(draft, tokens, target, impl="triton")
    assert meter.syncs == 0
    assert [name for name in meter.kernels if "rand" in name] == ["randint"]
