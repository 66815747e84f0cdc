"""transformers models behind the engine: the same text and the same logits as their own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scripts
import tiny_gguf
import torch
import transformers

from saguaro_runtime import ConfigError, Engine, EngineConfig, SamplingParams, UnsupportedError
from saguaro_runtime.distill.student import write_student
from saguaro_runtime.models.draft import SHARED_EMBEDDINGS, own_weights
from saguaro_runtime.models.gguf import folder_of
from saguaro_runtime.models.loading import load_draft, load_model, load_tokenizer
from saguaro_runtime.models.transformers import TransformersModel

SIZES = {"vocab_size": 61, "max_position_embeddings": 256}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, **SIZES,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **SIZES,
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, **SIZES,
    ),
    "mistral-window": lambda: transformers.MistralConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, sliding_window=8,
        num_attention_heads=4, num_key_value_heads=2, **SIZES,
    ),
    "mistral": lambda: transformers.MistralConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, sliding_window=None,
        num_attention_heads=4, num_key_value_heads=2, **SIZES,
    ),
    "gemma": lambda: transformers.GemmaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=1, **SIZES,
    ),
    "gemma2-softcap": lambda: transformers.Gemma2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=16, sliding_window=8,
        num_attention_heads=4, num_key_value_heads=2, query_pre_attn_scalar=16, **SIZES,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=61, n_positions=256,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **SIZES,
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=48, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=48, **SIZES,
    ),
    "phi": lambda: transformers.PhiConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **SIZES,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2, **SIZES,
    ),
}  # fmt: skip
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [40] * 20, [3, 1]]


def tiny(family: str = "llama", seed: int = 0, scale: float = 4.0) -> transformers.PreTrainedModel:
    """A random model whose next tokens are far from uniform, so that ties are rare."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.get_output_embeddings().weight.data.mul_(scale)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model.eval()


def own_greedy(
    model: transformers.PreTrainedModel, prompt: list[int], count: int, **options: object
) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    target, draft = tiny(family), tiny(family, seed=1)
    before = target.config._attn_implementation
    options = {"k": 3, "branches": 6, "max_batch": len(PROMPTS), "prefill_chunk": 5}
    with scripts.engine(target, draft, **options) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24))
        for model in (engine.model, engine.lane.speculator.model):
            kv = model.kv
            assert kv.free_tokens == kv.data.shape[2] * kv.page_size
    assert [o.token_ids for o in outputs] == [own_greedy(target, p, 24) for p in PROMPTS]
    assert target.config._attn_implementation == before


def test_penalties_are_those_of_generate() -> None:
    target, draft = tiny(), tiny(seed=1)
    target.generation_config.eos_token_id = target.config.eos_token_id = 7
    options = {"repetition_penalty": 1.4, "min_new_tokens": 20}
    params = SamplingParams(max_new_tokens=26, **options)
    with scripts.engine(target, draft, max_batch=3) as engine:
        outputs = engine.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [own_greedy(target, p, 26, **options) for p in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_equal_to_target_is_always_accepted(family: str) -> None:
    """The keys of trunk, chain and branches are those of a plain forward, hit after hit."""
    model = tiny(family)
    with scripts.engine(model, model, k=3, branches=6, max_batch=3) as engine:
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=40))
        stats = engine.stats()
    assert stats["accepted"] == stats["drafted"] > 0
    assert stats["hits"] > stats["misses"]


@pytest.mark.parametrize("family", FAMILIES)
def test_ssd_equals_sd_when_sampling(family: str) -> None:
    rule = "block" if list(FAMILIES).index(family) % 2 else "token"
    target, draft = tiny(family, scale=1.5), tiny(family, seed=1, scale=1.5)
    params = [
        scripts.sampled(seed, 8 + 2 * seed, temperature=0.8, top_k=20)
        for seed in range(len(PROMPTS))
    ]
    texts = []
    for method, rows in (("sd", 3), ("ssd", len(PROMPTS))):
        with scripts.engine(target, draft, method=method, rule=rule, max_batch=rows) as engine:
            texts.append([o.token_ids for o in engine.generate(PROMPTS, params)])
    assert texts[0] == texts[1] and [len(ids) for ids in texts[0]] == [8, 10, 12, 14, 16]


