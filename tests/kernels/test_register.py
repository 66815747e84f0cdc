"""Kernels of rows as torch ops: schemas that tell the truth, no graph breaks, nothing that waits.

The same of every op's reference: test_torch_library.py.
"""

from __future__ import annotations

import pytest
import torch

from bench.traffic import Meter
from saguaro_kernels import (
    Keys,
    Sample,
    Sampling,
    row_stats,
    saguaro_sample,
    sample_workspace_size,
)
from saguaro_kernels.distribution import launch

ROWS, VOCAB = 3, 40


def _inputs(device, filtered: bool = True):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator).to(device)
    temperature = torch.tensor([1.0, 0.0, 0.6], device=device)
    sampling = Sampling(temperature)
    if filtered:
        k = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
        sampling = Sampling(temperature, k, temperature * 0 + 0.9, temperature * 0)
    row = torch.arange(ROWS, device=device)
    return logits, sampling, Keys(row, row + 5)


def _sample_arguments(device, impl):
    logits, sampling, keys = _inputs(device)
    out = saguaro_sample(logits, sampling, keys, offset=0, top_f=2, impl="reference")
    downweight = torch.full((ROWS,), 0.5, device=device)
    return (
        logits, *vars(sampling).values(), keys.seed, keys.base, None, 0, 0, 2, downweight, None,
        None, impl, *vars(out).values(), None,
    )  # fmt: skip


def _stats_arguments(device, impl):
    logits, sampling, _ = _inputs(device)
    out = row_stats(logits, sampling, impl="reference")
    return (logits, *vars(sampling).values(), None, impl, *vars(out).values())


def _geometric_arguments(device, impl):
    logits, sampling, _ = _inputs(device)
    stats = row_stats(logits, sampling, impl="reference")
    return (
        logits, sampling.temperature, stats.cutoff, stats.cutoff_id, stats.max, stats.log_sum, impl,
        logits.softmax(1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("row_stats", _stats_arguments),
        ("saguaro_sample", _sample_arguments),
        ("geometric_row", _geometric_arguments),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_opcheck(name, arguments, device):
    torch.library.opcheck(getattr(torch.ops.saguaro, name).default, arguments(device, "triton"))


def test_compiles_without_a_graph_break(device):
    logits, sampling, keys = _inputs(device)

    def step(logits, temperature, top_k, seed, base):
        given = Sampling(temperature, top_k)
        sample = saguaro_sample(
            logits * 1.0, given, Keys(seed, base), offset=1, top_f=4, impl="triton"
        )
        return sample.tokens + 1, sample.top_ids, row_stats(logits, given, impl="triton").lse

    arguments = (logits, sampling.temperature, sampling.top_k, keys.seed, keys.base)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


def test_a_steady_round_allocates_and_waits_for_nothing(monkeypatch, device):
    # What a captured graph needs: over 100 steps every buffer and every other argument is the same.
    logits, sampling, keys = _inputs(device)
    out = saguaro_sample(logits, sampling, keys, offset=0, top_f=2, impl="reference")
    workspace = torch.empty(
        sample_workspace_size(ROWS, VOCAB, 2, 0), dtype=torch.int64, device=device
    )
    seen = []

    def record(*plans):
        for kernel, grid, arguments in plans:
            seen[-1].append((kernel.fn.__name__, grid, sorted(map(_identity, arguments.items()))))

    monkeypatch.setattr(launch, "_run", record)
    for _ in range(100):
        seen.append([])
        saguaro_sample(
            logits, sampling, keys, offset=0, top_f=2, impl="triton", out=out, workspace=workspace
        )
    assert [name for name, *_ in seen[0]] == [
        "_row_cutoff_kernel", "_row_scan_kernel", "_row_merge_kernel",
    ]  # fmt: skip
    assert all(step == seen[0] for step in seen)
    monkeypatch.undo()
    with Meter() as meter:
        got = saguaro_sample(
            logits, sampling, keys, offset=0, top_f=2, impl="triton", out=out, workspace=workspace
        )
    assert isinstance(got, Sample)
    assert meter.launches == 3
    assert meter.syncs == 0
    assert not meter.wide_writes(VOCAB)


def _identity(item):
    name, value = item
    is_tensor = isinstance(value, torch.Tensor)
    return (name, (value.data_ptr(), value.shape) if is_tensor else value).__repr__()
