"""Gates: what is red, broken or over its limit is not reported as a result, and fails the run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import __main__ as command
from bench import measure, run
from bench.registry import CASES
from bench.systems import SYSTEM, System


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_process", lambda name, its: 0)


def _run(*arguments: str) -> int:
    return command.main([*arguments])


def test_a_red_gate_prints_no_ratio_and_fails(capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "gate", lambda node: f"{node} is red: 1 failed")
    monkeypatch.setattr(measure, "_pytest", lambda nodes: SimpleNamespace(returncode=1))
    assert _run("promote_branch", "--quick") == 1
    out = capsys.readouterr().out
    assert "RED promote_branch" in out
    assert "  ours  " not in out


def test_the_gate_is_the_named_test(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test_bad(): assert False\n")
    assert measure.gate("test_good.py::test_good") == ""
    assert "red" in measure.gate("test_bad.py")
    assert "no test_none.py" in measure.gate("test_none.py")
    assert list(measure.gates(["test_good.py", "test_bad.py"])) == ["test_bad.py"]


def test_a_broken_kernel_fails_the_run(capsys, monkeypatch) -> None:
    def broken(inputs: SimpleNamespace) -> None:
        raise RuntimeError("illegal access")

    case = dataclasses.replace(CASES["promote_branch"], name="broken", providers={"ours": broken})
    monkeypatch.setitem(CASES, "broken", case)
    assert _run("broken", "--no-gate", "--quick") == 1
    assert "illegal access" in capsys.readouterr().out


def test_a_missed_bound_fails_the_run(capsys, monkeypatch) -> None:
    case = dataclasses.replace(CASES["promote_branch"], name="greedy_bytes", limit=0.5)
    monkeypatch.setitem(CASES, "greedy_bytes", case)
    shape = "B=1,M=4,K=2,layers=2,Hkv=2,D=32"
    assert _run("greedy_bytes", "--no-gate", "--shapes", shape, "--providers", "ours") == 1
    out = capsys.readouterr().out
    assert "NO" in out
    assert "FAILED greedy_bytes B1-M4-K2-layers2-Hkv2-D32: ours: ratio to bound 1.05 > 0.5" in out


def test_every_case_names_a_gate_that_exists(capsys) -> None:
    assert _run("--list") == 0
    listed = capsys.readouterr().out
    for case in CASES.values():
        assert (measure.ROOT / case.gate.partition("::")[0]).exists(), case.gate
        assert case.name in listed
        assert case.quick <= len(case.shapes)


def test_a_system_case_waits_for_its_gate(capsys, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(System, "check", lambda self, rest: None)
    case = System("toy", "a toy", gate="tests/test_toy.py::test_red")
    monkeypatch.setattr(System, "main", lambda self, rest: ran.append(list(rest)) or 0)
    monkeypatch.setattr(measure, "_pytest", lambda nodes: SimpleNamespace(returncode=1, stdout=""))
    assert run.system(case, ["--quick"]) == 1
    assert "RED toy" in capsys.readouterr().out and not ran
    assert run.system(case, ["--quick", "--no-gate"]) == 0
    assert ran == [["--quick"]]


@pytest.mark.parametrize("name", [name for name, case in SYSTEM.items() if case.gate])
def test_wrong_usage_does_not_wait_for_the_gate(name: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "gates", lambda nodes: pytest.fail("ran"))
    for line, code in ((["--help"], 0), (["--nonsense"], 2)):
        with pytest.raises(SystemExit) as ended:
            run.system(SYSTEM[name], line)
        assert ended.value.code == code
    assert "--json" in capsys.readouterr().out


@pytest.mark.timeout(600)
def test_a_kernel_that_is_wrong_is_not_measured_and_fails_the_run(tmp_path) -> None:
    """In a copy of the repository whose kernel of one op forgets a value."""
    for name in ("bench", "tests", "saguaro_kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(measure.ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(measure.ROOT / name, tmp_path)
    (tmp_path / "saguaro_runtime").symlink_to(measure.ROOT / "saguaro_runtime")
    kernel = tmp_path / "saguaro_kernels" / "outcomes" / "fan_out.py"
    right = kernel.read_text()
    wrong = right.replace("whole.to(tl.int32) + extra", "whole.to(tl.int32) - extra")
    assert wrong != right
    kernel.write_text(wrong)
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "allocate_fan_out", "--quick"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "RED allocate_fan_out: not measured" in done.stdout
    assert "1 failed" in done.stdout and "  ours  " not in done.stdout
