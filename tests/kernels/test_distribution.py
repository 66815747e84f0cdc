"""Row distributions: the kept set, the normaliser and the log-probabilities, against exact laws."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import oracles
from bench.traffic import Meter
from saguaro_kernels import RowStats, Sampling, Status, log_prob_reference, row_stats
from saguaro_kernels.distribution import _row_log_prob, is_within_reference, row_stats_reference
from saguaro_kernels.distribution.launch import (
    CutoffConfig,
    ScanConfig,
    ScanOutputs,
    row_cutoff_launch,
    row_scan_launch,
)
from saguaro_kernels.distribution.reference import (
    exp_reference,
    largest_reference,
    log_sum_exp_reference,
)
from saguaro_kernels.errors import DTypeError, ShapeError

IMPLS = ("reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHAPES = [
    pytest.param(rows, vocab, dtype, id=f"R{rows}-V{vocab}-{NAMES[dtype]}")
    for rows, vocab, dtypes in (
        (0, 97, DTYPES[:1]),
        (3, 1, DTYPES[:1]),
        (4, 2, DTYPES),
        (12, 97, DTYPES),
        (2, 8192, DTYPES),
        (3, 8193, DTYPES[:1]),
        (2, 32003, DTYPES[1:2]),
        (1, 128256, DTYPES[1:2]),
    )
    for dtype in dtypes
]


def make_rows(rows: int, vocab: int, dtype=torch.float32, seed=0, device="cpu") -> torch.Tensor:
    """Logits as a model's, peaked, flat, tied, all equal, spread over +-1e4, half forbidden."""
    rng = np.random.default_rng(seed + 1000 * vocab)
    made = []
    for r in range(rows):
        z = rng.standard_normal(vocab) * 3 + 12
        kind = r % 7
        if kind == 1:
            z = z * 0.05
        elif kind == 2:
            z = np.round(z)
        elif kind == 3:
            z[:] = -4.5
        elif kind == 4:
            z = rng.uniform(-1e4, 1e4, vocab)
        elif kind == 5:
            z[rng.random(vocab) < 0.5] = -np.inf
            z[-1] = 11.0
        elif kind == 6:
            z[rng.integers(vocab)] = 40.0
        made.append(z)
    return torch.tensor(np.array(made).reshape(rows, vocab)).to(dtype).to(device)


def make_sampling(rows: int, vocab: int, device="cpu", seed=0) -> Sampling:
    """Every mixture of temperature and filters, 0 and off included."""
    rng = np.random.default_rng(seed)

    def pick(values, dtype):
        return torch.tensor(rng.choice(values, rows), dtype=dtype, device=device)

    return Sampling(
        pick([1.0, 0.7, 0.0, 1e-5, 1.5], torch.float32),
        pick([0, 1, 5, 50, max(1, vocab - 1), vocab + 7], torch.int32),
        pick([1.0, 0.9, 0.5, 0.999, 0.0], torch.float32),
        pick([0.0, 0.0, 0.05, 0.3], torch.float32),
    )


def row_of(sampling: Sampling, r: int) -> dict[str, float]:
    """Keyword arguments of oracles.row_law for row r."""
    given = {name: value for name, value in vars(sampling).items() if value is not None}
    return {name: value[r].item() for name, value in given.items()}


