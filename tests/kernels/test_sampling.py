"""Sampling: token for token the reference, the exact law, and the cost of one read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import oracles
from bench.traffic import Meter
from saguaro_kernels import (
    PAD,
    Keys,
    Sample,
    Sampling,
    Status,
    Stream,
    log_prob_reference,
    saguaro_sample,
    sample_geometric,
    sample_workspace_size,
)
from saguaro_kernels.distribution.launch import (
    MAX_LIST,
    Draw,
    ScanConfig,
    ScanOutputs,
    row_scan_launch,
)
from saguaro_kernels.errors import ConfigError, DTypeError, ShapeError
from saguaro_kernels.rng import gumbel_reference
from saguaro_kernels.sampling import saguaro_sample_reference

IMPLS = ("reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SCHEMES = {
    "plain": {},
    "top8": {"top_f": 8},
    "top64": {"top_f": 64},
    "C6": {"top_f": 3, "scale_f": 6, "scheme": "downweight"},
    "C300": {"top_f": 3, "scale_f": 300, "scheme": "downweight"},
}
CASES = [
    pytest.param(rows, vocab, dtype, scheme, id=f"R{rows}-V{vocab}-{NAMES[dtype]}-{scheme}")
    for rows, vocab, dtypes, schemes in (
        (0, 97, DTYPES[:1], ("C6",)),
        (6, 1, DTYPES[:1], ("plain", "C6")),
        (6, 2, DTYPES[:1], ("top8", "C300")),
        (7, 97, DTYPES, ("plain", "top8", "C6")),
        (7, 97, DTYPES[:1], ("top64", "C300")),
        (3, 8192, DTYPES, ("C6",)),
        (2, 8193, DTYPES[:1], SCHEMES),
        (2, 8193, DTYPES[1:], ("top8",)),
        (1, 32003, DTYPES[1:2], ("C6",)),
    )
    for dtype in dtypes
    for scheme in schemes
]


def make_rows(rows: int, vocab: int, dtype=torch.float32, seed=0, device="cpu") -> torch.Tensor:
    """Peaked, flat, tied, equal, one-hot, partly forbidden and broken rows, as `r % 7` has it."""
    rng = np.random.default_rng(seed + 1000 * vocab)
    z = rng.standard_normal((rows, vocab)) * 3 + 12
    z[1::7] *= 0.02
    z[2::7] = np.round(z[2::7])
    z[3::7] = 2.5
    z[4::7] = -np.inf
    z[4::7, vocab // 2] = 1.0
    z[5::7] = np.where(rng.random(z[5::7].shape) < 0.5, z[5::7], -np.inf)
    z[6::7, vocab // 3] = np.nan
    return torch.empty((rows, vocab), dtype=dtype, device=device).copy_(torch.from_numpy(z))


def make_sampling(rows: int, vocab: int, device, filtered: bool) -> Sampling:
    def cycle(values, dtype):
        return torch.tensor((values * rows)[:rows], dtype=dtype, device=device)

    temperature = cycle([1.0, 0.7, 0.0, 1e-5, 1.3], torch.float32)
    if not filtered:
        return Sampling(temperature)
    return Sampling(
        temperature,
        cycle([0, 40, 5, vocab], torch.int32),
        cycle([0.9, 1.0, 0.5], torch.float32),
        cycle([0.0, 0.02], torch.float32),
    )


def make_keys(rows: int, device) -> Keys:
    """Some rows share a key, as the branches of one depth do."""
    row = torch.arange(rows, device=device)
    return Keys(row // 2 * 7919 - 3, row // 3 + 40)


def with_downweight(options: dict, rows: int, device) -> dict:
    if options.get("scheme") != "downweight":
        return dict(options)
    values = ([0.5, 0.0, 1.0, 0.9] * rows)[:rows]
    return {**options, "downweight": torch.tensor(values, device=device)}


def assert_same_sample(got: Sample, want: Sample) -> None:
    for field in dataclasses.fields(Sample):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if not a.is_floating_point() or field.name in ("cutoff", "scale_logit", "top_logits"):
            assert torch.equal(a, b), f"{field.name}: {a} {b}"
        else:
            torch.testing.assert_close(
                a, b, rtol=2e-6, atol=3e-5, msg=lambda m, n=field.name: f"{n}: {m}"
            )


def oracle_law(logits, sampling, r, options) -> np.ndarray:
    scaled = options.get("scheme") == "downweight"
    filters = {k: v[r].item() for k, v in vars(sampling).items() if v is not None}
    return oracles.row_law(
        logits[r].float().cpu().numpy(),
        **filters,
        downweight=options["downweight"][r].item() if scaled else 1.0,
        scale_f=options.get("scale_f", 0),
    )


@pytest.mark.parametrize(("rows", "vocab", "dtype", "scheme"), CASES)
def test_kernel_matches_reference(rows, vocab, dtype, scheme, device):
    logits, keys = make_rows(rows, vocab, dtype, device=device), make_keys(rows, device)
    before = logits.clone()
    # Filters on every other scheme: the searches have tests of their own.
    sampling = make_sampling(rows, vocab, device, filtered=scheme in ("top8", "C300"))
    options = with_downweight(SCHEMES[scheme], rows, device)
    got = saguaro_sample(logits, sampling, keys, offset=3, impl="triton", **options)
    want = saguaro_sample(logits, sampling, keys, offset=3, impl="reference", **options)
    assert_same_sample(got, want)
    given = {name: value for name, value in options.items() if name != "scheme"}
    exact = saguaro_sample_reference(logits.double(), sampling, keys, offset=3, **given)
    assert torch.equal(exact.tokens, got.tokens)
    assert torch.equal(logits.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0))
    assert ((got.tokens >= 0) & (got.tokens < vocab)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("filtered", [False, True], ids=("all", "filtered"))
def test_reference_matches_the_law(scheme, filtered):
    rows, vocab, offset = 35, 400, 2
    logits, keys = make_rows(rows, vocab), make_keys(rows, "cpu")
    sampling = make_sampling(rows, vocab, "cpu", filtered)
    options = with_downweight(SCHEMES[scheme], rows, "cpu")
    sample = saguaro_sample(logits, sampling, keys, offset=offset, impl="reference", **options)
    for r in range(rows):
        law = oracle_law(logits, sampling, r, options)
        with np.errstate(divide="ignore"):
            log_law = np.log(law)
        token = sample.tokens[r].item()
        assert sample.logq[r].item() == pytest.approx(log_law[token], abs=5e-5)
        # The token is the argmax of the exact law and the exact noise.
        seed, base = keys.seed[r].item(), keys.base[r].item()
        live = np.flatnonzero(law)
        score = [
            log_law[i] + oracles.gumbel(oracles.random_word(seed, base, offset, 0, int(i)))
            for i in live
        ]
        assert token == live[np.argmax(score)]
        # And the row, rebuilt from its logits and the scalars, is the law.
        if sampling.temperature[r] > 1e-3:
            rebuilt = rebuild(logits, sampling, sample, options)[r].exp().numpy()
            np.testing.assert_allclose(rebuilt, law, rtol=1e-4, atol=1e-9)


def rebuild(logits, sampling, sample: Sample, options) -> torch.Tensor:
    """log q of every id from what the Sample says, anchored at the drawn token."""
    z = torch.where(logits < torch.inf, logits.float(), -torch.inf)
    at = z.gather(1, sample.tokens[:, None])[:, 0]
    lse = -sample.logq
    downweight = options.get("downweight")
    if downweight is not None:
        scaled = (at > sample.scale_logit) | (
            (at == sample.scale_logit) & (sample.tokens <= sample.scale_id)
        )
        lse = torch.where(scaled, lse + downweight.log(), lse)
    anchor = torch.where(at > -torch.inf, at, 0.0)
    return log_prob_reference(
        z, sampling.temperature, sample.cutoff, sample.cutoff_id, lse, sample.scale_logit,
        sample.scale_id, downweight, anchor=anchor,
    )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_exactly_f_ids_are_scaled(impl, device):
    # Ten ids tie at rank F: the lowest are scaled, whatever tile they lie in.
    vocab = 5000  # three tiles
    logits = torch.zeros(2, vocab, device=device)
    tied = torch.tensor([4, 100, 1023, 1024, 2047, 2048, 3000, 4095, 4096, 4999], device=device)
    logits[:, tied] = 3.0
    logits[:, 2500] = 5.0
    logits[1, :] = -torch.inf
    logits[1, [7, 9]] = 1.0
    ones, keys = torch.ones(2, device=device), make_keys(2, device)
    for scale_f, scale_id in ((1, 2500), (5, 1024), (600, 590)):
        sample = saguaro_sample(
            logits, Sampling(ones), keys, offset=0, scale_f=scale_f, downweight=ones * 0.5,
            scheme="downweight", impl=impl,
        )  # fmt: skip
        assert sample.scale_id[0] == scale_id
        # Fewer kept ids than F: every one would be scaled, so none is.
        want = (PAD, torch.inf) if scale_f >= 2 else (7, 1.0)
        assert (sample.scale_id[1].item(), sample.scale_logit[1].item()) == want
    for scale_f in (vocab + 5, 0):
        sample = saguaro_sample(
            logits, Sampling(ones), keys, offset=0, scale_f=scale_f, downweight=ones * 0.5,
            scheme="downweight", impl=impl,
        )  # fmt: skip
        plain = saguaro_sample(logits, Sampling(ones), keys, offset=0, impl=impl)
        assert_same_sample(sample, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_scaling_to_zero_where_almost_all_the_mass_is(impl, device):
    # The rest has mass e^-60, or e^-3e6: it is the law all the same.
    logits = torch.zeros(2, 3000, device=device)
    logits[:, 1234] = 60.0
    logits[:, 2999] = 30.0
    sampling = Sampling(torch.tensor([1.0, 1e-5], device=device))
    sample = saguaro_sample(
        logits, sampling, make_keys(2, device), offset=0, scale_f=1,
        downweight=torch.zeros(2, device=device), scheme="downweight", impl=impl,
    )  # fmt: skip
    assert sample.tokens.tolist() == [2999, 2999]
    torch.testing.assert_close(sample.logq, torch.zeros(2, device=device), atol=1e-6, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_top_ids(impl, device):
    rows, vocab = 7, 2100
    logits, keys = make_rows(rows, vocab, device=device), make_keys(rows, device)
    temperature = torch.tensor([1.0, 0.0] * 3 + [1.0], device=device)
    k5 = torch.full((rows,), 5, dtype=torch.int32, device=device)
    for sampling, limit, top_f, some in (
        (Sampling(temperature), vocab, 1, slice(None)),
        (Sampling(temperature, k5), 5, 9, slice(None)),
        (Sampling(temperature[:2]), vocab, MAX_LIST, slice(0, 2)),
    ):
        given = Sampling(*(None if v is None else v[some] for v in vars(sampling).values()))
        sample = saguaro_sample(
            logits[some], given, Keys(keys.seed[some], keys.base[some]), offset=0, top_f=top_f,
            impl=impl,
        )  # fmt: skip
        for r in range(len(sample.tokens)):
            # A greedy row keeps its runners-up, whatever its filters.
            z = torch.where(logits[r] < torch.inf, logits[r], -torch.inf).cpu().numpy()
            greedy = temperature[r] == 0
            ids = oracles.ranking(z)[: top_f if greedy else min(top_f, limit)]
            assert sample.top_ids[r].tolist() == ids.tolist() + [PAD] * (top_f - len(ids))
            values = logits[r, torch.from_numpy(ids).to(device)]
            assert torch.equal(sample.top_logits[r, : len(ids)], values)
            assert (sample.top_logits[r, len(ids) :] == -torch.inf).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_broken_rows(impl, device):
    vocab = 2060  # two tiles
    logits = make_rows(1, vocab, device=device)[0].repeat(5, 1)
    logits[1, : vocab - 1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 17] = torch.inf
    row = torch.zeros(5, dtype=torch.int64, device=device)
    ones = torch.ones(5, device=device)
    for sampling in (Sampling(ones), Sampling(ones, None, ones * 0.8), Sampling(ones * 0)):
        sample = saguaro_sample(logits, sampling, Keys(row, row), offset=0, top_f=4, impl=impl)
        assert sample.status.tolist() == [0, Status.NAN, Status.EMPTY, Status.NAN, 0]
        assert sample.tokens[1] == vocab - 1  # the only number left
        assert sample.tokens[2] == 0
        assert sample.tokens[3] == sample.tokens[0] == sample.tokens[4]
        assert sample.logq[2] == 0
        assert sample.top_ids[2].tolist() == [PAD] * 4
        assert sample.top_ids[1].tolist() == [vocab - 1, PAD, PAD, PAD]
        floats = [value for value in vars(sample).values() if value.is_floating_point()]
        assert not any(torch.isnan(value).any() for value in floats)


@pytest.mark.parametrize("impl", IMPLS)
def test_forbidden_and_padded_ids_are_never_drawn(impl, device):
    # Every allowed logit is far below the padding, and some sit at the ends of tiles.
    allowed = torch.tensor([0, 2047, 2048, 4999], device=device)
    wide = torch.full((64, 5120), 9e3, device=device)
    wide[:, :5000] = -8e3
    bias = torch.full((1, 5000), -torch.inf, device=device).index_fill(1, allowed, 0.0)
    keys = Keys(torch.arange(64, device=device), torch.zeros(64, dtype=torch.int64, device=device))
    rows = 64 if impl == "reference" else 8
    sample = saguaro_sample(
        wide[:rows, :5000], Sampling(torch.ones(rows, device=device)),
        Keys(keys.seed[:rows], keys.base[:rows]), offset=0, bias=bias.expand(rows, -1), top_f=6,
        impl=impl,
    )  # fmt: skip
    assert torch.isin(sample.tokens, allowed).all()
    assert len(sample.tokens.unique()) >= 3
    assert (sample.top_ids == torch.tensor([*allowed.tolist(), PAD, PAD], device=device)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_are_written_and_nothing_else(impl, device):
    rows, pad, top_f = 5, 2, 6
    logits, sampling = make_rows(rows, 97, device=device), Sampling(torch.ones(rows, device=device))
    keys = make_keys(rows, device)
    want = saguaro_sample_reference(logits, sampling, keys, offset=1, top_f=top_f)
    poison = {
        name: torch.full((rows + pad, *v.shape[1:]), -77.0 if v.is_floating_point() else -77).to(v)
        for name, v in vars(want).items()
    }
    out = Sample(**{name: value[:rows] for name, value in poison.items()})
    size = sample_workspace_size(rows, 97, top_f, 0)
    workspace = torch.full((size,), -1, device=device)  # as floats: NaN
    got = saguaro_sample(
        logits, sampling, keys, offset=1, top_f=top_f, impl=impl, out=out, workspace=workspace
    )
    assert got is out
    assert_same_sample(out, want)
    assert all((value[rows:] == -77).all() for value in poison.values())


def test_a_row_does_not_depend_on_its_batch(device):
    rows, vocab = 7, 2100
    logits, keys = make_rows(rows, vocab, device=device), make_keys(rows, device)
    sampling = make_sampling(rows, vocab, device, filtered=True)
    options = with_downweight(SCHEMES["C6"], rows, device)
    sample = saguaro_sample(logits, sampling, keys, offset=0, impl="triton", **options)
    order = torch.tensor([5, 2, 2, 6, 0, 1, 3, 4], device=device)
    options["downweight"] = options["downweight"][order]
    again = saguaro_sample(
        logits[order],
        Sampling(*(value[order] for value in vars(sampling).values())),
        Keys(keys.seed[order], keys.base[order]),
        offset=torch.zeros(len(order), dtype=torch.int64, device=device),
        impl="triton",
        **options,
    )
    for name, value in vars(sample).items():
        assert torch.equal(value[order], getattr(again, name)), name


@pytest.mark.parametrize(
    ("scale_f", "config"),
    [
        (4, ScanConfig(128, 3, 4, 4)),
        (200, ScanConfig(128, 3, 4, 4)),
        (4, ScanConfig(8192, 64, 8, 4)),
    ],
    ids=("listed-small", "searched-small", "listed-large"),
)
def test_a_row_does_not_depend_on_the_blocks(scale_f, config, device):
    rows, vocab, top_f = 7, 500, 5
    logits, keys = make_rows(rows, vocab, device=device), make_keys(rows, device)
    sampling = make_sampling(rows, vocab, device, filtered=True)
    downweight = torch.full((rows,), 0.3, device=device)
    want = saguaro_sample(
        logits, sampling, keys, offset=0, top_f=top_f, scale_f=scale_f, downweight=downweight,
        scheme="downweight", impl="triton",
    )  # fmt: skip
    got = Sample(**{name: torch.empty_like(value) for name, value in vars(want).items()})
    row_scan_launch(
        logits, sampling, ScanOutputs(**vars(got)), draw=Draw(keys.seed, keys.base),
        scale_f=scale_f, downweight=downweight, config=config,
    )  # fmt: skip
    assert_same_sample(got, want)


def test_greedy_rows_draw_no_noise(monkeypatch):
    def refuse(*_):
        raise AssertionError("noise was drawn")

    logits, keys = make_rows(7, 97), make_keys(7, "cpu")
    monkeypatch.setattr("saguaro_kernels.sampling.reference.distinct_gumbel_reference", refuse)
    sampling = Sampling(torch.zeros(7))
    sample = saguaro_sample(logits, sampling, keys, offset=0, impl="reference")
    assert torch.equal(sample.tokens, logits.nan_to_num(nan=-1e9).argmax(1))
    assert torch.equal(sample.logq, torch.zeros(7))
    # The control: a row that samples does draw.
    sampling = Sampling(torch.tensor([0.0] * 6 + [1.0]))
    with pytest.raises(AssertionError, match="noise"):
        saguaro_sample(logits, sampling, keys, offset=0, impl="reference")


def test_streams_and_keys_reach_the_noise(device):
    logits = torch.zeros(6, 1000, device=device)
    seed = torch.tensor([1, 1, 2, 1, 1, 1], device=device)
    base = torch.tensor([5, 5, 5, 6, 5, 4], device=device)
    offset = torch.tensor([0, 0, 0, 0, 1, 1], device=device)
    for impl in IMPLS:
        sampling = Sampling(torch.ones(6, device=device))
        draw = lambda stream, offset=offset, impl=impl, sampling=sampling: saguaro_sample(  # noqa: E731
            logits, sampling, Keys(seed, base), offset=offset, stream=stream, impl=impl
        ).tokens.tolist()
        a, b, c, d, e, f = draw(Stream.DRAFT)
        assert a == b
        assert len({a, c, d, e, f}) == 5
        assert draw(Stream.EXTRA)[0] != a
        coupled = draw(Stream.COUPLED)
        assert coupled[0] == coupled[5]  # base + offset = 5
        assert coupled[3] == coupled[4]  # and 6
        noise = gumbel_reference(Keys(seed, base), offset, Stream.EXTRA, 1000)
        assert draw(Stream.EXTRA) == noise.argmax(1).tolist()


# -- geometric ------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_geometric_mean_of_draft_and_residual(impl, device):
    rows, vocab = 5, 300
    generator = torch.Generator().manual_seed(1)
    draft = torch.randn(rows, vocab, generator=generator).to(device)
    target = torch.randn(rows, vocab, generator=generator).to(device)
    target[2] = draft[2]  # no residual
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.0, 1.0], device=device)
    top_k = torch.tensor([0, 0, 0, 0, 20], dtype=torch.int32, device=device)
    sampling, keys = Sampling(temperature, top_k), make_keys(rows, device)
    sample, log_row = sample_geometric(draft, target, sampling, keys, offset=4, top_f=3, impl=impl)
    for r in range(rows):
        filters = {"temperature": temperature[r].item(), "top_k": top_k[r].item()}
        q, p = (oracles.row_law(z[r].cpu().numpy(), **filters) for z in (draft, target))
        excess = np.maximum(p - q, 0)
        residual = excess / excess.sum() if excess.sum() > 1e-6 else p
        law = np.sqrt(q * np.maximum(residual, 1e-8))
        law /= law.sum()
        np.testing.assert_allclose(log_row[r].exp().cpu().numpy(), law, rtol=2e-4, atol=1e-6)
    noise = gumbel_reference(keys, 4, Stream.DRAFT, vocab)
    assert torch.equal(sample.tokens, (log_row + noise).argmax(1))
    drawn = log_row.gather(1, sample.tokens[:, None])[:, 0]
    torch.testing.assert_close(sample.logq, drawn, rtol=1e-5, atol=1e-5)
    again = saguaro_sample(
        draft, sampling, keys, offset=4, scheme="geometric", target_logits=target, impl=impl
    )
    assert torch.equal(again.tokens, sample.tokens)


# -- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "vocab", "temperature", "scheme", "top_f"),
    [(1, 128256, 1.0, "C6", 32), (1, 128256, 0.7, "plain", 0), (8, 16384, 0.7, "top8", 8)],
    ids=("C6-top32", "plain", "batch"),
)
def test_one_read_and_two_launches(rows, vocab, temperature, scheme, top_f, device):
    logits, keys = make_rows(rows, vocab, torch.bfloat16, device=device), make_keys(rows, device)
    sampling = Sampling(torch.full((rows,), temperature, device=device))
    options = with_downweight({**SCHEMES[scheme], "top_f": top_f}, rows, device)
    with Meter() as meter:
        got = saguaro_sample(logits, sampling, keys, offset=0, impl="triton", **options)
    assert meter.launches == 2
    assert meter.syncs == 0
    assert not meter.wide_writes(vocab)
    assert meter.bytes_moved <= 1.05 * logits.nbytes
    want = saguaro_sample(logits, sampling, keys, offset=0, impl="reference", **options)
    assert_same_sample(got, want)


def test_filtered_rows_take_a_launch_more(device):
    vocab = 32768
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 3 + 9
    logits = logits.to(torch.bfloat16).to(device)
    ones = torch.ones(1, device=device)
    sampling = Sampling(ones, torch.full((1,), 50, dtype=torch.int32, device=device), ones * 0.9)
    keys = make_keys(1, device)
    with Meter() as meter:
        saguaro_sample(logits, sampling, keys, offset=0, impl="triton")
    assert meter.launches == 3
    assert meter.syncs == 0
    assert meter.bytes_read <= 4.15 * logits.nbytes


def test_options_are_checked(device):
    logits, ones = torch.zeros(2, 8, device=device), torch.ones(2, device=device)
    keys, sampling = make_keys(2, device), Sampling(ones)
    for options, error, match in (
        ({"scheme": "best"}, ConfigError, "scheme"),
        ({"downweight": ones}, ConfigError, "downweight"),
        ({"scheme": "downweight", "scale_f": 2}, ConfigError, "downweight"),
        ({"scheme": "geometric"}, ConfigError, "target_logits"),
        ({"top_f": MAX_LIST + 1}, ConfigError, "top_f"),
        ({"scheme": "downweight", "scale_f": -1, "downweight": ones}, ConfigError, "scale_f"),
        ({"scheme": "downweight", "downweight": ones[:1]}, ShapeError, "downweight"),
        ({"offset": ones}, DTypeError, "offset"),
    ):
        with pytest.raises(error, match=match):
            saguaro_sample(logits, sampling, keys, **{"offset": 0, **options})
    with pytest.raises(DTypeError, match="seed"):
        saguaro_sample(logits, sampling, Keys(ones, keys.base), offset=0)
    with pytest.raises(ShapeError, match="base"):
        saguaro_sample(logits, sampling, Keys(keys.seed, keys.base[:1]), offset=0)
