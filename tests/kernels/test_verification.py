"""The verification kernels against the torch reference, token for token, and against its faults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from drafting import FIELDS, draw_draft, random_case

from saguaro_kernels import (
    DRAFT_NAN,
    ConfigError,
    Draft,
    DTypeError,
    Keys,
    Sampling,
    ShapeError,
    Status,
    Verdict,
    verify,
    verify_workspace_size,
)
from saguaro_kernels.verification import verify_reference
from saguaro_kernels.verification.contract import NO_INPUTS
from saguaro_kernels.verification.launch import VerifyConfig, _verify_launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def both(case: dict[str, Any], **options: Any) -> Verdict:
    """The verdict of the reference, after that of the kernels has been found equal."""
    expected = verify(**case, **options, impl="reference")
    actual = verify(**case, **options, impl="triton")
    assert_equal(actual, expected)
    assert_legal(expected, case, options.get("row_index"))
    return expected


def assert_equal(actual: Verdict, expected: Verdict) -> None:
    for name in FIELDS:
        got, want = getattr(actual, name), getattr(expected, name)
        assert torch.equal(got, want), f"{name}: got {got.tolist()}, want {want.tolist()}"


def assert_legal(verdict: Verdict, case: dict[str, Any], row_index: torch.Tensor | None) -> None:
    """k in 0..num_draft, then k accepted tokens, an id of the vocabulary, and PAD."""
    draft, k = case["draft"], verdict.num_accepted.long()
    assert ((k >= 0) & (k <= draft.num_draft)).all()
    position = torch.arange(verdict.tokens.shape[1])
    kept = position < k[:, None]
    padded = torch.nn.functional.pad(draft.tokens, (0, 1), value=-1)
    assert torch.equal(verdict.tokens[kept], padded[kept])
    extra = verdict.tokens.gather(1, k[:, None])
    assert ((extra >= 0) & (extra < case["target_logits"].shape[-1])).all()
    assert (verdict.tokens[position > k[:, None]] == -1).all()


# -- kernel = reference ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requests, steps, vocab, dtype, rule",
    [
        (2, 3, 1, FP32, "block"),
        (2, 2, 2, BF16, "token"),
        (4, 3, 97, FP16, "block"),
        (2, 4, 8192, BF16, "block"),
        (2, 2, 8193, FP32, "token"),
        (2, 2, 8193, BF16, "coupled"),
        (2, 3, 32003, FP16, "token"),
        (1, 9, 4099, FP32, "block"),
        (1, 2, 128256, BF16, "block"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_kernel_equals_reference(
    requests: int, steps: int, vocab: int, dtype: torch.dtype, rule: str
) -> None:
    case = random_case(requests, steps, vocab, dtype, temperature=0.9, seed=vocab % 1000)
    expected = both(case, rule=rule)
    assert (expected.status == Status.OK).all()
    exact = {**case, "target_logits": case["target_logits"].double()}
    assert_equal(verify_reference(**exact, rule=rule), expected)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_kinds_of_rows(rule: str) -> None:
    """Half forbidden, one-hot, all equal, tied, spread over +-1e4; on both sides."""
    vocab, generator = 4200, torch.Generator().manual_seed(20)
    rows = 3 * torch.randn(5, 3, vocab, generator=generator)
    rows[0, :, ::2] = -math.inf
    rows[1] = -math.inf
    rows[1, :, 4199] = 2.0
    rows[2] = -4.5
    rows[3] = rows[3].round()
    rows[4] *= 3e3
    keys = Keys(torch.arange(5), torch.arange(5) + 3)
    sampling = Sampling(torch.ones(5))
    draft = draw_draft(rows[:, :2].roll(1, -1), torch.full((5,), 2).int(), sampling, keys)
    case = {
        "target_logits": rows, "draft": draft, "target_sampling": sampling, "keys": keys,
    }  # fmt: skip
    verdict = both(case, rule=rule)
    assert (verdict.status == Status.OK).all()
    assert_equal(verify_reference(**{**case, "target_logits": rows.double()}, rule=rule), verdict)
    assert (verdict.tokens[0][verdict.tokens[0] >= 0] % 2 == 1).all()
    assert verdict.tokens[1, 0] == 4199


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_temperatures_in_one_batch(rule: str) -> None:
    """0, tiny and ordinary temperatures side by side, half logits of +-6e4."""
    case = random_case(6, 2, 4500, FP16, temperature=[0.0, 1e-5, 1.0, 0.7, 1e-12, 2.0], seed=3)
    case["target_logits"][:, :, 7] = 6e4
    case["target_logits"][2:, :, 8] = -6e4
    case["target_logits"][4:, :, 7] = 0.0
    verdict = both(case, rule=rule)
    assert (verdict.status == Status.OK).all()
    # Greedy: the target's own argmax, whatever was drafted.
    own = case["target_logits"][0].float().argmax(-1)
    text = verdict.tokens[0][verdict.tokens[0] >= 0]
    assert torch.equal(text, own[: len(text)])


def test_greedy_accepts_a_greedy_draft() -> None:
    case = random_case(2, 3, 5000, BF16, temperature=0.0)
    best = case["target_logits"].float().argmax(-1)
    draft = Draft(best[:, :3].clone(), torch.tensor([3, 2], dtype=torch.int32))
    for rule in ("token", "block", "coupled"):
        verdict = both({**case, "draft": draft}, rule=rule)
        assert verdict.num_accepted.tolist() == [3, 2]
        assert verdict.tokens[0].tolist() == best[0].tolist()


def test_ties_take_the_lowest_id() -> None:
    """Equal logits within a tile, across tiles and across programs."""
    logits = torch.zeros(1, 2, 70000)
    logits[0, 0, [3, 4, 5000, 69999]] = 2.0
    logits[0, 1, [4095, 4096, 69999]] = 1.0
    draft = Draft(torch.tensor([[3]]), torch.ones(1, dtype=torch.int32))
    keys = Keys(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    case = {"target_logits": logits, "draft": draft, "keys": keys}
    case["target_sampling"] = Sampling(torch.zeros(1))
    assert both(case, rule="token").tokens.tolist() == [[3, 4095]]


def test_one_hot_drafts_per_request() -> None:
    """N-gram and argmax drafts are judged as one-hot, beside sampled ones."""
    case = random_case(4, 3, 5000, BF16, seed=5)
    draft = case["draft"]
    mixed = dataclasses.replace(
        draft,
        one_hot=torch.tensor([True, False, True, False]),
        sampling=Sampling(torch.tensor([1.0, 1.0, 1.0, 0.0])),
        logq=draft.logq.clone(),
    )
    mixed.logq[0] = math.nan  # not read where the draft is one-hot
    for rule in ("token", "block"):
        verdict = both({**case, "draft": mixed}, rule=rule)
        assert (verdict.status == Status.OK).all()
        bare = {**case, "draft": Draft(draft.tokens, draft.num_draft)}
        alone = verify(**bare, rule=rule, impl="reference")
        for b in (0, 2, 3):
            assert torch.equal(verdict.tokens[b], alone.tokens[b])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_every_option_at_once(rule: str) -> None:
    """Filters, bias, C, flat rows on both sides, one call."""
    requests, steps, vocab = 3, 3, 5000
    case = random_case(requests, steps, vocab, BF16, seed=6)
    sampling = Sampling(
        torch.tensor([0.8, 1.0, 1.3]),
        top_k=torch.tensor([50, 0, 3], dtype=torch.int32),
        top_p=torch.tensor([0.95, 0.8, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.1]),
    )
    generator = torch.Generator().manual_seed(6)
    bias = torch.randn(requests, steps + 1, vocab, generator=generator)
    near = (case["target_logits"].float() + bias)[:, :steps]
    draft_bias = 0.3 * torch.randn(requests, steps, vocab, generator=generator)
    draft = draw_draft(
        near.to(BF16), case["draft"].num_draft, sampling, case["keys"], downweight=0.4, scale_f=2,
        bias=draft_bias.view(-1, vocab),
    )  # fmt: skip
    order = torch.randperm(requests * (steps + 1), generator=generator)
    flat = torch.empty_like(case["target_logits"]).view(-1, vocab)
    flat[order] = case["target_logits"].reshape(-1, vocab)
    draft_order = torch.randperm(requests * steps, generator=generator)
    draft_flat = torch.empty(requests * steps, vocab, dtype=BF16)
    draft_flat[draft_order] = draft.logits.reshape(-1, vocab)
    padded = {
        **case, "target_sampling": sampling, "bias": bias,
        "draft": dataclasses.replace(draft, bias=draft_bias),
    }  # fmt: skip
    ragged = {
        **padded, "target_logits": flat, "row_index": order.view(requests, steps + 1),
        "draft": dataclasses.replace(
            padded["draft"], logits=draft_flat, row_index=draft_order.view(requests, steps)
        ),
    }  # fmt: skip
    assert_equal(both(ragged, rule=rule), verify(**padded, rule=rule, impl="reference"))


def test_strided_view_and_float64_oracle() -> None:
    """Rows inside a larger buffer, unaligned; the float64 reference gives the same tokens."""
    case = random_case(2, 3, 8300, FP32, seed=8)
    buffer = torch.full((2, 7, 9001), math.nan)
    buffer[:, 2:6, 301:8601] = case["target_logits"]
    view = buffer[:, 2:6, 301:8601]
    for rule in ("token", "block", "coupled"):
        expected = verify(**case, rule=rule, impl="reference")
        if rule != "token":
            assert_equal(both({**case, "target_logits": view}, rule=rule), expected)
        exact = {**case, "target_logits": case["target_logits"].double()}
        assert_equal(verify_reference(**exact, rule=rule), expected)


def test_vocabularies_of_different_width() -> None:
    """Target-only ids stay reachable, draft-only ids are refused."""
    wide = random_case(3, 2, 9000, BF16, draft_vocab=4100, seed=9)
    wide["target_logits"][..., 8990] += 12.0
    verdict = both(wide, rule="block")
    assert (verdict.tokens == 8990).any()
    narrow = {**wide, "target_logits": wide["target_logits"][..., :4000].contiguous()}
    narrow["draft"] = dataclasses.replace(wide["draft"], tokens=wide["draft"].tokens.clone())
    narrow["draft"].tokens[0, 0] = 4050
    verdict = both(narrow, rule="token")
    assert verdict.num_accepted[0] == 0 and verdict.tokens.max() < 4000


def test_vocabulary_map() -> None:
    """A draft with ids of its own equals the draft with its logits spread over the target's."""
    vocab, own = 5000, 700
    case = random_case(3, 3, vocab, FP32, seed=10)
    generator = torch.Generator().manual_seed(10)
    target_of = torch.randperm(vocab, generator=generator)[:own].sort().values
    small = case["target_logits"][:, :3, target_of] + 0.3
    draft = draw_draft(small, case["draft"].num_draft, case["target_sampling"], case["keys"])
    tokens = torch.where(draft.tokens < 0, -1, target_of[draft.tokens])
    vocab_map = torch.full((vocab,), -1, dtype=torch.int32)
    vocab_map[target_of] = torch.arange(own, dtype=torch.int32)
    spread = torch.full((3, 3, vocab), -torch.inf)
    spread[..., target_of] = small
    mapped = dataclasses.replace(draft, tokens=tokens, vocab_map=vocab_map)
    plain = dataclasses.replace(draft, tokens=tokens, logits=spread)
    for rule in ("token", "block"):
        expected = verify(**{**case, "draft": plain}, rule=rule, impl="reference")
        assert_equal(both({**case, "draft": mapped}, rule=rule), expected)