def test_logits_of_every_round_equal_a_fresh_forward() -> None:
    """Draft = target: what both computed piecewise, round by round, is one forward's logits."""
    model = tiny()
    seen: dict[str, dict[int, torch.Tensor]] = {"target": {}, "draft": {}}
    with scripts.engine(model, model, k=2, branches=4, max_batch=1, max_tokens=2048) as engine:
        speculator, verifier = engine.lane.speculator, engine.verifier
        verify = verifier.verify

        def record(turn, draft, *rest):
            base, count = int(turn.base[0]), int(draft.num_draft[0])
            for offset in range(count + 1):
                seen["draft"][base + offset] = speculator.chain.logits[0, offset].clone()
            forward = verifier.model.extend

            def extend(rows, tokens, trunk_len):
                logits = forward(rows, tokens, trunk_len)
                for offset in range(count + 1):
                    seen["target"][base + offset] = logits[0, offset].clone()
                return logits

            verifier.model.extend = extend
            try:
                return verify(turn, draft, *rest)
            finally:
                verifier.model.extend = forward

        verifier.verify = record
        output = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=240))[0]
        stats = engine.stats()
    assert stats["accepted"] == stats["drafted"] and stats["hits"] > 20
    text = torch.tensor([[5, 6, 7, *output.token_ids]])
    with torch.no_grad():
        fresh = model(text).logits[0]
    for side in seen.values():
        for position, logits in side.items():
            if 3 <= position <= text.shape[1]:
                assert torch.allclose(logits, fresh[position - 1], atol=1e-4), position


def test_prompt_up_to_the_models_length() -> None:
    model = tiny("gpt2")
    for spare in (1, 2, 3, 4, 5):
        prompt = [index % 61 for index in range(256 - spare)]
        with scripts.engine(model, tiny("gpt2", 1), k=3, max_batch=1) as engine:
            output = engine.generate(prompt, SamplingParams(max_new_tokens=50))[0]
        assert output.token_ids == own_greedy(model, prompt, spare)
        assert output.finish_reason == "length"
    with (
        scripts.engine(model, model, max_batch=1) as engine,
        pytest.raises(ConfigError, match="256"),
    ):
        engine.generate([1] * 256)


def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft; converted once, with its tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    source = tiny_gguf.write(path)
    texts = []
    for draft in (None, str(path)):
        method = "ar" if draft is None else "ssd"
        with scripts.engine(str(path), draft, method=method, max_batch=1) as engine:
            texts.append(engine.generate("he he", SamplingParams(12))[0].token_ids)
            loaded = engine.model.model.state_dict()
            assert engine.tokenizer("he he").input_ids
    assert len(texts[0]) == 12 and texts[0][:4] == texts[1][:4]
    for name, weight in source.state_dict().items():
        assert torch.equal(loaded[name].float(), weight), name
    assert len(list((tmp_path / "cache" / "saguaro").glob("gguf-*"))) == 1
    with pytest.raises(ConfigError, match="no such file"):
        Engine(str(tmp_path / "other.gguf"), None, EngineConfig(method="ar"))


def test_a_draft_of_another_family() -> None:
    target, draft = tiny("llama"), tiny("gpt2", seed=1)
    texts = []
    for method in ("sd", "ssd"):
        with scripts.engine(target, draft, method=method, max_batch=3) as engine:
            outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
            drawn = engine.generate(PROMPTS, [scripts.sampled(seed, 12) for seed in range(5)])
        assert [o.token_ids for o in outputs] == [own_greedy(target, p, 12) for p in PROMPTS]
        texts.append([o.token_ids for o in drawn])
    assert texts[0] == texts[1]


