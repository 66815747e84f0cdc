"""What `saguaro doctor` says about a machine, with and without GPUs, and about a pair."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gguf
import torch

from saguaro_kernels import _launch
from saguaro_runtime import cli
from saguaro_runtime.cli import doctor
from saguaro_runtime.models.gguf import convert


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores, no GPU, an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_report_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["cpu"]["cores"] == 2
    assert report["cpu"]["faster_dtype"] in ("bfloat16", "float32")
    assert report["gpus"] == [] and report["peer_access"] == []
    assert list(report["implementation"]) == ["cpu"]
    assert report["lane"] == "process"
    assert report["speculation"]["active"]
    assert report["demo_models"] == []


def test_text_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["gpu"] == "none that torch can use"
    assert lines["lane"] == "process"
    assert lines["speculation"].startswith("on: ")


def test_one_core_means_taking_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    report = doctor.examine()
    assert report["lane"] == "inline"
    assert "take turns" in report["speculation"]["why"]


def test_gpus_and_who_can_reach_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    # 0 and 1 reach each other; 2 stands alone. A device is never asked about itself.
    reach = {(0, 1): True, (1, 0): True, (0, 2): False, (2, 0): False, (1, 2): False, (2, 1): False}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach[a, b])
    report = doctor.examine()
    assert report["peer_access"] == [[True, True, False], [True, True, False], [False, False, True]]
    assert list(report["implementation"]) == ["cpu", "cuda"]
    assert report["implementation"]["cuda"].startswith("triton")
    text = doctor.render(report)
    assert "H100, 80 GiB, sm_90, peer access: 1" in text
    assert "peer access: none" in text
    assert "lane on gpus     stream, with --device auto; target on cuda:0, draft on cuda:1" in text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert doctor.examine()["on_gpus"] is None


def test_interpreted_kernels_are_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", True)
    assert doctor.implementation("cpu") == "triton, interpreted (TRITON_INTERPRET=1)"
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    assert doctor.implementation("cpu") == "reference"
    assert doctor.implementation("cuda") == "triton"


def test_faster_dtype_is_the_one_that_took_less(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, now = torch.get_num_threads(), [0.0]

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        assert torch.get_num_threads() == 1
        now[0] += 2.0 if x.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: now[0])
    assert doctor.faster_dtype() == "float32"
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_gguf.write(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder)
    return str(folder)


def test_pair_that_fits(model: str, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert doctor.try_pair(model, model)["active"]


def test_pair_that_does_not_load_says_why(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["doctor", "--target", model, "--draft", missing]) == 1
    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("speculation"))
    assert "off: " in line and missing in line


def test_engine_that_lost_its_draft_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Lost:
            return self

        def __exit__(self, *_: object) -> None: ...
        def generate(self, *_: Any) -> None: ...
        def stats(self) -> dict[str, str]:
            return {"speculation": "the draft process ended"}

    monkeypatch.setattr("saguaro_runtime.Engine", Lost)
    assert doctor.try_pair("t", "d") == {"active": False, "why": "the draft process ended"}
