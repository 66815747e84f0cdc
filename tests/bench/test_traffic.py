"""The traffic meter against kernels and torch ops whose traffic is counted by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from bench.traffic import Meter

ROOT = Path(__file__).parents[2]


@triton.jit
def _scale_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = ids < size
    x = tl.load(x_ptr + ids, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + ids, x * 2, mask=live)


@triton.jit
def _count_kernel(x_ptr, sum_ptr, lock_ptr, size, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    live = ids < size
    tl.atomic_add(sum_ptr + ids * 0, tl.load(x_ptr + ids, mask=live), mask=live)
    tl.atomic_cas(lock_ptr, 0, 1)
    tl.store(lock_ptr + 1, tl.load(lock_ptr))


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def _helper_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    for step in range(3):
        tl.store(y_ptr + ids, _double(tl.load(x_ptr + step * BLOCK + ids)))


def test_masked_loads_and_stores() -> None:
    x = torch.ones(1000, dtype=torch.bfloat16)
    y = torch.empty(1000, dtype=torch.float32)
    with Meter() as meter:
        _scale_kernel[(4,)](x, y, 1000, BLOCK=256)
    assert torch.equal(y, torch.full((1000,), 2.0))
    assert (meter.launches, meter.syncs, meter.atomics) == (1, 0, 0)
    assert (meter.bytes_read, meter.bytes_written) == (1000 * 2, 1000 * 4)
    assert meter.kernels["_scale_kernel"].elements_written == 1000
    assert [event.name for event in meter.wide_writes(1000)] == ["_scale_kernel"]
    assert not meter.wide_writes(1001)


def test_atomics_are_a_read_and_a_write_per_live_lane() -> None:
    x = torch.arange(64, dtype=torch.int32)
    total, lock = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with Meter() as meter:
        _count_kernel[(1,)](x, total, lock, 50, BLOCK=64)
    assert total.item() == sum(range(50))
    assert lock.tolist() == [1, 1]
    assert meter.atomics == 50 + 1
    assert meter.bytes_read == 50 * 4 + 51 * 4 + 4
    assert meter.bytes_written == 51 * 4 + 4


def test_helpers_and_loops_and_several_launches() -> None:
    x, y = torch.ones(3 * 16), torch.empty(16)
    with Meter() as meter:
        _helper_kernel[(1,)](x, y, BLOCK=16)
        _helper_kernel[(1,)](x, y, BLOCK=16)
    assert list(meter.kernels) == ["_helper_kernel"]
    assert (meter.launches, meter.bytes_read, meter.bytes_written) == (2, 2 * 192, 2 * 192)


def test_nothing_is_counted_outside() -> None:
    x, y = torch.ones(48), torch.empty(16)
    meter = Meter()
    with meter:
        pass
    _helper_kernel[(1,)](x, y, BLOCK=16)
    x.sum().item()
    assert not meter.events
    with meter:
        x.sum()
    with meter:
        x.sum()
    assert meter.launches == 2


def test_torch_elementwise_reads_each_input_once() -> None:
    a, b = torch.ones(8, 100), torch.ones(100)
    with Meter() as meter:
        a + b
        a * a
    assert meter.launches == 2
    assert meter.kernels["add"].bytes_read == 800 * 4 + 100 * 4
    assert meter.kernels["mul"].bytes_read == 800 * 4
    assert meter.bytes_written == 2 * 800 * 4


def test_views_and_allocations_are_free_and_expanded_rows_count_once() -> None:
    a = torch.ones(1, 100)
    with Meter() as meter:
        view = a.expand(50, 100)[:, :60].t().unsqueeze(0).view(1, 60, 50)
        torch.empty(1000)
        torch.empty_like(a)
    assert not meter.events
    with Meter() as meter:
        view.sum()
    assert meter.bytes_read == 60 * 4


def test_in_place_and_out_arguments() -> None:
    a, b = torch.ones(100), torch.ones(100)
    with Meter() as meter:
        a.add_(b)
    assert (meter.bytes_read, meter.bytes_written) == (800, 400)
    with Meter() as meter:
        torch.add(a, 1, out=b)
    assert (meter.bytes_read, meter.bytes_written) == (400, 400)
    with Meter() as meter:
        a.fill_(3)
        a.copy_(b)
    assert (meter.bytes_read, meter.bytes_written) == (400, 800)


def test_gathers_and_scatters_touch_what_they_name() -> None:
    table, index = torch.ones(1000, 8), torch.tensor([3, 1, 4, 1])
    with Meter() as meter:
        table.index_select(0, index)
    assert (meter.bytes_read, meter.bytes_written) == (4 * 8 * 4 + 4 * 8, 4 * 8 * 4)
    with Meter() as meter:
        table[index]
    assert (meter.bytes_read, meter.bytes_written, meter.syncs) == (4 * 8 * 4 + 4 * 8, 128, 0)
    with Meter() as meter:
        table.index_copy_(0, index, torch.empty(4, 8))
    assert (meter.bytes_read, meter.bytes_written) == (4 * 8 * 4 + 4 * 8, 4 * 8 * 4)


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.to("cpu"),
        lambda x: x.__setitem__(x > 1, torch.ones(2)),
    ],
    ids=[
        *("item", "bool", "nonzero", "mask", "masked_select", "unique", "equal"),
        *("cpu", "tolist", "numpy", "to", "masked_store"),
    ],
)
def test_syncs_are_seen(action) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with Meter() as meter:
        action(x)
    assert meter.syncs == 1


def test_what_is_no_sync() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with Meter() as meter:
        x[x > 1] = 0.0
        x.to(x.device)
        x.to(torch.float16)
        torch.where(x > 1, x, 0.0)
        x.gather(0, x.argmax(keepdim=True))
        x.topk(2)
    assert meter.syncs == 0
    with Meter() as meter:
        torch.tensor([1, 2])
    assert (meter.uploads, meter.syncs) == (1, 0)


def test_registered_ops_are_looked_into() -> None:
    library = torch.library.Library("bench_meter_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: (x + 0.0) * 2, "CPU")
    with Meter() as meter:
        torch.ops.bench_meter_test.twice(torch.ones(10))
    assert list(meter.kernels) == ["ones", "add", "mul"]


def test_a_softmax_writes_a_vocabulary_row() -> None:
    logits = torch.zeros(2, 5000)
    with Meter() as meter:
        logits.softmax(-1)
        logits.argmax(-1)
    assert [event.name for event in meter.wide_writes(5000)] == ["_softmax"]
    assert "_softmax" in str(meter)


def test_without_the_interpreter_torch_ops_are_still_counted() -> None:
    program = (
        "import torch; from bench.traffic import Meter\n"
        "with Meter() as meter: torch.ones(4).sum().item()\n"
        "print(meter.launches, meter.bytes_read, meter.syncs)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["2", "20", "1"]
