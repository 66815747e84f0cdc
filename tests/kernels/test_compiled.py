"""What the compiler makes of the vocabulary kernels; a process of its own, not interpreted.

Registers, spills and load widths of every kernel on every target: `python -m bench compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = {
    "_row_cutoff_kernel", "_row_scan_kernel", "_row_merge_kernel", "_verify_stats_kernel",
    "_verify_mass_kernel", "_verify_extra_kernel", "_residual_stats_kernel", "_residual_kernel",
    "_geometric_row_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compiled.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_rows_are_addressed_in_64_bits(compiled) -> None:
    """Every step along the logits, and the products it comes from."""
    assert {row["kernel"] for row in compiled["addresses"]} == KERNELS
    for row in compiled["addresses"]:
        assert row["steps"] and set(row["steps"]) == {"i64"}, row
        assert not row["narrow"], row


def test_integers_are_not_specialised_on(compiled) -> None:
    for row in compiled["addresses"]:
        assert row["specialised"] == [], row


def test_atomics_count_only(compiled) -> None:
    """Sums of floats are ordered, so that two runs agree."""
    assert any(row["atomics"] for row in compiled["addresses"])
    for row in compiled["addresses"]:
        assert set(row["atomics"]) <= {"add"}, row


def test_launches_are_on_the_tensors_device(compiled) -> None:
    for row in compiled["binaries"]:
        assert row["devices"] == ["cpu"], row


def test_few_binaries_for_all_batches_and_lengths(compiled) -> None:
    """B of 1 to 64, K of 1 to 8, any V, and slices wherever they begin."""
    assert {row["op"] for row in compiled["binaries"]} >= {
        "row_stats", "saguaro_sample", "residual", "verify.token", "verify.block", "verify.coupled",
    }  # fmt: skip
    for row in compiled["binaries"]:
        assert 2 <= row["total"] <= 6, row
        assert row["added"] == 0, row
    # Keys are told apart: block needs a kernel that token does not.
    totals = {(row["op"], row["filtered"]): set(row["kernels"]) for row in compiled["binaries"]}
    assert totals["verify.block", False] - totals["verify.token", False] == {"_verify_mass_kernel"}
    assert totals["row_stats", True] - totals["row_stats", False] == {"_row_cutoff_kernel"}
