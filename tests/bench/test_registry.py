"""The registry, its gate and its tables, on small shapes and on a case made to fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from bench import __main__ as command
from bench import cases, measure, report, run
from bench.compile import discover
from bench.registry import CASES, Case, register, select, shape_id
from bench.systems import SYSTEM

SMALL = {
    "row_stats": {"R": 2, "V": 4096, "T": 1.0},
    "saguaro_sample": {"R": 2, "V": 4096, "T": 0.7, "F": 4},
    "verify.token": {"B": 1, "K": 2, "V": 4096, "T": 1.0, "rule": "token"},
    "verify.block": {"B": 1, "K": 2, "V": 4096, "T": 1.0, "rule": "block"},
    "verify.block-close": {"B": 1, "K": 2, "V": 4096, "T": 1.0, "rule": "block", "inputs": "close"},
    "verify.hsd": {"B": 1, "K": 2, "V": 4096, "T": 1.0, "rule": "hsd"},
    "verify.coupled": {"B": 1, "K": 2, "V": 4096, "T": 1.0, "rule": "coupled"},
    "verify.greedy": {"B": 1, "K": 2, "V": 4096, "T": 0.0, "rule": "greedy"},
    "predict_outcomes": {"B": 1, "K": 2, "V": 4096, "M": 6, "T": 1.0},
    "tree_attention": {"B": 1, "M": 4, "K": 2, "L": 64, "Hq": 4, "Hkv": 2, "D": 32},
    "tree_attention.chain": {"B": 1, "K": 2, "L": 64, "Hq": 4, "Hkv": 2, "D": 32},
    "promote_branch": {"B": 2, "M": 4, "K": 2, "layers": 2, "Hkv": 2, "D": 32},
    "promote_pages": {"B": 2, "M": 4, "K": 2},
    "cache_lookup": {"B": 4, "M": 4, "K": 2},
    "cache_insert": {"B": 4, "M": 4, "K": 2},
    "residual": {"R": 2, "V": 4096, "T": 0.7},
    "sample_geometric": {"R": 2, "V": 4096, "T": 0.7},
    "chain_layout": {"B": 2, "K": 2},
    "tree_layout": {"B": 2, "M": 4, "K": 2},
    "ngram_propose": {"B": 2, "N": 64, "K": 3},
    "allocate_fan_out": {"B": 2, "K": 3, "M": 8},
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What would be compiled beside the traffic; tests/bench/test_compile.py does compile."""
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(run, "_process", lambda name, its: asked.append((name, list(its))) or 0)
    return asked


def _run(*arguments: str) -> int:
    return command.main([*arguments])


def test_every_case_has_a_small_shape_here() -> None:
    assert set(SMALL) == set(CASES)


@pytest.mark.parametrize("name", list(CASES))
def test_ours_runs_in_few_launches_without_syncs_or_wide_writes(name: str) -> None:
    case = CASES[name]
    (ours,) = measure.measure_traffic(case, SMALL[name], case.dtype, "H100 SXM", ["ours"])
    # Of rows so short it is not the rows that are moved, so the ratio says nothing.
    assert [part for part in ours.note.split("; ") if part and "ratio" not in part] == []
    assert ours.launches is not None and ours.launches <= case.launches
    assert ours.syncs == 0
    assert not ours.wide_writes or name in ("residual", "sample_geometric")
    assert ours.bytes_read and ours.bound_bytes > 0


