"""Predicted outcomes against a list of all (k, x), scored and sorted in Python."""

from __future__ import annotations

import math

import pytest
import torch

from bench.traffic import Meter
from saguaro_kernels._launch import INTERPRETED
from saguaro_kernels.distribution import PAD, Sampling
from saguaro_kernels.errors import ConfigError, DeviceError, DTypeError, ShapeError
from saguaro_kernels.outcomes import Outcomes, predict_outcomes
from saguaro_kernels.outcomes import launch as launch_module
from saguaro_kernels.rng import Keys, Stream, gumbel_reference

IMPLS = ("reference", "triton")
INF = float("inf")


def make_case(vocab=97, num_draft=(3, 0, 2), draft_len=3, temperature=(0.0, 1.0, 0.7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = len(num_draft)
    logits = 3 * torch.randn(batch, draft_len + 1, vocab, generator=generator)
    tokens = logits[:, :draft_len].argmax(-1)  # so that the exclusion is felt
    for b, n in enumerate(num_draft):  # nobody may read these
        logits[b, n + 1 :] = float("nan")
        tokens[b, n:] = PAD
    return {
        "draft_logits": logits,
        "draft_tokens": tokens,
        "num_draft": torch.tensor(num_draft, dtype=torch.int32),
        "sampling": Sampling(torch.tensor(temperature)),
        "keys": Keys(torch.arange(batch) + 11, torch.arange(batch) * 7 + 5),
    }


def _noise(case, b: int, k: int, ranking: str) -> torch.Tensor:
    temperature, vocab = float(case["sampling"].temperature[b]), case["draft_logits"].shape[-1]
    if ranking == "auto":
        ranking = "noise" if temperature >= 0.5 else "probability"
    if ranking == "probability" or temperature == 0:
        return torch.zeros(vocab, dtype=torch.float64)
    keys = Keys(case["keys"].seed[b : b + 1], case["keys"].base[b : b + 1])
    stream = Stream.EXTRA if ranking == "noise" else Stream.COUPLED
    return gumbel_reference(keys, k, stream, vocab)[0].double()


def by_hand(
    case, branches, *, ranking="auto", allocation="auto", fan_out=None, accept_prob=None,
    cutoff=None, bias=None,
):  # fmt: skip
    """[B][(k, x, score)] in the order of the contract."""
    logits = case["draft_logits"].double()
    if bias is not None:
        logits = logits + bias
    result = []
    for b in range(len(logits)):
        n = int(case["num_draft"][b])
        temperature = float(case["sampling"].temperature[b]) or 1.0
        rows = []
        for k in range(n + 1):
            z, g = logits[b, k], _noise(case, b, k, ranking)
            score = (z / temperature + g).tolist()
            lowest = -INF if cutoff is None else float(cutoff[b, k])
            allowed = [
                x for x in range(len(score))
                if not (k < n and x == case["draft_tokens"][b, k])
                and -INF < float(z[x]) < INF and float(z[x]) >= lowest
            ]  # fmt: skip
            total = math.fsum(math.exp(score[x] - max(score)) for x in allowed) or 1.0
            chance = 1.0 if accept_prob is None else float(accept_prob[b, k])
            if accept_prob is not None and k == n:
                chance = float(accept_prob[b, k:].sum())
            log_chance = math.log(chance) if chance > 0 else -INF
            weight = {x: log_chance + score[x] - max(score) - math.log(total) for x in allowed}
            rows.append(sorted(((k, x, weight[x]) for x in allowed), key=lambda c: (-c[2], c[1])))
        best = allocation == "best" or (
            allocation == "auto" and fan_out is None and accept_prob is not None
        )
        if best:
            everything = [c for row in rows for c in row if c[2] > -INF]
            everything.sort(key=lambda c: (-c[2], c[0], c[1]))
            chosen = sorted(everything[:branches], key=lambda c: (c[0], -c[2], c[1]))
        else:
            if fan_out is None:
                counts = [branches // (n + 1)] * (n + 1)
                for k in range(n, n - branches % (n + 1), -1):
                    counts[k] += 1
            else:
                given = fan_out.expand(len(logits), -1)[b].tolist()
                counts = [*given[:n], sum(given[n:])]
            chosen = [c for row, count in zip(rows, counts, strict=True) for c in row[:count]]
        result.append(chosen[:branches])
    return result


def run(case, impl, device, branches, **options) -> Outcomes:
    move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
    tensors = {name: move(value) for name, value in case.items()}
    tensors["sampling"] = Sampling(move(case["sampling"].temperature))
    tensors["keys"] = Keys(move(case["keys"].seed), move(case["keys"].base))
    options = {name: move(value) for name, value in options.items()}
    logits, tokens = tensors["draft_logits"].clone(), tensors["draft_tokens"].clone()
    shape = (len(logits), branches)
    out = Outcomes(
        torch.full(shape, -99, dtype=torch.int32, device=device),
        torch.full(shape, -99, dtype=torch.int64, device=device),
        torch.full(shape, float("nan"), device=device),
    )
    found = predict_outcomes(**tensors, branches=branches, out=out, impl=impl, **options)
    assert found is out
    assert torch.equal(tensors["draft_logits"].nan_to_num(7.0), logits.nan_to_num(7.0))
    assert torch.equal(tensors["draft_tokens"], tokens)
    return Outcomes(out.depth.cpu(), out.tokens.cpu(), out.score.cpu())


def check(case, impl, device, branches, **options) -> Outcomes:
    found = run(case, impl, device, branches, **options)
    expected = by_hand(case, branches, **options)
    for b, chosen in enumerate(expected):
        pairs = list(zip(found.depth[b].tolist(), found.tokens[b].tolist(), strict=True))
        padding = branches - len(chosen)
        assert pairs == [(k, x) for k, x, _ in chosen] + [(PAD, PAD)] * padding
        weights = torch.tensor([w for *_, w in chosen] + [-INF] * padding)
        torch.testing.assert_close(found.score[b], weights, atol=2e-4, rtol=1e-4)
        used = pairs[: len(chosen)]
        assert len(set(used)) == len(used)
    return found


ACCEPT = torch.tensor([[0.3, 0.2, 0.1, 0.4], [0.5, 0.2, 0.2, 0.1], [0.6, 0.1, 0.2, 0.1]])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ranking", ["auto", "probability", "noise", "coupled"])
@pytest.mark.parametrize(
    "options",
    [
        {"allocation": "uniform"},
        {"allocation": "best", "accept_prob": ACCEPT},
        {"fan_out": torch.tensor([1, 0, 3, 2], dtype=torch.int32)},
    ],
    ids=["uniform", "best", "fan_out"],
)
def test_rankings_and_allocations(ranking, options, impl, device):
    check(make_case(), impl, device, 7, ranking=ranking, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("branches", [1, 2, 18])
def test_budgets(branches, impl, device):
    case = make_case()
    check(case, impl, device, branches)
    check(case, impl, device, branches, accept_prob=ACCEPT)
    ragged = torch.tensor([[0, 9, 0, 2], [0, 0, 0, 3], [40, 1, 1, 1]], dtype=torch.int32)
    check(case, impl, device, branches, fan_out=ragged)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab", [1, 2, 5, 2500])
def test_vocabularies(vocab, impl, device):
    # Down to rows with no candidate at all: one id, and it was drafted.
    case = make_case(vocab=vocab, num_draft=(1, 0), draft_len=1, temperature=(1.0, 0.0))
    check(case, impl, device, 8)
    check(case, impl, device, 8, accept_prob=torch.tensor([[0.25, 0.75], [1.0, 0.0]]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_with_ties(dtype, impl, device):
    case = make_case(temperature=(0.0, 0.3, 0.4), seed=4)
    case["draft_logits"] = (case["draft_logits"] * 2).round().to(dtype)  # many ties
    check(case, impl, device, 12)
    check(case, impl, device, 12, accept_prob=ACCEPT)


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_take_the_lowest_id_across_tiles_and_shares(impl, device, monkeypatch):
    config = launch_module.OutcomesConfig(width=8, block_v=32, splits=3)
    monkeypatch.setattr(launch_module, "outcomes_config", lambda *_: config)
    case = make_case(vocab=300, num_draft=(1,), draft_len=1, temperature=(0.0,))
    case["draft_logits"] = torch.zeros(1, 2, 300)
    case["draft_logits"][0, 1, [299, 31, 32, 64, 200]] = 1.0
    case["draft_tokens"] = torch.tensor([[2]])
    found = check(case, impl, device, 8, allocation="uniform")
    assert found.tokens[0].tolist() == [0, 1, 3, 4, 31, 32, 64, 200]


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_weights_take_the_lowest_depth(impl, device):
    case = make_case(vocab=4, num_draft=(1,), draft_len=1, temperature=(1.0,))
    case["draft_logits"] = torch.zeros(1, 2, 4)
    case["draft_tokens"] = torch.tensor([[0]])
    accept = torch.tensor([[0.75, 1.0]])  # 3 candidates of 1/4 each, and 4 of 1/4
    options = {"ranking": "probability", "accept_prob": accept}
    found = run(case, impl, device, 4, **options)
    # Rounding may break the tie between depths, never the number or the order within one.
    assert found.depth[0].tolist() in ([0, 0, 0, 1], [1, 1, 1, 1])
    assert found.tokens[0].tolist() in ([1, 2, 3, 0], [0, 1, 2, 3])


@pytest.mark.parametrize("impl", IMPLS)
def test_no_drafts_put_the_whole_budget_on_one_row(impl, device):
    case = make_case(num_draft=(0, 0), temperature=(1.0, 0.0))
    for options in ({}, {"accept_prob": torch.rand(2, 4)}, {"fan_out": torch.full((4,), 4).int()}):
        found = check(case, impl, device, 16, **options)
        assert (found.depth == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_impossible_depths_get_nothing(impl, device):
    case = make_case(temperature=(1.0, 1.0, 1.0))
    accept = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = check(case, impl, device, 9, accept_prob=accept)
    assert set(found.depth[0].tolist()) == {1}
    assert set(found.depth[2].tolist()) == {PAD}


@pytest.mark.parametrize("impl", IMPLS)
def test_bias_and_cutoff(impl, device):
    case = make_case(temperature=(0.0, 1.0, 0.7))
    bias = torch.zeros(97)
    bias[[3, 50]] = torch.tensor([20.0, -INF])
    found = check(case, impl, device, 8, bias=bias)
    assert (found.tokens[1] == 3).any() and not (found.tokens == 50).any()
    # Few ids above the cutoff: the rest is unused.
    cutoff = case["draft_logits"].nan_to_num(0.0).sort(-1).values[..., -3].contiguous()
    found = check(case, impl, device, 8, cutoff=cutoff)
    assert found.depth[1].tolist() == [0, 0, 0] + [PAD] * 5


@pytest.mark.parametrize("impl", IMPLS)
def test_temperature_zero_has_no_dice(impl, device):
    case = make_case(temperature=(0.0, 0.0, 0.0))
    results = [
        run(case, impl, device, 8, ranking=ranking)
        for ranking in ("auto", "probability", "noise", "coupled")
    ]
    for other in results[1:]:
        assert torch.equal(other.tokens, results[0].tokens)


@pytest.mark.parametrize("impl", IMPLS)
def test_auto_is_noise_from_one_half_on(impl, device):
    case = make_case(num_draft=(2, 2), temperature=(0.5, 0.4999), draft_len=2)
    auto = run(case, impl, device, 6, ranking="auto").tokens
    noise = run(case, impl, device, 6, ranking="noise").tokens
    plain = run(case, impl, device, 6, ranking="probability").tokens
    assert torch.equal(auto[0], noise[0]) and not torch.equal(auto[0], plain[0])
    assert torch.equal(auto[1], plain[1]) and not torch.equal(auto[1], noise[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_noise_predicts_the_dice_of_the_bonus(impl, device):
    # Target = draft: after all drafts are accepted the bonus is argmax log p + EXTRA noise, so the
    # first candidate of the last depth is it, every time. The probability ranking is often wrong.
    count = 10
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(count, 2, 50, generator=generator)
    keys = Keys(torch.arange(count), torch.arange(count) + 3)
    bonus = (logits[:, 1].log_softmax(-1) + gumbel_reference(keys, 1, Stream.EXTRA, 50)).argmax(-1)
    case = {
        "draft_logits": logits,
        "draft_tokens": logits[:, :1].argmax(-1),
        "num_draft": torch.ones(count, dtype=torch.int64),
        "sampling": Sampling(torch.ones(count)),
        "keys": keys,
    }
    hits = {}
    for ranking in ("noise", "probability"):
        found = run(case, impl, device, 2, ranking=ranking)
        assert found.depth.tolist() == [[0, 1]] * count
        hits[ranking] = int((found.tokens[:, 1] == bonus).sum())
    assert hits["noise"] == count
    assert hits["probability"] < count


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [1.0, 6e4])
def test_bad_logits_and_tiny_temperatures(scale, impl, device):
    case = make_case(vocab=40, num_draft=(1, 1, 1), draft_len=1, temperature=(1e-5, 1e-30, 1.0))
    logits = case["draft_logits"].clamp(-1, 1) * scale
    logits[:, :, 5] = float("nan")
    logits[:, :, 6] = INF
    logits[:, :, 7:] = -INF
    logits[2, 0] = float("nan")
    case["draft_logits"] = logits.half() if scale > 1 else logits
    case["draft_tokens"] = torch.full((3, 1), 2)
    found = run(case, impl, device, 12, ranking="probability")
    assert sorted(found.tokens[0].tolist()) == [PAD] * 3 + [0, 0, 1, 1, 2, 3, 3, 4, 4]
    assert found.depth[2].tolist() == [1] * 5 + [PAD] * 7  # its row 0 has no candidate
    ordered = case["draft_logits"][0, 1, :5].sort(descending=True, stable=True).indices
    assert found.tokens[0, 4:9].tolist() == ordered.tolist()
    assert not found.score.isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_request_does_not_depend_on_its_batch(impl, device):
    case = make_case(temperature=(1.0, 1.0, 0.7))
    whole = run(case, impl, device, 7, accept_prob=ACCEPT)
    order = torch.tensor([2, 0, 1])
    shuffled = {
        **{name: case[name][order] for name in ("draft_logits", "draft_tokens", "num_draft")},
        "sampling": Sampling(case["sampling"].temperature[order]),
        "keys": Keys(case["keys"].seed[order], case["keys"].base[order]),
    }
    found = run(shuffled, impl, device, 7, accept_prob=ACCEPT[order])
    assert torch.equal(found.tokens, whole.tokens[order])
    assert torch.equal(found.depth, whole.depth[order])


def test_the_size_of_a_tile_does_not_matter(device, monkeypatch):
    case = make_case(vocab=300, num_draft=(1, 0, 1), temperature=(1.0, 0.0, 0.7))
    whole = run(case, "triton", device, 7, accept_prob=ACCEPT)
    for block_v, splits in ((64, 1), (128, 3)):
        config = launch_module.OutcomesConfig(width=16, block_v=block_v, splits=splits)
        monkeypatch.setattr(launch_module, "outcomes_config", lambda *_, config=config: config)
        found = run(case, "triton", device, 7, accept_prob=ACCEPT)
        assert torch.equal(found.tokens, whole.tokens)
        assert torch.equal(found.depth, whole.depth)


def test_rows_are_read_once(device):
    case = make_case(vocab=8192, num_draft=(3,), temperature=(0.0,))
    with Meter() as meter:
        run(case, "triton", device, 8)
    if INTERPRETED:  # the meter counts the interpreter's loads
        kernels = [event for name, event in meter.kernels.items() if name.startswith("_predict")]
        assert sum(event.launches for event in kernels) == 2
        assert sum(event.bytes_read for event in kernels) <= 1.05 * 4 * 4 * 8192


@pytest.mark.parametrize("impl", IMPLS)
def test_empty(impl, device):
    case = make_case(num_draft=(), temperature=())
    assert run(case, impl, device, 4).depth.shape == (0, 4)
    assert run(make_case(), impl, device, 0).depth.shape == (3, 0)


def test_wrong_arguments_are_named(device):
    for error, match, changed in (
        (DTypeError, "draft_logits", {"draft_logits": torch.zeros(3, 4, 9, dtype=torch.int32)}),
        (ShapeError, "draft_logits", {"draft_logits": torch.zeros(3, 0, 9)}),
        (ShapeError, "draft_tokens", {"draft_tokens": torch.zeros(3, 4, dtype=torch.int64)}),
        (DTypeError, "num_draft", {"num_draft": torch.zeros(3)}),
        (ShapeError, "temperature", {"sampling": Sampling(torch.zeros(2))}),
        (DTypeError, "seed", {"keys": Keys(torch.zeros(3), torch.zeros(3, dtype=torch.int64))}),
        (ConfigError, "ranking", {"ranking": "loud"}),
        (ConfigError, "allocation", {"allocation": "most"}),
        (ConfigError, "branches", {"branches": -1}),
        (ShapeError, "fan_out", {"fan_out": torch.zeros(3, dtype=torch.int32)}),
        (DTypeError, "fan_out", {"fan_out": torch.zeros(4)}),
        (ShapeError, "accept_prob", {"accept_prob": torch.zeros(4)}),
        (DTypeError, "cutoff", {"cutoff": torch.zeros(3, 4, dtype=torch.float64)}),
        (ShapeError, "bias", {"bias": torch.zeros(96)}),
        (
            ConfigError,
            "fan_out",
            {"fan_out": torch.zeros(4, dtype=torch.int32), "allocation": "best"},
        ),
        (DeviceError, "accept_prob", {"accept_prob": torch.zeros(3, 4, device="meta")}),
    ):
        with pytest.raises(error, match=match):
            predict_outcomes(**{**make_case(), "branches": 4, **changed})
