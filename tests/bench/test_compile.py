"""Every kernel compiles without a GPU; the reader of binaries reads them right.

Here one case of each kernel for sm_90, and two for the other targets; all cases for all targets
take minutes and are `python -m bench compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import compile as compiling
from bench.compile import KNOWN_SPILLS, TARGETS, TUNED, Binary, _widest_load, discover, main

ROOT = Path(__file__).parents[2]


def _compile(*arguments: str, out: Path) -> tuple[int, list[dict], str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    result = subprocess.run(
        [sys.executable, "-m", "bench", "compile", "--json", str(out), *arguments],
        cwd=ROOT,
        # Set as in the test run: the command starts itself afresh without it.
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(out.read_text()) if out.exists() else []
    return result.returncode, rows, result.stdout + result.stderr


@pytest.mark.timeout(600)
def test_every_kernel_compiles(tmp_path) -> None:
    code, rows, output = _compile("--first", "--targets", "sm_90", out=tmp_path / "out.json")
    print(output)
    assert code == 0, output
    families = ("cache", "layout", "promote", "row_scan", "tree_attention", "verify")
    for family in families:
        assert any(family in row["name"] for row in rows), f"no case of {family}"
    # What streams the vocabulary does it 16 bytes at a time.
    families = ("row_scan", "verify-", "geometric_row", "predict_outcomes_scan")
    streams = [row for row in rows if row["name"].strip("_").startswith(families)]
    assert len(streams) >= 6
    assert all(row["load_bits"] == 128 for row in streams), output


def test_other_targets(tmp_path) -> None:
    """A kernel that multiplies matrices and one that competes for slots."""
    others = [target for target in TARGETS if target != TUNED]
    pattern = "^(tree_attention-verify-G3-D64-bf16|cache_insert)$"
    code, rows, output = _compile(
        pattern, "--targets", ",".join(others), "--jobs", "1", out=tmp_path / "out.json"
    )
    assert code == 0, output
    attention, insert = ([r for r in rows if r["name"].startswith(n)] for n in ("tree", "cache"))
    assert [row["target"] for row in attention] == [row["target"] for row in insert] == others
    assert all(row["tensor_core"] > 0 for row in attention), output


def test_registers_loads_products_spills_and_failures_are_read(tmp_path) -> None:
    arguments = ("--package", "toy_kernels", "--targets", "sm_90,gfx942", "--jobs", "1")
    code, rows, output = _compile(*arguments, out=tmp_path / "out.json")
    assert code == 1
    by_name = {(row["name"], row["target"]): row for row in rows}
    assert len(by_name) == 10
    for target in ("sm_90", "gfx942"):
        copy, product = by_name["copy", target], by_name["product", target]
        assert copy["load_bits"] == 128
        assert 0 < copy["registers"] < 64
        assert copy["tensor_core"] == copy["spill_bytes"] == 0
        assert product["tensor_core"] > 0
        assert product["shared_bytes"] > 0
        assert "power of 2" in by_name["wrong", target]["error"]
    assert by_name["copy-narrow", "sm_90"]["load_bits"] < 128
    assert by_name["spill", "sm_90"]["spill_bytes"] > 0
    spills = sum(row["spill_bytes"] > 0 for row in rows)
    assert f"2 failed to compile, {spills} spill unexpectedly, 0 as known" in output


def test_known_spills_are_named_and_no_others_pass(monkeypatch) -> None:
    cases = {case[0] for case in discover()}
    for triton, spills in KNOWN_SPILLS.items():
        for name, target in spills:
            monkeypatch.setattr(compiling, "version", lambda _, its=triton: f"{its}.1")
            assert name in cases and target in TARGETS and target != TUNED
            assert not Binary(name, target, spill_bytes=8).failed
            assert Binary(name, TUNED, spill_bytes=8).failed
            assert Binary(name, target, error="a reason").failed
            monkeypatch.setattr(compiling, "version", lambda _: "9.9.0")
            assert Binary(name, target, spill_bytes=8).failed


def test_a_name_that_matches_nothing_is_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # else it would start afresh
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert main(["nothing", "--package", "toy_kernels", "--targets", "sm_90", "--jobs", "1"]) == 2
    assert "no compile case" in capsys.readouterr().err


def test_widths_of_loads() -> None:
    assert _widest_load("LDG.E.128.CONSTANT R4, [R2] ;") == 128
    assert _widest_load("LDG.E.U16 R4 ;\n LDG.E R5 ;") == 32
    assert _widest_load("@P0 LDGSTS.E.BYPASS.128 [R1], [R2] ;") == 128
    assert _widest_load("LDG.E.U8 R4 ;") == 8
    assert _widest_load("STG.E.128 [R2], R4 ;") == 0
