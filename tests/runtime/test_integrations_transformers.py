"""generate(custom_generate=Saguaro(draft)): what generate() returns, with whatever it is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation import logits_process

import saguaro_runtime
from saguaro_runtime import ConfigError, EngineConfig, SaguaroError, UnsupportedError
from saguaro_runtime.integrations.processors import split_processors
from saguaro_runtime.integrations.transformers import Saguaro

CONFIG = EngineConfig(k=3, branches=4, lane="inline", impl="reference", max_tokens=256)
TARGET = tiny_models.llama()
DRAFT = tiny_models.llama(1, near=TARGET)
TOKENIZER = tiny_models.tokenizer()
PROMPTS = ["speculate", "a", "once upon a time", "go on"]


def batch(prompts: list[str] = PROMPTS) -> dict[str, torch.Tensor]:
    return dict(TOKENIZER(prompts, padding=True, return_tensors="pt"))


def hook(**options: Any) -> Saguaro:
    return Saguaro(DRAFT, **({"config": CONFIG} | options))


def generate(its: dict[str, torch.Tensor], **options: Any) -> Any:
    return TARGET.generate(**its, **({"do_sample": False, "max_new_tokens": 12} | options))


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class StopsAt(StoppingCriteria):
    """Ends a row at its token number `count`; counts how often it was asked."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.count)


def test_a_batch_of_ragged_prompts_is_generates_own_text() -> None:
    with hook() as saguaro:
        got = generate(batch(), custom_generate=saguaro)
        stats = saguaro.stats()
    assert torch.equal(got, generate(batch()))
    assert stats["hits"] > 0 and 0 < stats["acceptance"] < 1


def test_one_prompt_is_also_the_assisted_text() -> None:
    its = batch(PROMPTS[:1])
    got = generate(its, custom_generate=hook())
    assert torch.equal(got, generate(its, assistant_model=DRAFT))
    # No attention mask, and ids by position, as generate() allows.
    assert torch.equal(TARGET.generate(its["input_ids"], max_new_tokens=12, do_sample=False,
                                       custom_generate=hook()), got)  # fmt: skip


def test_the_first_end_of_sequence_in_an_accepted_run_ends_the_row() -> None:
    plain = generate(batch())
    width = batch()["input_ids"].shape[1]
    with hook() as saguaro:
        for offset in range(4):
            eos = [int(plain[0, width + offset]), int(plain[2, width + 7])]
            options = {"eos_token_id": eos, "pad_token_id": tiny_models.PAD}
            want = generate(batch(), **options)
            assert torch.equal(generate(batch(), custom_generate=saguaro, **options), want)


@pytest.mark.parametrize("length", (18, 20, 21))
def test_a_stopping_criterion_is_asked_for_every_token(length: int) -> None:
    its = batch()
    own, ours = StopsAt(length), StopsAt(length)
    want = generate(its, stopping_criteria=StoppingCriteriaList([own]))
    got = generate(its, stopping_criteria=StoppingCriteriaList([ours]), custom_generate=hook())
    assert torch.equal(got, want)
    assert ours.asked == len(PROMPTS) * own.asked


def test_stop_strings_come_with_the_object() -> None:
    text = TOKENIZER.decode(generate(batch(PROMPTS[:1]))[0, len(PROMPTS[0]) :])
    stop = text[5:7]
    want = generate(batch(PROMPTS[:1]), stop_strings=[stop], tokenizer=TOKENIZER)
    saguaro = hook(stop_strings=stop, tokenizer=TOKENIZER)
    assert torch.equal(generate(batch(PROMPTS[:1]), custom_generate=saguaro), want)
    with pytest.raises(ConfigError, match="tokenizer"):
        hook(stop_strings=stop)


def test_a_streamer_gets_what_generate_would_put() -> None:
    for its in (batch(), batch(PROMPTS[:1])):
        own, ours = Recorder(), Recorder()
        want = generate(its, streamer=own, eos_token_id=[33, 71])
        got = generate(its, custom_generate=hook(streamer=ours), eos_token_id=[33, 71])
        assert torch.equal(got, want)
        assert ours.puts == own.puts
        assert ours.ended == own.ended == 1


def test_text_comes_out_of_a_text_streamer() -> None:
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True)
    got = generate(batch(PROMPTS[:1]), custom_generate=hook(streamer=streamer))
    assert "".join(streamer) == TOKENIZER.decode(got[0, len(PROMPTS[0]) :])