def test_a_draft_folder_can_borrow_the_targets_embedding(tmp_path: Path) -> None:
    target, source = tiny(), tiny(seed=1)
    target.config.tie_word_embeddings = source.config.tie_word_embeddings = True
    target.tie_weights()
    source.save_pretrained(tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {SHARED_EMBEDDINGS: True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    kept = {
        name: value for name, value in weights.items() if "embed" not in name and "head" not in name
    }
    save_file(kept, tmp_path / "model.safetensors")
    before = target.get_input_embeddings().weight.clone()
    draft = load_draft(str(tmp_path), target)
    assert draft.get_input_embeddings().weight is target.get_input_embeddings().weight
    assert torch.equal(draft.model.norm.weight, source.model.norm.weight)
    with scripts.engine(target, str(tmp_path), lane="process", max_batch=1) as engine:
        text = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=20))[0].token_ids
    assert text == own_greedy(target, [5, 6, 7], 20)
    save_file(weights, tmp_path / "model.safetensors")  # its own embedding, into the target's?
    with pytest.raises(ConfigError, match="unexpected weights .+model.embed_tokens.weight"):
        load_draft(str(tmp_path), target)
    assert torch.equal(target.get_input_embeddings().weight, before)


@pytest.mark.parametrize("name", ["BloomConfig", "FalconConfig"])
def test_models_outside_the_attention_interface_are_refused_by_name(name: str) -> None:
    config = getattr(transformers, name)(
        hidden_size=32,
        n_layer=2,
        num_hidden_layers=2,
        n_head=4,
        num_attention_heads=4,
        vocab_size=61,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=name.removesuffix("Config")):
        TransformersModel(model, rows=1, tokens=64)


def test_missing_folder() -> None:
    with pytest.raises(ConfigError, match="no/such"):
        load_model("no/such")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model '.+nowhere': does not exist"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="tokenizer of '.+': cannot be loaded"):
        load_tokenizer(str(tmp_path))


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _configured(**options: Any) -> Any:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | options
        (folder / "config.json").write_text(json.dumps(config))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 9),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("[1]"),
        _configured(hidden_size=64),
        _configured(num_hidden_layers=3),  # a layer that transformers would make up
        _configured(num_attention_heads=5),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_folder_is_refused_by_its_name(damage: Any, shared: bool, tmp_path: Path) -> None:
    target = tiny()
    target.save_pretrained(tmp_path / "broken")
    if shared:
        write_student(tmp_path / "broken", target.config, own_weights(target), None)
        _configured(**{SHARED_EMBEDDINGS: True})(tmp_path / "broken")
        load_draft(str(tmp_path / "broken"), target)
    damage(tmp_path / "broken")
    with pytest.raises(ConfigError, match="broken"):
        load_draft(str(tmp_path / "broken"), target)


def test_a_quantised_folder_without_its_library_is_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    _configured(quantization_config=method)(tmp_path)
    with pytest.raises(ConfigError, match="bitsandbytes"):
        load_model(str(tmp_path))


def test_damaged_tokenizers_and_gguf_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ConfigError, match="tokenizer of"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for content in (b"", b"GGUFxxxx"):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="broken.gguf"):
            folder_of(str(tmp_path / "broken.gguf"))


def test_what_is_no_model_is_refused_by_name() -> None:
    model = tiny()
    config = EngineConfig(lane="inline", impl="reference")
    for wrong in (None, 5, {}, model.config):
        with pytest.raises(ConfigError, match="target: got"):
            Engine(wrong, model, config)
        with pytest.raises(ConfigError, match="draft: got"):
            Engine(model, wrong, config)
    for pair in ((model.model, model), (model, model.model)):
        with pytest.raises(UnsupportedError, match="LlamaModel: has no head"):
            Engine(*pair, config)
