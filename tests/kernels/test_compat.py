"""The contracts of other engines: outputs, padding, counters, and the exact law."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from saguaro_kernels import ConfigError, ShapeError, Stream, compat
from saguaro_kernels.compat import chain_speculative_sampling, rejection_sample
from saguaro_kernels.verification import reference

P_ROW = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.15, 0.05])
Q_ROW = torch.tensor([0.3, 0.3, 0.02, 0.18, 0.1, 0.1])
DRAWS = 1 << 17


def probabilities(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, generator=generator) ** 6
    return weights / weights.sum(-1, keepdim=True)


def chains(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(draft_probs, draft_token_ids, target_probs) of B = 5, K = 3, V = 700."""
    draft, target = probabilities(5, 3, 700), probabilities(5, 4, 700, seed=1)
    target[:, :3] = 0.7 * draft + 0.3 * target[:, :3]
    generator = torch.Generator().manual_seed(2)
    tokens = torch.multinomial(draft.view(-1, 700), 1, generator=generator).view(5, 3)
    return draft.to(dtype), tokens, target.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chain_kernel_equals_reference(dtype: torch.dtype) -> None:
    draft, tokens, target = chains(dtype)
    before = [tensor.clone() for tensor in (draft, tokens, target)]
    for offset in range(3):
        want = chain_speculative_sampling(
            draft, tokens, target, seed=5, offset=offset, impl="reference"
        )
        got = chain_speculative_sampling(
            draft, tokens.int(), target, seed=5, offset=offset, impl="triton"
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for tensor, copy in zip((draft, tokens, target), before, strict=True):
        assert torch.equal(tensor, copy)


def test_chain_outputs() -> None:
    """int32 ids padded with -1; counters are added to; accepted >= emitted = k."""
    draft, tokens, target = chains(torch.float32)
    accepted, emitted = torch.full((2, 5), 100, dtype=torch.int32)
    output, *counters = chain_speculative_sampling(
        draft, tokens, target, accepted, emitted, True, None, seed=7, impl="reference"
    )
    assert output.dtype == torch.int32 and output.shape == (5, 4)
    assert counters[0] is accepted and counters[1] is emitted
    k = emitted - 100
    assert torch.equal((output >= 0).sum(1).int(), k + 1)
    assert ((accepted - 100 >= k) & (accepted - 100 <= 3)).all()
    for row, stop in zip(output, k, strict=True):
        assert (row[stop + 1 :] == -1).all()
    again = chain_speculative_sampling(draft, tokens, target, seed=7, impl="reference")
    assert torch.equal(again[0], output)
    other = chain_speculative_sampling(draft, tokens, target, seed=7, offset=1, impl="reference")
    assert not torch.equal(other[0], output)
    torch.manual_seed(3)
    drawn = [chain_speculative_sampling(draft, tokens, target, impl="reference")[0] for _ in "ab"]
    assert not torch.equal(*drawn)


def chain_laws(draws: int) -> dict[str, bool]:
    """What holds of rows whose mass is not 1, which count by their measured mass."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.multinomial(Q_ROW, 2 * draws, True, generator=generator).view(draws, 2)
    draft = (0.9 * Q_ROW).expand(draws, 2, 6)
    target = (1.1 * P_ROW).expand(draws, 3, 6)
    output, accepted, emitted = chain_speculative_sampling(
        draft, tokens, target, seed=4, impl="reference"
    )
    rest = torch.multinomial(P_ROW, 3 * draws, True, generator=generator).view(draws, 3)
    text = torch.where(output < 0, rest, output.long())
    counts = np.bincount((text @ torch.tensor([36, 6, 1])).numpy(), minlength=216)
    law = np.einsum("i,j,k->ijk", *[P_ROW.double().numpy()] * 3).ravel()
    overlap = float(torch.minimum(P_ROW, Q_ROW).sum())
    rate = float(accepted.double().mean()) / 2
    # Where the first draft was refused, the second token's law is untouched: text alone decides.
    recovered = np.bincount(output[emitted == 0, 0].numpy(), minlength=6)
    residual = (P_ROW - Q_ROW).clamp(min=0).double().numpy()
    return {
        "text": oracles.follows(counts, law / law.sum()),
        "rate": abs(rate - overlap) < 5 * (overlap / draws) ** 0.5,
        "recovered": oracles.follows(recovered, residual / residual.sum()),
    }


def test_chain_law_of_unnormalised_rows() -> None:
    assert all(chain_laws(DRAWS).values())


NUMBERS = [3, 0, 2, 1]


def ragged() -> dict[str, torch.Tensor]:
    draft, tokens, target = chains(torch.float32)
    return {
        "draft_token_ids": tokens.view(-1)[:6],
        "cu_num_draft_tokens": torch.tensor(NUMBERS).cumsum(0).int(),
        "draft_probs": draft.view(-1, 700)[:6],
        "target_logits": target[:, :3].reshape(-1, 700)[:6].log() + 3,
        "bonus_token_ids": torch.tensor([[9], [8], [7], [6]]),
    }


@pytest.mark.parametrize("temperature", [None, [0.0, 1.0, 1.0, 0.0]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rejection_sample(temperature: list[float] | None, deterministic: bool) -> None:
    case = ragged()
    if deterministic:
        case["draft_probs"] = None
    options = {"temperature": temperature and torch.tensor(temperature), "seed": 5}
    positional = (case["draft_token_ids"], NUMBERS, 4, case["cu_num_draft_tokens"])
    rest = case["draft_probs"], case["target_logits"], case["bonus_token_ids"]
    output = rejection_sample(*positional, *rest, **options, impl="reference")
    assert torch.equal(rejection_sample(*positional, *rest, **options, impl="triton"), output)
    assert output.shape == (4, 5) and output.dtype == torch.int32
    assert output[1].tolist() == [8, -1, -1, -1, -1]
    start = 0
    for row, number, bonus in zip(output, NUMBERS, (9, 8, 7, 6), strict=True):
        drafts = case["draft_token_ids"][start : start + number]
        k = int((row >= 0).sum()) - 1
        assert k <= number and torch.equal(row[:k].long(), drafts[:k])
        if k == number:
            assert row[k] == bonus
        elif not deterministic or temperature is None:
            assert row[k] != drafts[k]
        start += number
    if temperature is not None:
        best = case["target_logits"].argmax(-1)
        assert output[0, 0] == best[0]
    softmax = case["target_logits"].softmax(-1)
    same = rejection_sample(
        *positional, case["draft_probs"], 0.5 * softmax, case["bonus_token_ids"], **options,
        target_is_probs=True, impl="reference",
    )  # fmt: skip
    assert torch.equal(same, output)


def rejection_laws(count: int) -> dict[str, bool]:
    """What holds of ragged rows: the text of each position follows p, its drafts refused or not."""
    generator = torch.Generator().manual_seed(6)
    numbers = [1, 2] * (count // 2)
    total = sum(numbers)
    tokens = torch.multinomial(Q_ROW, total, True, generator=generator)
    bonus = torch.multinomial(P_ROW, count, True, generator=generator)
    output = rejection_sample(
        tokens, numbers, 2, torch.tensor(numbers).cumsum(0), Q_ROW.expand(total, 6),
        P_ROW.log().expand(total, 6), bonus, seed=6, impl="reference",
    )  # fmt: skip
    law = P_ROW.double().numpy() / float(P_ROW.double().sum())
    first, second = (np.bincount(output[output[:, i] >= 0, i].numpy(), minlength=6) for i in (0, 1))
    # Given that the first draft stood, the second token's law is p again.
    follows = oracles.chi_square_p(second, law) >= oracles.ALPHA
    return {"first": oracles.follows(first, law), "second": follows}


def test_rejection_sample_law() -> None:
    assert all(rejection_laws(DRAWS // 2).values())


def test_recovered_tokens_of_another_law_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from p instead of the residual: the same checks fail."""

    def draw_from_p(rows, draft, b, i, log_scale, keys):
        return rows.draw(rows.load(b, i)[0], b, i, keys, Stream.EXTRA)

    monkeypatch.setattr(reference, "_draw_residual", draw_from_p)
    laws = chain_laws(DRAWS // 4)
    assert laws == {"text": False, "rate": True, "recovered": False}
    assert rejection_laws(DRAWS // 4) == {"first": False, "second": False}


def test_masses_that_are_ignored_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A q of mass .9 taken for a probability: more is accepted than may be."""
    whole = compat._log_of_token
    monkeypatch.setattr(
        compat, "_log_of_token", lambda probs, tokens: whole(probs, tokens) + probs.sum(-1).log()
    )
    assert not chain_laws(DRAWS // 4)["text"]


def test_errors_and_empty_batches() -> None:
    case = ragged()
    positional = (case["draft_token_ids"], NUMBERS, 2, case["cu_num_draft_tokens"])
    rest = case["draft_probs"], case["target_logits"], case["bonus_token_ids"]
    with pytest.raises(ConfigError, match="max_spec_len"):
        rejection_sample(*positional, *rest)
    with pytest.raises(ShapeError, match="bonus_token_ids"):
        rejection_sample(
            case["draft_token_ids"], NUMBERS, 3, case["cu_num_draft_tokens"], *rest[:2],
            torch.zeros(2),
        )  # fmt: skip
    empty = rejection_sample(
        torch.zeros(0, dtype=torch.int32), [0, 0], 2, torch.zeros(2, dtype=torch.int32), None,
        torch.zeros(0, 6), torch.tensor([4, 5]), impl="triton",
    )  # fmt: skip
    assert empty.tolist() == [[4, -1, -1], [5, -1, -1]]
    draft, tokens, target = chains(torch.float32)
    with pytest.raises(ShapeError, match="target_probs"):
        chain_speculative_sampling(draft, tokens, target[:, :3])