class Favours(LogitsProcessor):
    """Pushes ids by the length and the last id of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = (7 * input_ids.shape[1] + input_ids[:, -1:]) % 61
        return scores.scatter_add_(1, ids, torch.full(ids.shape, 4.0))  # in place, as some do


def only_letters(batch_id: int, ids: torch.Tensor) -> list[int]:
    return list(range(97 + batch_id, 123))


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(0, 256, 3))},
    "suppress_tokens": {"suppress_tokens": list(range(0, 256, 2))},
    "bad_words_ids": {"bad_words_ids": [[id] for id in range(30, 200)]},
    "exponential_decay": {
        "exponential_decay_length_penalty": (3, 1.5), "eos_token_id": list(range(0, 256, 5)),
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_letters},
    "own": {"logits_processor": LogitsProcessorList([Favours()]), "repetition_penalty": 1.2},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSED)
def test_logits_processors_hold_at_every_position(name: str) -> None:
    want = generate(batch(), **PROCESSED[name])
    assert not torch.equal(want, generate(batch()))
    with hook() as saguaro:
        assert torch.equal(generate(batch(), custom_generate=saguaro, **PROCESSED[name]), want)


def test_all_at_once_is_the_assisted_text() -> None:
    texts, puts = [], []
    for theirs in (True, False):
        streamer = Recorder()
        options = {"assistant_model": DRAFT, "streamer": streamer} if theirs else {
            "custom_generate": hook(streamer=streamer)
        }  # fmt: skip
        texts.append(
            generate(
                batch(PROMPTS[:1]), repetition_penalty=1.5, eos_token_id=[201],
                stopping_criteria=StoppingCriteriaList([StopsAt(19)]), **options,
            )
        )  # fmt: skip
        puts.append([id for put in streamer.puts for id in torch.tensor(put).flatten().tolist()])
    # Theirs asks the criterion once a round and may keep a few tokens more.
    ours, count = texts[1], texts[1].shape[1]
    assert torch.equal(texts[0][:, :count], ours) and count == 19
    assert puts[0][:count] == puts[1] == ours[0].tolist()


def test_processors_that_sample_and_those_that_fail() -> None:
    sampling = {"do_sample": True, "epsilon_cutoff": 0.99, "top_k": 0}  # leaves one id
    its = batch(PROMPTS[:1])
    want = generate(its, **sampling)
    assert torch.equal(generate(its, custom_generate=hook(), **sampling), want)

    class Raises(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    with pytest.raises(SaguaroError, match="mine"):
        generate(its, custom_generate=hook(), logits_processor=LogitsProcessorList([Raises()]))


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=len)
def test_a_dictionary_with_scores_and_logits(prompts: list[str]) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True,
               "repetition_penalty": 1.3}  # fmt: skip
    want = generate(batch(prompts), **options)
    got = generate(batch(prompts), custom_generate=hook(), **options)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == len(want[name]) == 12
        for one, other in zip(got[name], want[name], strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    bare = generate(batch(prompts), custom_generate=hook(), return_dict_in_generate=True)
    assert list(bare) == ["sequences"]


def test_sampling_is_seeded_and_rows_differ() -> None:
    its = batch(PROMPTS[:1])
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 0}
    with hook(seed=5) as saguaro:
        one, two = (generate(its, custom_generate=saguaro, **options) for _ in range(2))
        assert torch.equal(one, two)
        assert len({tuple(row) for row in one.tolist()}) == 3
    with hook(config=dataclasses.replace(CONFIG, reproducible=True)) as saguaro:
        drawn = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            drawn.append(generate(its, custom_generate=saguaro, **options).tolist())
        assert drawn[0] == drawn[2] != drawn[1]


def test_temperature_and_filters_are_the_requests() -> None:
    config = TARGET.generation_config
    before = config.temperature, config.top_p
    config.temperature, config.top_p = 0.7, 0.9  # defaults of the model, not of the call
    try:
        filters = TARGET._get_logits_processor(
            TARGET._prepare_generation_config(None, do_sample=True, top_k=40, min_p=0.1)[0],
            input_ids_seq_length=4,
            encoder_input_ids=torch.zeros(1, 4, dtype=torch.int64),
            device="cpu",
        )
    finally:
        config.temperature, config.top_p = before
    sampled = split_processors(filters, True)
    assert sampled.options == {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1}
    assert not sampled.processors
    # What stands between them leaves the earlier ones to be called.
    odd = [*filters[:2], logits_process.TypicalLogitsWarper(0.9), *filters[2:]]
    assert split_processors(odd, True).options == {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}
    assert len(split_processors(odd, True).processors) == 3
    assert split_processors([], False).options == {"temperature": 0.0}
    # A top-k of one is the greedy text.
    sampled_text = generate(batch(), custom_generate=hook(), do_sample=True, top_k=1)
    assert torch.equal(sampled_text, generate(batch()))


def test_generation_config_defaults_hold() -> None:
    config = TARGET.generation_config
    before = config.max_new_tokens, config.eos_token_id
    config.max_new_tokens, config.eos_token_id = 9, 33
    try:
        want = TARGET.generate(**batch(), do_sample=False)
        got = TARGET.generate(**batch(), do_sample=False, custom_generate=hook())
    finally:
        config.max_new_tokens, config.eos_token_id = before
    assert torch.equal(got, want) and got.shape[1] == batch()["input_ids"].shape[1] + 9


def test_the_folder_for_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate(custom_generate=PATH) with `assistant_model` as the draft, its requirements met."""
    repository = Path(saguaro_runtime.__file__).parents[1] / "examples" / "hub_repo"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    versions = {"saguaro-ssd": "0.1.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    options = {"trust_remote_code": True, "assistant_model": DRAFT, "saguaro_config": CONFIG}
    streamer = Recorder()
    got = generate(batch(), custom_generate=str(repository), streamer=streamer, **options)
    assert torch.equal(got, generate(batch())) and streamer.ended == 1
    text = TOKENIZER.decode(got[0, batch()["input_ids"].shape[1] :])
    stop = {"stop_strings": [text[3:5]], "tokenizer": TOKENIZER}
    got = generate(batch(PROMPTS[:1]), custom_generate=str(repository), **options, **stop)
    assert torch.equal(got, generate(batch(PROMPTS[:1]), **stop))
    with pytest.raises(ValueError, match="assistant_model"):
        generate(batch(), custom_generate=str(repository), trust_remote_code=True)


def test_pipeline() -> None:
    pipe = pipeline("text-generation", model=TARGET, tokenizer=TOKENIZER)
    options = {"do_sample": False, "max_new_tokens": 12, "return_full_text": False}
    with hook() as saguaro:
        for inputs in (PROMPTS[0], PROMPTS):
            want = pipe(inputs, batch_size=2, **options)
            assert pipe(inputs, batch_size=2, custom_generate=saguaro, **options) == want


def test_the_engine_is_kept_and_grown() -> None:
    with hook(config=dataclasses.replace(CONFIG, max_tokens=64)) as saguaro:
        generate(batch(PROMPTS[:1]), custom_generate=saguaro)
        first = saguaro._engine
        generate(batch(PROMPTS[1:2]), custom_generate=saguaro)
        assert saguaro._engine is first
        long = generate(batch(PROMPTS[:1]), custom_generate=saguaro, max_new_tokens=70)
        assert saguaro._engine is not first and saguaro._engine.config.max_tokens > 70
    assert torch.equal(long, generate(batch(PROMPTS[:1]), max_new_tokens=70))


def test_the_engine_ends_with_an_object_made_in_the_call() -> None:
    saguaro = hook()
    generate(batch(PROMPTS[:1]), custom_generate=saguaro)
    engine = saguaro._engine
    assert engine is not None and engine.lane is not None and engine.lane.off is None
    del saguaro
    assert engine.lane.off == "closed"


def test_an_interrupted_call_leaves_the_object_usable() -> None:
    class Breaks(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            raise RuntimeError("mine")

    with hook() as saguaro:
        with pytest.raises(RuntimeError, match="mine"):
            generate(batch(), custom_generate=saguaro,
                     stopping_criteria=StoppingCriteriaList([Breaks()]))  # fmt: skip
        assert torch.equal(generate(batch(), custom_generate=saguaro), generate(batch()))
        kept = saguaro._engine.verifier.model
        with pytest.raises(ConfigError, match="token ids must lie in"):
            generate({"input_ids": torch.tensor([[9999, 1]])}, custom_generate=saguaro,
                     return_dict_in_generate=True, output_logits=True)  # fmt: skip
        assert saguaro._engine.verifier.model is kept


FULL = DynamicCache()
FULL.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
REFUSED = {
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
    "holds tokens already": {"past_key_values": FULL},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 9, 32)},
    "position_ids": {"position_ids": torch.arange(9)[None] + 3},
    "UnbatchedClassifierFree": {"guidance_scale": 2.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        generate(batch(PROMPTS[:1]), custom_generate=hook(), **REFUSED[name])


def test_rows_that_end_apart_need_a_pad_token() -> None:
    with pytest.raises(ConfigError, match="pad_token_id"):
        TARGET.generation_config.pad_token_id = None
        try:
            generate(batch(), custom_generate=hook(),
                     stopping_criteria=StoppingCriteriaList([StopsAt(3)]))  # fmt: skip
        finally:
            TARGET.generation_config.pad_token_id = tiny_models.PAD
