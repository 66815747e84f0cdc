"""Rows over a part of the target's ids are those of a full row that is -inf elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from saguaro_kernels import Keys, Sampling, Stream, saguaro_sample
from saguaro_kernels.distribution import PAD
from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.outcomes import predict_outcomes
from saguaro_kernels.verification import Draft, verify

IMPLS = ("reference", "triton")
VOCAB = 5000


def make_ids(size: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Ascending ids; the last target id is not among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab - 1, generator=generator)[:size].sort().values


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    full[..., ids] = logits
    return full


def rows(count: int, size: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(count, size, generator=generator) * 3
    logits[1] = logits[1].round()  # ties
    return logits.to(device, dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [{"top_f": 8}, {"top_f": 3, "scale_f": 5}, {"scale_f": 200}],
    ids=["top8", "C5", "C200"],
)
def test_samples(impl: str, options: dict[str, object], device: str) -> None:
    ids = make_ids(900).to(device)
    small = rows(5, 900, device, torch.bfloat16)
    sampling = Sampling(torch.tensor([1.0, 0.7, 0.0, 1.0, 1.5], device=device))
    if options.get("scale_f") != 200:
        top_k = torch.tensor([0, 20, 0, 7, 0], dtype=torch.int32, device=device)
        sampling = dataclasses.replace(sampling, top_k=top_k)
    if "scale_f" in options:
        scaled = {"scheme": "downweight", "downweight": torch.full((5,), 0.4, device=device)}
        options = options | scaled
    keys = Keys(torch.arange(5, device=device), torch.arange(5, device=device) * 3)
    options = options | {"offset": 2, "stream": Stream.COUPLED}
    found = saguaro_sample(small, sampling, keys, ids=ids, impl=impl, **options)
    wanted = saguaro_sample(spread(small, ids), sampling, keys, impl="reference", **options)
    for name in ("tokens", "top_ids", "top_logits", "cutoff", "scale_logit", "status"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("logq", "lse"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), atol=1e-5), name
    # The edges are columns, as `verify` takes them.
    for name in ("cutoff_id", "scale_id"):
        column, token = getattr(found, name), getattr(wanted, name)
        assert torch.equal(torch.where(column >= 0, ids[column.clamp(min=0)], column), token), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ranking", ["probability", "noise", "coupled", "auto"])
def test_outcomes(impl: str, ranking: str, device: str) -> None:
    ids = make_ids(700, seed=1).to(device)
    small = rows(8, 700, device).view(2, 4, 700)
    drafted = ids[small[:, :3].argmax(-1)]
    drafted[0, 1] = VOCAB - 1  # a proposal that the draft has no id of
    num_draft = torch.tensor([3, 2], dtype=torch.int32, device=device)
    sampling = Sampling(torch.tensor([1.0, 0.0], device=device))
    keys = Keys(torch.tensor([3, 4], device=device), torch.tensor([10, 20], device=device))
    options = {"branches": 9, "ranking": ranking}
    found = predict_outcomes(
        small, drafted, num_draft, sampling, keys, ids=ids, impl=impl, **options
    )
    wanted = predict_outcomes(
        spread(small, ids), drafted, num_draft, sampling, keys, impl="reference", **options
    )
    assert torch.equal(found.depth, wanted.depth) and torch.equal(found.tokens, wanted.tokens)
    assert torch.allclose(found.score, wanted.score, atol=1e-4)
    used = found.tokens[found.depth >= 0]
    assert bool(torch.isin(used, ids).all()) and bool((found.tokens != PAD).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_drafts_of_a_part_are_judged_as_those_of_the_whole(
    impl: str, rule: str, device: str
) -> None:
    vocab = 600
    ids = make_ids(200, seed=2, vocab=vocab).to(device)
    batch, k = 4, 2
    generator = torch.Generator().manual_seed(5)
    target = (torch.randn(batch, k + 1, vocab, generator=generator) * 3).to(device)
    target[..., ids] += 2  # most of its mass is where the draft has ids
    small = target[:, :k][..., ids] * 0.9
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0], device=device)
    top_p = torch.tensor([1.0, 1.0, 0.8, 0.9], device=device)
    sampling = Sampling(temperature, top_p=top_p)
    keys = Keys(torch.arange(batch, device=device), torch.arange(batch, device=device) + 7)
    vocab_map = torch.full((vocab,), -1, dtype=torch.int32, device=device)
    vocab_map[ids] = torch.arange(len(ids), dtype=torch.int32, device=device)
    stream = Stream.COUPLED if rule == "coupled" else Stream.DRAFT
    verdicts = []
    for logits, its_ids, its_map, its_impl in (
        (small, ids, vocab_map, impl),
        (spread(small, ids, vocab), None, None, "reference"),
    ):
        drawn = [
            saguaro_sample(
                logits[:, i], sampling, keys, offset=i, stream=stream, ids=its_ids, impl=its_impl
            )
            for i in range(k)
        ]
        fields = {
            name: torch.stack([getattr(its, name) for its in drawn], dim=1)
            for name in ("tokens", "logq", "lse", "cutoff", "cutoff_id")
        }
        num_draft = torch.tensor([2, 2, 1, 2], dtype=torch.int32, device=device)
        beyond = torch.arange(k, device=device) >= num_draft[:, None]
        fields["tokens"] = fields["tokens"].masked_fill(beyond, PAD)
        draft = Draft(
            num_draft=num_draft, logits=logits, sampling=sampling, vocab_map=its_map, **fields
        )
        verdicts.append(verify(target, draft, sampling, keys, rule=rule, impl=its_impl))
    assert torch.equal(verdicts[0].tokens, verdicts[1].tokens)
    assert torch.equal(verdicts[0].num_accepted, verdicts[1].num_accepted)
    assert bool((verdicts[0].num_accepted > 0).any())


def test_one_draw_has_the_same_token_whatever_else_is_in_the_vocabulary(device: str) -> None:
    """Noise belongs to the id: a coupled draft agrees with its target where both can."""
    ids = make_ids(64, seed=3).to(device)
    logits = torch.full((64, VOCAB), -20.0, device=device)
    logits[:, ids] = 0.0
    sampling = Sampling(torch.ones(64, device=device))
    keys = Keys(torch.arange(64, device=device), torch.zeros(64, dtype=torch.int64, device=device))
    options = {"offset": 0, "stream": Stream.COUPLED, "impl": "reference"}
    whole = saguaro_sample(logits, sampling, keys, **options)
    part = saguaro_sample(logits[:, ids], sampling, keys, ids=ids, **options)
    assert float((whole.tokens == part.tokens).float().mean()) > 0.9


def test_ids_are_checked(device: str) -> None:
    logits, keys = torch.zeros(1, 8), Keys(*torch.zeros(2, 1, dtype=torch.int64))
    sampling = Sampling(torch.ones(1))
    for wrong, error in ((torch.arange(7), ShapeError), (torch.arange(8).int(), DTypeError)):
        with pytest.raises(error, match="ids"):
            saguaro_sample(logits, sampling, keys, offset=0, ids=wrong, impl="reference")
        with pytest.raises(error, match="ids"):
            predict_outcomes(
                logits[None], torch.zeros(1, 0, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int32), sampling, keys, branches=2, ids=wrong,
                impl="reference",
            )  # fmt: skip
    with pytest.raises(ConfigError, match="ids"):
        saguaro_sample(
            logits, sampling, keys, offset=0, ids=torch.arange(8), scheme="geometric",
            target_logits=logits, impl="reference",
        )  # fmt: skip


def test_ops_with_ids_pass_opcheck() -> None:
    logits, ids = torch.randn(2, 16), torch.arange(16) * 3
    sampling = Sampling(torch.ones(2))
    keys = Keys(torch.arange(2), torch.arange(2))
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "saguaro":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        saguaro_sample(logits, sampling, keys, offset=0, ids=ids, impl="reference")
        predict_outcomes(
            logits[:, None], torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2).int(), sampling,
            keys, branches=3, ids=ids, impl="reference",
        )  # fmt: skip
    assert [func.name().split("::")[1] for func, _ in calls] == [
        "saguaro_sample",
        "predict_outcomes",
    ]
    for func, args in calls:
        torch.library.opcheck(func, args)