@pytest.mark.parametrize("name", list(CASES))
def test_ours_equals_the_torch_provider(name: str) -> None:
    case = CASES[name]
    results = []
    for provider in ("ours", "torch"):
        inputs = case.inputs(SMALL[name], case.dtype, "cpu")
        results.append(measure.outputs(inputs, case.providers[provider](inputs)))
    for ours, torch_ in zip(*results, strict=True):
        if ours.dtype.is_floating_point:
            assert torch.allclose(ours.float(), torch_.float(), rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(ours, torch_)


def test_hsd_is_block() -> None:
    """The gate of verify.hsd: the same verdicts, out of the same bytes."""
    rows = {}
    for name in ("hsd", "block"):
        case, shape = (
            CASES[f"verify.{name}"],
            {**SMALL["verify.block"], "B": 2, "V": 1024, "rule": name},
        )
        inputs = case.inputs(shape, torch.float32, "cpu")
        verdict = measure.outputs(inputs, case.providers["ours"](inputs))
        (result,) = measure.measure_traffic(case, shape, torch.float32, "H100 SXM", ["ours"])
        rows[name] = verdict, result.launches, result.bytes_read, result.bytes_written
    assert all(torch.equal(a, b) for a, b in zip(rows["hsd"][0], rows["block"][0], strict=True))
    assert rows["hsd"][1:] == rows["block"][1:]
    theory = (measure.ROOT / "docs" / "theory.md").read_text()
    assert '**"hsd" is block.**' in theory.partition("## The rules")[2]


def test_every_case_knows_its_binaries() -> None:
    names = [case[0] for case in discover()]
    for case in CASES.values():
        assert any(re.search(case.binaries, name) for name in names) and case.binaries, case.name


def test_the_tables_are_printed_and_written(tmp_path, capsys, monkeypatch, compiled) -> None:
    monkeypatch.setattr(measure, "gates", lambda nodes: {})
    files = {kind: tmp_path / kind / f"out.{kind}" for kind in ("csv", "json", "png")}
    code = _run(
        "promote_branch",
        *("--shapes", "B=1,M=4,K=2,layers=2,Hkv=2,D=32"),
        *("--csv", str(files["csv"]), "--json", str(files["json"]), "--plot", str(files["png"])),
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "MB bound" in out and "Counted: " in out and "prediction, nothing was timed" in out
    line = [CASES["promote_branch"].binaries, "--targets", "sm_90", "--jobs", "1"]
    assert compiled == [("compile", line)] and "binaries for sm_90" in out
    results = report.read_json(files["json"])
    assert [r.provider for r in results] == ["ours", "torch"]
    assert results[0].p50_us is None
    assert {"torch", "triton", "commit", "date", "processor", "cores"} <= set(
        json.loads(files["json"].read_text())["machine"]
    )
    assert files["csv"].read_text().count("\n") == 3
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_names_and_shapes() -> None:
    assert [c.name for c in select("verify")] == [n for n in CASES if n.startswith("verify.")]
    assert select("all") == list(CASES.values())
    assert select("nothing") == []
    both = [c.name for c in select("verify.token,row_stats")]
    assert both == ["row_stats", "verify.token"]
    assert _run("nothing") == 2
    parsed = run.parse_shape("B=1,T=0.7,rule=token")
    assert parsed == {"B": 1, "T": 0.7, "rule": "token"}
    assert shape_id(parsed) == "B1-T0.7-token"
    with pytest.raises(ValueError, match="twice"):
        register(CASES["row_stats"])
    with pytest.raises(ValueError, match="ours"):
        Case("x", "", "", (), cases.rows_inputs, {}, lambda s, size: 1)


def test_shapes_are_filled_in_from_the_case(tmp_path) -> None:
    out = tmp_path / "out.json"
    line = ["--shapes", "B=2,M=8", "--shapes", "K=3", "--dtype", "float16", "--providers", "ours"]
    assert _run("allocate_fan_out", *line, "--no-gate", "--json", str(out)) == 0
    found = report.read_json(out)
    assert [(r.shape, r.dtype) for r in found] == [
        ("B2-K7-M8", "float16"), ("B8-K3-M24", "float16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["nothing"], "no case 'nothing'"),
        (["row_stats", "--shapes", "B=1"], "row_stats has no 'B'; want R=8,V=128256,T=1.0"),
        (["verify", "--shapes", "nonsense"], "has no 'nonsense'"),
        (["row_stats", "--shapes", "R=many"], "R=many, want one like R=8"),
        (["row_stats", "--shapes", "R=0"], "R=0, want one like R=8"),
        (["row_stats", "--shapes", "V=1.5"], "V=1.5, want one like V=128256"),
        (["row_stats", "--providers", "ours,nobody"], "no nobody here; want some of ours, torch"),
        (["row_stats", "--machine", "abacus"], "want one of H100 SXM"),
        (["row_stats", "--base", "no-such-commit"], "no commit of that name here"),
        (["all", "--quick", "--machine", "abacus"], "want one of H100 SXM"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(line, said, capsys, monkeypatch) -> None:
    monkeypatch.chdir(measure.ROOT)
    monkeypatch.setattr(measure, "gates", lambda nodes: pytest.fail("ran"))
    assert _run(*line) == 2
    assert said in capsys.readouterr().err


def test_options_without_a_name_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        _run("--quick")
    assert "want a case, a group or all" in capsys.readouterr().err
    assert _run() == 0
    assert "allocate_fan_out" in capsys.readouterr().out


def test_a_group_is_measured_and_compared_with_a_commit(capsys, monkeypatch) -> None:
    """--base: the same shapes there, ours alone."""
    asked = []

    def against(base: str, line: list[str]) -> list[report.Result]:
        asked.append((base, line))
        return [report.Result("chain_layout", "ours", "B2-K2", "bfloat16", 10, ratio=4.0)]

    monkeypatch.setattr(measure, "against", against)
    monkeypatch.setattr(measure, "is_commit", lambda name: True)
    line = ["chain_layout", "--shapes", "B=2,K=2", "--no-gate", "--quick"]
    assert _run(*line, "--base", "older") == 0
    wanted = ["chain_layout", "--quick", "--providers", "ours", "--shapes", "B=2,K=2"]
    assert asked == [("older", wanted)]
    (row,) = [its for its in capsys.readouterr().out.splitlines() if "bytes / bound" in its]
    assert row.split()[5] == "4.00" and row.split()[-1] == "NO"


def _pytest_bench(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    line = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", *options]
    return subprocess.run(
        line, cwd=measure.ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_cases_run_under_pytest_benchmark() -> None:
    done = _pytest_bench("-k", "allocate_fan_out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_op[allocate_fan_out-B8-K7-M24-torch]" in done.stdout and "Median" in done.stdout


def test_without_pytest_benchmark_it_says_what_to_install() -> None:
    done = _pytest_bench("-p", "no:benchmark")
    assert done.returncode == 4
    assert "pip install pytest-benchmark" in done.stderr


def test_an_installed_copy_is_not_told_of_tests_it_lacks(capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "ROOT", measure.ROOT / "nowhere")
    assert _run("--list") == 0
    listed = capsys.readouterr().out
    assert "test_" not in listed and "README" not in listed
    assert _run("promote_branch", "--shapes", "B=1,M=4,K=2,layers=2,Hkv=2,D=32") == 0
    assert "Gating tests were not run" in capsys.readouterr().out
    monkeypatch.setattr(run, "kernels", lambda options: 0)
    assert _run("all", "--quick") == 0
    done = capsys.readouterr().out
    assert "bench paper:" in done and "bench readme" not in done


def test_every_op_and_every_command_has_its_entry(capsys) -> None:
    _run("--list")
    listed = capsys.readouterr().out
    ops = {
        name.removeprefix("saguaro::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("saguaro::")
    }
    covered = {name.partition(".")[0] for name in CASES} | {"geometric_row"}
    assert ops <= covered and "sample_geometric" in covered
    for name, system in SYSTEM.items():
        assert name in listed and name in (command.__doc__ or "")
        assert importlib.util.find_spec(f"bench.{name}") is not None
        assert not system.gate or (measure.ROOT / system.gate.partition("::")[0]).exists()


def test_everything_fails_where_one_part_does(capsys, monkeypatch) -> None:
    """All parts run, and the last table says which failed."""
    asked = []
    monkeypatch.setattr(run, "kernels", lambda options: 0)
    monkeypatch.setattr(
        run, "_process", lambda name, its: asked.append((name, its)) or failing[name]
    )
    failing = {"compile": 0, "paper": 0}
    monkeypatch.setattr(run, "SYSTEM", {name: SYSTEM[name] for name in [*failing, "gpu"]})
    assert _run("all", "--quick", "--no-gate") == 0
    assert asked == [
        ("compile", [*(SYSTEM["compile"].quick or ()), "--no-gate"]),
        ("paper", ["--no-gate"]),
    ]
    failing["compile"] = 1
    assert _run("all") == 1
    last = capsys.readouterr().out.rpartition("== what came of it")[2]
    assert "FAILED" in last and "kernel cases" in last and "CPU seconds" in last
    assert "Failed: compile; why is under its heading" in last
    monkeypatch.setattr(run, "kernels", lambda options: 2)
    assert _run("all") == 2


def test_the_peers_figures_are_consistent() -> None:
    data = report.peers()
    for peer in data["verify"]:
        moved = peer["read_mb"] + peer["written_mb"]
        assert moved / data["bound_mb"][peer["rule"]] == pytest.approx(peer["ratio"], rel=0.01)
    vocab = data["shape"]["V"] * 2 / 1e6
    rows = {"token": 9, "block": 15, "greedy": 7}
    for rule, count in rows.items():
        assert data["bound_mb"][rule] == pytest.approx(count * vocab, rel=0.005)


def test_ours_stands_beside_the_peers() -> None:
    shape = "B1-K7-V128256-T1.0-token"
    ours = report.Result("verify.token", "ours", shape, "bfloat16", 2308608, 2, 2330000, 100, 0)
    table = report.peer_table([ours]).splitlines()
    assert len(table) == 1 + 1 + len(report.peers()["verify"])
    assert "saguaro" in table[1]
    assert sum("published" in line for line in table) == len(report.peers()["verify"])


def test_the_base_commit_is_measured_in_a_tree_of_its_own(tmp_path, monkeypatch) -> None:
    repository = tmp_path / "repository"
    package = repository / "bench"
    package.mkdir(parents=True)
    result = report.Result("toy", "ours", "B1", "float32", 10, ratio=2.0)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys, json\n"
        "out = sys.argv[sys.argv.index('--json') + 1]\n"
        f"json.dump({{'results': [{dataclasses.asdict(result)!r}]}}, open(out, 'w'))\n"
    )
    for git in (["init", "-q"], ["add", "."], ["commit", "-qm", "toy"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        measure.subprocess.run(["git", "-C", str(repository), *identity, *git], check=True)
    monkeypatch.setattr(measure, "ROOT", repository)
    assert measure.against("HEAD", ["toy"]) == [result]
    worktrees = measure.subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert worktrees.stdout.count("\n") == 1
