"""Where models given by path go, on machines with no GPU, one and two, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import tiny_models
import torch

from saguaro_runtime import ConfigError, Engine, EngineConfig, SamplingParams, cli
from saguaro_runtime.cli import doctor
from saguaro_runtime.demo.cli import load
from saguaro_runtime.devices import places
from saguaro_runtime.models import loading
from saguaro_runtime.models.draft import SHARED_EMBEDDINGS

OPTIONS: dict[str, Any] = {"k": 2, "branches": 4, "max_batch": 1, "max_tokens": 512}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many GPUs torch finds."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft like it."""
    target = tiny_models.llama(scale=1.5)
    made = (target, tiny_models.llama(1, near=target, scale=1.5))
    paths = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    return tuple(tiny_models.save(path, its) for path, its in zip(paths, made, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "count, device, draft, wanted",
    [
        (2, None, None, ("cpu", "cpu")),
        (2, "cpu", None, ("cpu", "cpu")),
        (2, "cuda", None, ("cuda:0", "cuda:0")),
        (2, "cuda:1", None, ("cuda:1", "cuda:1")),
        (2, "cuda:1", "auto", ("cuda:1", "cuda:0")),
        (2, "cuda", "cuda:1", ("cuda:0", "cuda:1")),
        (3, "auto", None, ("cuda:0", "cuda:1")),
        (3, "auto", "cuda:2", ("cuda:0", "cuda:2")),
        (1, "auto", None, ("cuda:0", "cuda:0")),
        (0, "auto", None, ("cpu", "cpu")),
        (2, "cpu", "auto", ("cpu", "cpu")),
    ],
)
def test_where_models_go(
    count: int, device: str | None, draft: str | None, wanted: tuple[str, str], gpus: Any
) -> None:
    gpus(count)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = places(EngineConfig(device=device, draft_device=draft))
    assert tuple(map(str, found)) == wanted
    # Only who has spoken of no device is told that a GPU is left idle.
    assert ["device='auto'" in str(warning.message) for warning in said] == [True] * (
        device is None
    )


@pytest.mark.parametrize(
    "count, device, draft, words",
    [
        (0, "cuda", None, "device: got 'cuda', torch .+ finds cpu$"),
        (2, "cuda:2", None, "device: got 'cuda:2', torch .+ finds cpu, cuda:0, cuda:1$"),
        (1, "cuda", "cuda:1", "draft_device: got 'cuda:1', torch .+ finds cpu, cuda:0$"),
        (1, "gpu", None, "device: got 'gpu'"),
        (1, "cuda:-1", None, "device: got 'cuda:-1'"),
        (1, "cuda", "cpu", "draft on cpu, target on cuda:0: want both"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_loading(
    count: int, device: str, draft: str | None, words: str, gpus: Any,
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("loaded")

    gpus(count)
    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(ConfigError, match=words):
        Engine(*folders, EngineConfig(device=device, draft_device=draft, **OPTIONS))


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_command_line_hands_the_devices_on(
    command: str, gpus: Any, folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(1)
    line = [command, "--target", folders[0], "--draft", folders[1]]
    line += ["--prompt", "x"] if command == "generate" else []
    assert cli.main([*line, "--device", "cuda:7"]) == 1
    words = f"device: got 'cuda:7', torch {torch.__version__} finds cpu, cuda:0"
    assert words in capsys.readouterr().err
    assert cli.main([*line, "--device", "cuda", "--draft-device", "cuda:1"]) == 1
    assert "draft_device: got 'cuda:1'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["device", "draft_device"])
def test_a_loaded_model_stays_where_it_is(
    option: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        models = [machine.place(tiny_models.llama(seed), "cuda:0") for seed in range(2)]
        config = EngineConfig(**OPTIONS, **{option: "cuda:1"})
        with pytest.raises(ConfigError, match=rf"{option}: got 'cuda:1', but .* on cuda:0"):
            Engine(*models, config)
        config = EngineConfig(**OPTIONS, **{option: "auto"})
        Engine(*models, config).close()


@pytest.mark.parametrize("count", [1, 2])
def test_auto_is_what_the_doctor_says(
    count: int, gpus: Any, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs that are not there: lane and devices are those of the report, the text the CPU's."""
    params = SamplingParams(max_new_tokens=6, temperature=0.8, seed=3)
    plain = EngineConfig(**OPTIONS, lane="inline", reproducible=True, impl="reference")
    with Engine(*folders, plain) as engine:
        expected = engine.generate([5, 6, 7], params)[0].token_ids
    gpus(count)
    said = doctor._on_gpus()
    config = EngineConfig(**OPTIONS, device="auto", reproducible=True)
    models = {path: loading.load_model(path) for path in folders}

    def load_model(path: str, dtype: Any = None, device: Any = None) -> Any:
        return machine.place(models[path], device)

    monkeypatch.setattr(loading, "load_model", load_model)
    machine = pretend_cuda.Machine(monkeypatch, devices=count)
    with machine, Engine(*folders, config) as engine:
        found = engine.generate([5, 6, 7], params)[0].token_ids
        draft = engine.lane.speculator.model.device
        assert type(engine.lane).__name__ == f"{said['lane'].capitalize()}Lane"
        assert (said["target"], said["draft"]) == (str(engine.model.device), str(draft))
    assert said == {"lane": "stream", "target": "cuda:0", "draft": f"cuda:{count - 1}"}
    assert found == expected
    assert not machine.races, machine.races[:5]


def test_a_draft_on_another_device_copies_what_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny_models.llama(), tiny_models.llama(1)
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[SHARED_EMBEDDINGS] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    own = {name: its for name, its in weights.items() if "embed" not in name and "head" not in name}
    save_file(own, tmp_path / "model.safetensors")
    there = torch.device("cuda", 1)
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        machine.place(target, "cuda:0")
        monkeypatch.setattr(torch.nn.Module, "to", lambda its, where: machine.place(its, where))
        beside = loading.load_draft(str(tmp_path), target)
        away = loading.load_draft(str(tmp_path), target, device=there)
        assert beside.get_input_embeddings() is target.get_input_embeddings()
        assert {its.device for its in away.parameters()} == {there}
        assert {str(its.device) for its in target.parameters()} == {"cuda:0"}
        theirs, ours = away.get_input_embeddings().weight, target.get_input_embeddings().weight
    assert torch.equal(theirs, ours)


def test_a_measured_pair_goes_where_it_is_told(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    where = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(loading, "load_model", lambda path, dtype, device: where.append(device))
    monkeypatch.setattr(loading, "load_draft", lambda path, of, dtype, device: where.append(device))
    load("target", "draft", "float32", "auto")
    load("target", "draft", "float32")
    assert [str(device) for device in where] == ["cuda:0", "cuda:1", "cpu", "cpu"]