# -- batch, blocks, memory -------------------------------------------------------------------------


def pick(case: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """The case of some of its requests."""

    def take(value: Any) -> Any:
        return value[rows] if isinstance(value, torch.Tensor) else value

    def each(record: Any) -> Any:
        return type(record)(**{name: take(value) for name, value in vars(record).items()})

    draft = each(case["draft"])
    draft = dataclasses.replace(draft, sampling=each(draft.sampling))
    return {
        "target_logits": case["target_logits"][rows],
        "draft": draft,
        "target_sampling": each(case["target_sampling"]),
        "keys": each(case["keys"]),
    }


def test_batch_invariance() -> None:
    """A request's tokens do not depend on its neighbours or its row."""
    rule = "block"
    case = random_case(5, 3, 5000, BF16, temperature=[1.0, 0.0, 0.7, 1.0, 1.2], seed=11)
    whole = verify(**case, rule=rule, impl="triton")
    order = torch.tensor([3, 0, 4])
    part = verify(**pick(case, order), rule=rule, impl="triton")
    for name in FIELDS:
        assert torch.equal(getattr(part, name), getattr(whole, name)[order])


@pytest.mark.parametrize("config", [VerifyConfig(1024, 4), VerifyConfig(2048, 32)])
def test_block_size_invariance(config: VerifyConfig) -> None:
    case = random_case(2, 3, 9001, FP32, temperature=[1.0, 0.0], seed=12)
    for rule in ("block", "coupled"):
        expected = verify(**case, rule=rule, impl="reference")
        out = poisoned(2, 3)
        _verify_launch(
            case["target_logits"], case["draft"], case["target_sampling"], case["keys"],
            rule=rule, bias=None, row_index=None, inputs=NO_INPUTS, out=out,
            workspace=torch.full((4000,), math.nan), config=config,
        )  # fmt: skip
        assert_equal(out, expected)


def poisoned(requests: int, steps: int) -> Verdict:
    return Verdict(
        torch.full((requests,), -77, dtype=torch.int32),
        torch.full((requests, steps + 1), -77),
        torch.full((requests,), -77, dtype=torch.int32),
    )


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_poisoned_outputs_and_untouched_inputs(rule: str) -> None:
    """Scratch is never read before it is written, inputs are never written."""
    case = random_case(3, 2, 4200, BF16, temperature=[1.0, 0.0, 1.0], seed=13)
    # Rows beyond num_draft are not read: NaN there changes nothing.
    case["target_logits"][1, 2] = math.nan
    case["draft"].logits[1, 1] = math.nan
    tensors = [case["target_logits"], *vars(case["keys"]).values()]
    tensors += [value for value in vars(case["draft"]).values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    expected = verify(**case, rule=rule, impl="reference")
    assert (expected.status == Status.OK).all()
    for fill in (math.nan, 1e30):
        out = poisoned(3, 2)
        workspace = torch.full((verify_workspace_size(3, 2, 4200) + 3,), fill)
        assert verify(**case, rule=rule, out=out, workspace=workspace, impl="triton") is out
        assert_equal(out, expected)
        past = workspace[-3:]
        assert torch.equal(past, torch.full((3,), fill)) or past.isnan().all()
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


def test_no_requests_and_no_drafts() -> None:
    """B = 0, K = 0 and requests without a draft among others."""
    empty = random_case(0, 2, 300)
    assert both(empty, rule="block").tokens.shape == (0, 3)
    plain = random_case(2, 0, 300, temperature=[1.0, 0.0])
    for rule in ("token", "block", "coupled"):
        verdict = both(plain, rule=rule)
        assert verdict.num_accepted.tolist() == [0, 0] and (verdict.tokens >= 0).all()
    # Alone, the extra token is that of a round with K = 0: nothing of the padding is read.
    padded = random_case(2, 2, 300, seed=14)
    padded["draft"].num_draft.zero_()
    padded["draft"].tokens.fill_(-1)
    bare = {**padded, "target_logits": padded["target_logits"][:, :1]}
    bare["draft"] = Draft(torch.zeros((2, 0), dtype=torch.int64), padded["draft"].num_draft)
    wide, narrow = both(padded, rule="block"), both(bare, rule="block")
    assert torch.equal(wide.tokens[:, :1], narrow.tokens)


def test_row_offsets_beyond_int32() -> None:
    """Rows 2^31 elements apart, in a buffer that is mapped but not touched between."""
    case = random_case(2, 1, 300, BF16, seed=15)
    stride = 2**31 + 16
    buffer = torch.empty(stride + 2 * 304, dtype=BF16)
    view = buffer.as_strided((2, 2, 300), (stride, 304, 1))
    view.copy_(case["target_logits"])
    expected = verify(**case, rule="block", impl="triton")
    assert_equal(verify(**{**case, "target_logits": view}, rule="block", impl="triton"), expected)


# -- rows without a law ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_target_rows_without_a_law(rule: str) -> None:
    """NaN, +inf and empty rows get a status and a legal id; neighbours nothing."""
    case = random_case(6, 2, 4200, FP32, temperature=[1.0, 1.0, 0.0, 0.0, 1.0, 1.0], seed=16)
    case["draft"].num_draft.fill_(2)
    case["draft"].tokens.clamp_(min=5)
    clean = verify(**case, rule=rule, impl="reference")
    case["target_logits"] = case["target_logits"].clone()
    case["target_logits"][0, 0, 17] = math.nan
    case["target_logits"][1, 0] = -math.inf
    case["target_logits"][2, 0, 9] = math.inf
    case["target_logits"][3, 0] = math.nan
    case["target_logits"][4, 1] = math.nan
    verdict = both(case, rule=rule)
    want = [Status.NAN, Status.EMPTY, Status.NAN, Status.NAN, Status.NAN, Status.OK]
    assert verdict.status.tolist() == [int(status) for status in want]
    assert (verdict.num_accepted[:4] == 0).all()
    for name in FIELDS:
        assert torch.equal(getattr(verdict, name)[5], getattr(clean, name)[5])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_unusable_draft_rows(rule: str) -> None:
    """A NaN draft row is judged as one-hot; a refused token is not emitted again."""
    case = random_case(4, 2, 4200, FP32, seed=17)
    draft = case["draft"]
    draft.num_draft.fill_(2)
    draft.tokens.copy_(case["target_logits"][:, :2].argsort(-1, descending=True)[..., 3])
    draft.logq[:3, 0] = torch.tensor([math.nan, math.inf, -math.inf])
    draft.logits[0, 0] = math.nan
    verdict = both(case, rule=rule)
    assert verdict.status.tolist() == [DRAFT_NAN, DRAFT_NAN, DRAFT_NAN, int(Status.OK)]
    one_hot = Draft(draft.tokens[:, :1], torch.ones(4, dtype=torch.int32))
    first = {**case, "draft": one_hot, "target_logits": case["target_logits"][:, :2]}
    alone = both(first, rule="token")
    refused = verdict.num_accepted[:3] == 0
    assert refused.any()
    assert (verdict.tokens[:3, 0] != draft.tokens[:3, 0])[refused].all()
    if rule == "token":
        assert torch.equal(refused, alone.num_accepted[:3] == 0)
        assert torch.equal(verdict.tokens[:3, 0][refused], alone.tokens[:3, 0][refused])


def test_zero_probability_is_never_emitted() -> None:
    """Ids of p = 0 are neither accepted nor drawn, whatever the noise."""
    requests, vocab = 64, 40
    target = torch.full((requests, 3, vocab), -torch.inf)
    target[..., ::5] = 0.0
    draft_logits = torch.zeros(requests, 2, vocab)
    keys = Keys(torch.arange(requests), torch.arange(requests))
    num_draft = torch.full((requests,), 2, dtype=torch.int32)
    draft = draw_draft(draft_logits, num_draft, Sampling(torch.ones(requests)), keys)
    for rule in ("token", "block", "coupled"):
        verdict = verify(
            target, draft, Sampling(torch.ones(requests)), keys, rule=rule, impl="reference"
        )
        emitted = verdict.tokens[verdict.tokens >= 0]
        assert (emitted % 5 == 0).all()


def test_acceptance_rate_is_the_overlap() -> None:
    """P(accept) = sum min(p, q), more than the chance of drawing the same token."""
    draws = 1 << 15
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    keys = Keys(torch.arange(draws), torch.full((draws,), 2))
    num_draft = torch.ones(draws, dtype=torch.int32)
    sampling = Sampling(torch.ones(draws))
    draft = draw_draft(q.log().expand(draws, 1, 3), num_draft, sampling, keys)
    verdict = verify(
        p.log().expand(draws, 2, 3), draft, sampling, keys, rule="token", impl="reference"
    )
    overlap = float(torch.minimum(p, q).sum())
    rate = float(verdict.num_accepted.double().mean())
    assert abs(rate - overlap) < 5 * (overlap * (1 - overlap) / draws) ** 0.5


def test_bias_is_applied_per_position() -> None:
    """Accepted, recovered and bonus tokens all see their own position's bias."""
    case = random_case(2, 3, 500, FP32, temperature=[0.0, 1.0], seed=18)
    case["draft"].num_draft.fill_(3)
    bias = torch.zeros(2, 4, 500)
    for i, token in enumerate((7, 8, 9, 10)):
        bias[:, i, token] = 1e4
    draft = Draft(torch.tensor([[7, 8, 9], [7, 8, 11]]), case["draft"].num_draft)
    verdict = both({**case, "draft": draft, "bias": bias}, rule="token")
    assert verdict.tokens.tolist() == [[7, 8, 9, 10], [7, 8, 9, -1]]


# -- registration and errors -----------------------------------------------------------------------


def op_arguments(case: dict[str, Any], rule: str, impl: str) -> tuple[Any, ...]:
    draft, (requests, steps) = case["draft"], case["draft"].tokens.shape
    out = poisoned(requests, steps)
    size = verify_workspace_size(requests, steps, case["target_logits"].shape[-1])
    return (
        case["target_logits"], draft.tokens, draft.num_draft, draft.logits, draft.logq,
        draft.cutoff, draft.cutoff_id, None, None, None, None, None, None, None,
        draft.sampling.temperature, case["target_sampling"].temperature, None, None, None,
        case["keys"].seed, case["keys"].base, None, None, None, False, False, rule, impl,
        out.num_accepted, out.tokens, out.status, torch.zeros(size), None,
    )  # fmt: skip


def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.saguaro.verify.default,
        op_arguments(random_case(2, 2, 300), "block", "triton"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_errors_name_the_argument() -> None:
    case = random_case(2, 2, 50)
    draft = case["draft"]
    for options, error, words in (
        ({"rule": "best"}, ConfigError, "rule"),
        ({"target_logits": case["target_logits"][:, :2]}, ShapeError, "target_logits"),
        ({"target_logits": case["target_logits"].long()}, DTypeError, "target_logits"),
        ({"draft": dataclasses.replace(draft, logq=None)}, ConfigError, "logq"),
        ({"draft": dataclasses.replace(draft, cutoff_id=None)}, ConfigError, "cutoff"),
        (
            {
                "draft": dataclasses.replace(
                    draft,
                    sampling=Sampling(torch.ones(2), top_p=torch.full((2,), 0.9)),
                    cutoff=None,
                    cutoff_id=None,
                )
            },
            ConfigError,
            "cutoff",
        ),
        (
            {"draft": dataclasses.replace(draft, num_draft=draft.num_draft.long())},
            DTypeError,
            "num",
        ),
        ({"bias": torch.zeros(2, 50)}, ShapeError, "bias"),
        ({"workspace": torch.zeros(3), "impl": "triton"}, ShapeError, "workspace"),
        ({"impl": "cuda"}, ConfigError, "impl"),
    ):
        with pytest.raises(error, match=words):
            verify(**{**case, **options})