def assert_same_stats(got: RowStats, want: RowStats) -> None:
    for name in ("argmax", "cutoff", "cutoff_id", "status", "max"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("lse", "log_sum"):
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def log_prob(logits, sampling, stats, bias=None) -> torch.Tensor:
    z = logits.float() if bias is None else logits.float() + bias
    anchor = torch.where(stats.max == -torch.inf, 0.0, stats.max)
    return log_prob_reference(
        z, sampling.temperature, stats.cutoff, stats.cutoff_id, stats.log_sum, anchor=anchor
    )


def assert_law(got: np.ndarray, law: np.ndarray) -> None:
    """The same support (but for probabilities that float32 cannot hold) and probabilities."""
    assert not (got[law == 0] > 0).any()
    assert (got[law > 1e-30] > 0).all()
    np.testing.assert_allclose(got, law, rtol=3e-5, atol=1e-9)


@pytest.mark.parametrize(("rows", "vocab", "dtype"), SHAPES)
def test_kernel_matches_reference_and_law(rows, vocab, dtype, device):
    logits = make_rows(rows, vocab, dtype, device=device)
    sampling = make_sampling(rows, vocab, device)
    before = logits.clone()
    stats = row_stats(logits, sampling, impl="triton")
    assert_same_stats(stats, row_stats(logits, sampling, impl="reference"))
    assert torch.equal(logits, before)
    probs = log_prob(logits, sampling, stats).exp().cpu().numpy()
    for r in range(rows):
        law = oracles.row_law(logits[r].float().cpu().numpy(), **row_of(sampling, r))
        assert_law(probs[r], law)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("impl", IMPLS)
def test_mixtures_of_filters(impl, seed, device):
    # The reference against many laws; the kernel in small blocks, so that its searches cross tiles.
    rows, vocab = (84, 701) if impl == "reference" else (14, 201)
    dtype = DTYPES[seed % 3]
    logits = make_rows(rows, vocab, dtype, seed, device)
    sampling = make_sampling(rows, vocab, device, seed)
    bias = torch.tensor(np.random.default_rng(seed).choice([0.0, 1.5, -np.inf], (rows, vocab)))
    bias = bias.float().to(device) if seed % 2 else None
    want = row_stats_reference(logits, sampling, bias=bias)
    if impl == "reference":
        probs = log_prob(logits, sampling, want, bias).exp().cpu().numpy()
        for r in range(rows):
            z = logits[r].float().cpu().numpy()
            extra = {} if bias is None else {"bias": bias[r].cpu().numpy()}
            assert_law(probs[r], oracles.row_law(z, **row_of(sampling, r), **extra))
        return
    cutoff = torch.full((rows,), torch.nan, device=device)
    cutoff_id = torch.full((rows,), -99, device=device)
    row_cutoff_launch(
        logits[:, None], sampling, cutoff, cutoff_id, bias=None if bias is None else bias[:, None],
        config=CutoffConfig(block=64, log_bins=6, num_warps=4),
    )  # fmt: skip
    # Its bound may lie between two logits; the set is what counts. Greedy rows keep all here.
    z = logits.float() if bias is None else logits.float() + bias
    ids = torch.arange(vocab, device=device)
    kept = is_within_reference(z, ids, cutoff, cutoff_id) & (z > -torch.inf)
    expected = is_within_reference(z, ids, want.cutoff, want.cutoff_id) & (z > -torch.inf)
    drawn = (sampling.temperature > 0) & (want.status == Status.OK)
    assert torch.equal(kept[drawn], expected[drawn])


@pytest.mark.parametrize("impl", IMPLS)
def test_filters_apply_in_order(impl, device):
    # p = .4 .3 .2 .1: top-k 2 leaves .57 .43, so top-p .5 keeps one; top-p first would keep two.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]], device=device).log()
    one = torch.ones(1, device=device)
    k2 = torch.tensor([2], dtype=torch.int32, device=device)
    stats = row_stats(logits, Sampling(one, k2, one * 0.5), impl=impl)
    assert stats.cutoff_id.item() == 1
    stats = row_stats(logits, Sampling(one, None, one * 0.5), impl=impl)
    assert stats.cutoff_id.item() == 3
    # min-p is relative to the maximum of what is left, and to the temperature's probabilities.
    stats = row_stats(logits, Sampling(one * 0.5, None, None, one * 0.3), impl=impl)
    assert stats.cutoff_id.item() == 3  # (.3/.4)^2 = .56 stays, (.2/.4)^2 = .25 goes


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_go_to_the_lowest_ids(impl, device):
    vocab = 6000
    logits = torch.zeros(3, vocab, device=device)
    logits[0, [3000, 5999]] = 1.0
    logits[1] = -0.0
    logits[1, 10::2] = 0.0  # signed zeros are equal
    logits[2, :4000] = -7.0
    k = torch.tensor([5, 4100, 2500], dtype=torch.int32, device=device)
    stats = row_stats(logits, Sampling(torch.ones(3, device=device), k), impl=impl)
    assert stats.cutoff_id.tolist() == [2, 4099, 499]
    assert stats.cutoff.tolist() == [0.0, 0.0, -7.0]
    assert stats.argmax.tolist() == [3000, 0, 4000]
    kept = is_within_reference(logits, torch.arange(vocab, device=device), stats.cutoff,
                               stats.cutoff_id)  # fmt: skip
    assert kept.sum(1).tolist() == k.tolist()
    # Of 6000 equal ids a mass of .25 needs 1500, and no id more.
    p = torch.full((1,), 0.25, device=device)
    stats = row_stats(logits[1:2], Sampling(torch.ones(1, device=device), None, p), impl=impl)
    assert stats.cutoff_id.item() == 1499


@pytest.mark.parametrize("impl", IMPLS)
def test_broken_rows_are_marked_and_leave_their_neighbours_alone(impl, device):
    vocab = 2060  # two tiles
    good = make_rows(1, vocab, device=device)[0]
    logits = good.repeat(6, 1)
    logits[1, 2050] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    ones = torch.ones(6, device=device)
    for sampling in (
        Sampling(ones),
        Sampling(ones, torch.full((6,), 5, dtype=torch.int32, device=device), ones * 0.9),
        Sampling(ones * 0),
    ):
        stats = row_stats(logits, sampling, impl=impl)
        assert stats.status.tolist() == [0, Status.NAN, Status.NAN, Status.EMPTY, Status.NAN, 0]
        assert ((stats.argmax >= 0) & (stats.argmax < vocab)).all()
        assert stats.argmax[[3, 4]].tolist() == [0, 0]
        # The bad entries count as -inf.
        assert stats.argmax[1] == stats.argmax[0]
        assert not (torch.isnan(stats.lse) | torch.isnan(stats.log_sum)).any()
        for name, value in vars(stats).items():
            assert value[0] == value[5], name
        # A row without a law is one-hot on id 0.
        probs = log_prob(logits, sampling, stats).exp()
        assert torch.equal(probs[[3, 4]], torch.eye(vocab, device=device)[[0, 0]])


@pytest.mark.parametrize("impl", IMPLS)
def test_temperature_zero_is_one_hot_and_ranks_at_one(impl, device):
    logits = make_rows(3, 97, device=device)
    zero = torch.zeros(3, device=device)
    filters = {
        "top_k": torch.full((3,), 4, dtype=torch.int32, device=device),
        "top_p": torch.full((3,), 0.1, device=device),
    }
    for sampling in (Sampling(zero), Sampling(zero, **filters)):
        stats = row_stats(logits, sampling, impl=impl)
        assert torch.equal(stats.argmax, logits.argmax(1))
        assert torch.equal(stats.cutoff, logits.amax(1))
        assert torch.equal(stats.cutoff_id, stats.argmax)
        torch.testing.assert_close(stats.lse, logits.logsumexp(1), rtol=1e-6, atol=1e-5)
        probs = log_prob(logits, sampling, stats).exp()
        assert torch.equal(probs, torch.eye(97, device=device)[stats.argmax])


@pytest.mark.parametrize("impl", IMPLS)
def test_tiny_temperatures(impl, device):
    # Dividing first would give inf - inf; and lse = 6e9 leaves no digit, the anchored form all.
    logits = torch.full((4, 300), -6e4, dtype=torch.float16, device=device)
    logits[:, 7], logits[1:, 9] = 6e4, 6e4
    logits[3] = 30.0
    temperature = torch.tensor([1e-5, 1e-5, 1.0, 1e-12], device=device)
    stats = row_stats(logits, Sampling(temperature), impl=impl)
    assert torch.equal(stats.status, torch.zeros_like(stats.status))
    probs = log_prob(logits, Sampling(temperature), stats).exp()
    assert probs[0, 7] == 1
    torch.testing.assert_close(probs[1:3, [7, 9]], torch.full((2, 2), 0.5, device=device))
    torch.testing.assert_close(probs.sum(1), torch.ones(4, device=device))
    near = torch.tensor([[30.0, 30.0 - 2e-6, 29.0]], device=device)
    sampling = Sampling(torch.full((1,), 1e-5, device=device))
    stats = row_stats(near, sampling, impl=impl)
    law = oracles.row_law(near[0].cpu().numpy(), 1e-5)
    assert_law(log_prob(near, sampling, stats).exp()[0].cpu().numpy(), law)


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_are_written_once_and_nothing_else(impl, device):
    rows, pad = 5, 3
    logits, sampling = make_rows(rows, 97, device=device), make_sampling(rows, 97, device)
    want = row_stats_reference(logits, sampling)
    poison = {
        name: torch.full((rows + pad,), -77 if not v.is_floating_point() else torch.nan).to(v)
        for name, v in vars(want).items()
    }
    out = RowStats(**{name: v[:rows] for name, v in poison.items()})
    assert row_stats(logits, sampling, impl=impl, out=out) is out
    assert_same_stats(out, want)
    for name, value in poison.items():
        tail = value[rows:]
        assert (torch.isnan(tail) if tail.is_floating_point() else tail == -77).all(), name


def test_a_row_does_not_depend_on_its_batch(device):
    logits, sampling = make_rows(7, 2060, device=device), make_sampling(7, 2060, device)
    stats = row_stats(logits, sampling, impl="triton")
    order = torch.tensor([3, 6, 0, 0, 5, 1, 2, 4], device=device)
    shuffled = Sampling(*(value[order] for value in vars(sampling).values()))
    again = row_stats(logits[order], shuffled, impl="triton")
    for name, value in vars(stats).items():
        assert torch.equal(value[order], getattr(again, name)), name


@pytest.mark.parametrize("config", [ScanConfig(256, 3, 4, 4), ScanConfig(8192, 64, 8, 4)],
                         ids=("small", "large"))  # fmt: skip
def test_a_row_does_not_depend_on_the_blocks(config, device):
    logits, sampling = make_rows(7, 2060, device=device), make_sampling(7, 2060, device)
    want = row_stats(logits, sampling, impl="triton")
    out = RowStats(**{name: torch.empty_like(value) for name, value in vars(want).items()})
    row_scan_launch(
        logits, sampling,
        ScanOutputs(out.argmax, out.lse, out.cutoff, out.cutoff_id, out.status, max=out.max,
                    log_sum=out.log_sum),
        config=config,
    )  # fmt: skip
    assert_same_stats(out, want)


@pytest.mark.parametrize(("rows", "padded"), [(4, 512), (4, 515)], ids=("aligned", "unaligned"))
def test_padded_rows_and_expanded_sampling(rows, padded, device):
    # The tail of a padded vocabulary is larger than any logit of the row, and is never seen.
    wide = torch.full((rows, padded), 1e4, device=device)
    wide[:, :500] = make_rows(rows, 500, device=device)
    sampling = Sampling(torch.full((1,), 0.8, device=device).expand(rows))
    want = row_stats_reference(wide[:, :500].contiguous(), sampling)
    for impl in IMPLS:
        assert_same_stats(row_stats(wide[:, :500], sampling, impl=impl), want)


def lazily_mapped(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that is reserved but not backed until it is touched."""
    size = elements * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


def test_row_offsets_past_two_to_the_31():
    vocab, stride = 200, 2**31 + 64
    memory = lazily_mapped(2 * stride, torch.bfloat16)
    logits = memory.as_strided((2, vocab), (stride, 1))
    rows = make_rows(2, vocab, torch.bfloat16)
    logits.copy_(rows)
    sampling = Sampling(torch.ones(2), torch.full((2,), 9, dtype=torch.int32))
    for view in (logits, memory[8:].as_strided((2, vocab), (stride - 8, 1))):
        view.copy_(rows)
        got = row_stats(view, sampling, impl="triton")
        assert_same_stats(got, row_stats_reference(rows, sampling))


@triton.jit
def _log_prob_kernel(
    out_ptr, logits_ptr, temperature_ptr, anchor_ptr, lse_ptr, cutoff_ptr, cutoff_id_ptr,
    scale_logit_ptr, scale_id_ptr, log_scale_ptr, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + r * vocab + ids, mask=ids < vocab, other=float("-inf"))
    log_q = _row_log_prob(
        z, ids, tl.load(temperature_ptr + r), tl.load(anchor_ptr + r), tl.load(lse_ptr + r),
        tl.load(cutoff_ptr + r), tl.load(cutoff_id_ptr + r), tl.load(scale_logit_ptr + r),
        tl.load(scale_id_ptr + r), tl.load(log_scale_ptr + r),
    )  # fmt: skip
    tl.store(out_ptr + r * vocab + ids, log_q, mask=ids < vocab)


def test_log_prob_helper_matches_the_reference(device):
    rows, vocab = 8, 97
    logits, sampling = make_rows(rows, vocab, device=device), make_sampling(rows, vocab, device)
    logits[6] = -torch.inf
    stats = row_stats_reference(logits, sampling)
    anchor = torch.where(stats.max == -torch.inf, 0.0, stats.max)
    ranked, order = largest_reference(logits, 3)
    downweight = torch.full((rows,), 0.25, device=device)
    downweight[2] = 0.0
    scale_logit, scale_id = ranked[:, 2].contiguous(), order[:, 2].contiguous()
    out = torch.full_like(logits, torch.nan)
    _log_prob_kernel[(rows,)](
        out, logits, sampling.temperature, anchor, stats.log_sum, stats.cutoff, stats.cutoff_id,
        scale_logit, scale_id, downweight.log(), vocab, 128,
    )  # fmt: skip
    want = log_prob_reference(
        logits, sampling.temperature, stats.cutoff, stats.cutoff_id, stats.log_sum, scale_logit,
        scale_id, downweight, anchor=anchor,
    )  # fmt: skip
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    # Of gathered ids, and with lse in place of the anchor where the temperature allows it.
    ids = torch.randint(vocab, (rows, 5), device=device)
    gathered = log_prob_reference(
        logits.gather(1, ids), sampling.temperature, stats.cutoff, stats.cutoff_id, stats.lse,
        scale_logit, scale_id, downweight, ids=ids,
    )  # fmt: skip
    warm = sampling.temperature > 0.1
    torch.testing.assert_close(gathered[warm], want.gather(1, ids)[warm], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}],
                         ids=("k", "p", "kp"))  # fmt: skip
def test_reads_of_a_model_like_row(filters, dtype, device):
    # One read for row_stats itself, at most 3 more for the cut: 2 or 3 passes, and a tie's search.
    vocab = 32768
    logits = (torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 3 + 9).to(dtype)
    types = {"top_k": torch.int32, "top_p": torch.float32}
    given = {k: torch.tensor([v], dtype=types[k], device=device) for k, v in filters.items()}
    sampling = Sampling(torch.ones(1, device=device), **given)
    logits = logits.to(device)
    with Meter() as meter:
        row_stats(logits, sampling, impl="triton")
    assert meter.launches == 3
    assert meter.syncs == 0
    reads = meter.bytes_read / (vocab * dtype.itemsize)
    # A tile is read twice to place the first histogram.
    assert reads <= 4 + 2048 / vocab + 0.05, reads


def test_reads_in_the_worst_case(device):
    # Logits of every exponent, and ties where the mass is: each pass gains 8 bits and no more.
    rng = np.random.default_rng(0)
    vocab = 4096
    rows = np.stack((
        np.exp(rng.uniform(-80, 80, vocab)) * rng.choice([-1, 1], vocab),
        -np.exp(rng.uniform(-30, 9, vocab)),
        np.repeat(rng.uniform(-3e4, -1e4, 8), vocab // 8),
    ))  # fmt: skip
    for row, temperature, k, p in zip(
        rows, (1.0, 50.0, 3000.0), (2000, 3000, 3800), (0.99999, 0.6, 0.77), strict=True
    ):
        logits = torch.tensor(row[None], dtype=torch.float32, device=device)
        sampling = Sampling(
            torch.full((1,), temperature, device=device),
            torch.full((1,), k, dtype=torch.int32, device=device),
            torch.full((1,), p, device=device),
        )
        with Meter() as meter:
            got = row_stats(logits, sampling, impl="triton")
        assert meter.bytes_read / (vocab * 4) <= 10
        assert_same_stats(got, row_stats_reference(logits, sampling))


def test_the_mass_is_reached_where_values_are_far_apart(device):
    # The bin of the last kept id reaches the goal only if its id lies high in it, and the next
    # value is far below: narrowing the bracket to both would never end.
    logits = torch.full((2, 600), -78.0, device=device)
    logits[:, 5], logits[:, 300] = -76.0, -77.0
    logits[1, 200:] -= 0.5 * torch.arange(400, device=device)
    sampling = Sampling(
        torch.full((2,), 2.0, device=device),
        torch.tensor([2, 599], dtype=torch.int32, device=device),
        torch.tensor([0.9999, 0.0249], device=device),
    )
    with Meter() as meter:
        got = row_stats(logits, sampling, impl="triton")
    assert_same_stats(got, row_stats_reference(logits, sampling))
    assert meter.bytes_read / logits.nbytes <= 9


def test_unfiltered_rows_are_read_once(device):
    vocab = 128256
    logits = make_rows(1, vocab, torch.bfloat16, device=device)
    for temperature in (1.0, 0.7, 0.0):
        sampling = Sampling(torch.full((1,), temperature, device=device))
        with Meter() as meter:
            row_stats(logits, sampling, impl="triton")
        assert meter.launches == 2
        assert meter.syncs == 0
        assert not meter.wide_writes(vocab)
        assert meter.bytes_moved <= 1.02 * logits.nbytes


def test_arguments_are_checked(device):
    logits, ones = torch.zeros(2, 8, device=device), torch.ones(2, device=device)
    with pytest.raises(ShapeError, match=r"logits: got shape \[8\]"):
        row_stats(logits[0], Sampling(ones))
    with pytest.raises(ShapeError, match="V >= 1"):
        row_stats(logits[:, :0], Sampling(ones))
    with pytest.raises(ShapeError, match="contiguous"):
        row_stats(torch.zeros(8, 2, device=device).t(), Sampling(ones))
    with pytest.raises(ShapeError, match="temperature"):
        row_stats(logits, Sampling(ones[:1]))
    with pytest.raises(DTypeError, match="top_k"):
        row_stats(logits, Sampling(ones, ones))
    with pytest.raises(DTypeError, match="logits"):
        row_stats(logits.long(), Sampling(ones))
    with pytest.raises(ShapeError, match="bias"):
        row_stats(logits, Sampling(ones), bias=logits[:, :4])
    # What holds nothing has no layout.
    nothing = logits.as_strided((0, 8), (1, 2))
    assert row_stats(nothing, Sampling(ones[:0])).lse.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exponentials_that_underflow(dtype):
    # torch's own exp takes 100 times as long for these, so the reference keeps away from it.
    x = torch.tensor([[0.0, -1.0, -80.0, -200.0, -1e30, -torch.inf]], dtype=dtype)
    torch.testing.assert_close(exp_reference(x), x.exp())
    assert exp_reference(x)[0, -2:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(log_sum_exp_reference(x - 50), x.logsumexp(-1) - 50)
    assert log_sum_exp_reference(x[:, -1:]).item() == -torch.inf
