"""Parameters, stops and text: exact wherever a stop falls inside an accepted run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scripts
import torch

from saguaro_runtime import ConfigError, EngineConfig, Output, SamplingParams
from saguaro_runtime.intake import several
from saguaro_runtime.requests import TextStream

V = 12
K = 3
CYCLE = torch.full((V * V, V), 1e-9)
for _before in range(V):
    for _last in range(V):
        CYCLE[_before * V + _last, (_last + 1) % V] = 1.0
"""Counts upwards: after 1, 2 come 3, 4, 5, .. whatever is drafted."""


LETTERS = "abcdefghijk"


class Letters:
    """A letter per id; 11 is the first half of a two-byte character, 0 the second."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens=False) -> str:
        text, index = "", 0
        while index < len(ids):
            if ids[index] == 11:
                whole = index + 1 < len(ids) and ids[index + 1] == 0
                text += "é" if whole else "\ufffd"
                index += 2 if whole else 1
                continue
            text += LETTERS[ids[index]]
            index += 1
        return text

    def __call__(self, text: str):
        ids = [LETTERS.index(letter) for letter in text]
        return type("Encoding", (), {"input_ids": ids})()


def _engine(**options: object):
    model = scripts.model(CYCLE)
    engine = scripts.engine(
        model, scripts.model(CYCLE), **({"k": K, "tokenizer": Letters()} | options)
    )
    return engine


def _agree(output: Output, streamed: str, ids: list[int], reason: str) -> None:
    """Ids, text, stream, log-probabilities and counts say the same."""
    assert output.token_ids == ids and output.finish_reason == reason
    assert output.text == streamed == Letters().decode(ids)
    assert [logprob.token for logprob in output.logprobs] == pytest.approx(
        [0.0] * len(ids), abs=1e-6
    )
    assert [next(iter(logprob.top)) for logprob in output.logprobs if logprob.top] in (ids, [])
    assert output.metrics["tokens"] == sum(round.committed for round in output.rounds) == len(ids)
    assert output.usage["completion_tokens"] == len(ids)


@pytest.mark.parametrize("count", [0, 1, 2, K, K + 1, K + 2, 11])
@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_max_new_tokens_is_exact(count: int, method: str) -> None:
    params = SamplingParams(max_new_tokens=count, logprobs=1)
    with _engine(method=method) as engine:
        output = engine.generate([1, 2], params)[0]
        stats = engine.stats()
        streamed = "".join(engine.stream([1, 2], params))
    ids = [(3 + i) % V for i in range(count)]
    _agree(output, streamed, ids, "length")
    assert stats["tokens"] == count and output.usage["total_tokens"] == 2 + count


@pytest.mark.parametrize("offset", range(K + 3))
@pytest.mark.parametrize("kind", ["eos", "stop id", "stop string", "its first half"])
def test_a_stop_at_each_offset_of_an_accepted_run(kind: str, offset: int) -> None:
    """Text, stream, ids, log-probabilities and counts end together."""
    last, tokenizer = 4 + offset, Letters()  # 3 is the first round's, 4 .. 4 + K the second's
    params = SamplingParams(max_new_tokens=8, logprobs=0)
    ids, text, reason = list(range(3, last + 1)), LETTERS[3:last], "stop"
    if kind == "eos":
        tokenizer.eos_token_id = last
    elif kind == "stop id":
        params = dataclasses.replace(params, stop_token_ids=(last,))
    elif kind == "stop string":
        params = dataclasses.replace(params, stop=("zz", LETTERS[last : last + 2]))
        ids.append(last + 1)
    else:
        params = dataclasses.replace(params, stop=(LETTERS[last] + "zz",))
        ids, text, reason = list(range(3, 11)), LETTERS[3:], "length"
    with _engine(tokenizer=tokenizer) as engine:
        output = engine.generate("bc", params)[0]
        stats = engine.stats()
        streamed = "".join(engine.stream("bc", params))
    assert output.token_ids == ids and output.finish_reason == reason
    assert output.text == streamed == text
    assert [logprob.token for logprob in output.logprobs] == pytest.approx(
        [0.0] * len(ids), abs=1e-6
    )
    assert stats["tokens"] == output.metrics["tokens"] == len(ids)
    assert sum(round.committed for round in output.rounds) == len(ids)


@pytest.mark.parametrize("spare", range(K + 3))
def test_prompts_up_to_the_models_length(spare: int) -> None:
    """The chain would stand beyond the last position; so would the branches behind it."""
    length = 20
    prompt = [index % V for index in range(length - spare)]
    params = SamplingParams(max_new_tokens=K + 2, logprobs=0)
    for draft_length in (length, length + 7):
        target = scripts.model(CYCLE, max_length=length)
        draft = scripts.model(CYCLE, max_length=draft_length)
        with scripts.engine(target, draft, k=K, tokenizer=Letters()) as engine:
            if not spare:
                with pytest.raises(ConfigError, match="20 tokens, the model holds 20"):
                    engine.add(prompt, params)
                continue
            output = engine.generate(prompt, params)[0]
            streamed = "".join(engine.stream(prompt, params))
        ids = [(length - spare + index) % V for index in range(min(spare, K + 2))]
        _agree(output, streamed, ids, "length")


def test_a_stop_string_that_stays_half_is_not_held_back_for_ever() -> None:
    params = SamplingParams(max_new_tokens=3, stop=("fz",))
    with _engine() as engine:
        assert engine.generate([1, 2], params)[0].text == "def"
        assert "".join(engine.stream([1, 2], params)) == "def"


def test_characters_of_several_tokens_come_whole() -> None:
    with _engine() as engine:
        pieces = list(engine.stream([1, 8], SamplingParams(max_new_tokens=5)))
        cut = engine.generate([1, 8], SamplingParams(max_new_tokens=3))[0]
    assert "".join(pieces) == "jkéb" and not any("\ufffd" in piece for piece in pieces)
    assert cut.text == "jk\ufffd" and cut.token_ids == [9, 10, 11]


def test_eos_of_the_tokenizer_ends_the_text_unless_ignored() -> None:
    tokenizer = Letters()
    tokenizer.eos_token_id = 6
    with _engine(tokenizer=tokenizer) as engine:
        assert engine.generate([1, 2])[0].token_ids == [3, 4, 5, 6]
        ignoring = SamplingParams(max_new_tokens=6, ignore_eos=True)
        assert engine.generate([1, 2], ignoring)[0].token_ids == [3, 4, 5, 6, 7, 8]


def test_requests_join_and_leave_between_rounds() -> None:
    """More requests than rows, of different lengths, cancelled at any time: nothing shifts."""
    with _engine(max_batch=2) as engine:
        requests = [
            engine.add([1, start], SamplingParams(max_new_tokens=5 + 3 * start))
            for start in range(6)
        ]
        steps = 0
        while any(request.finish_reason is None for request in requests):
            engine.step()
            steps += 1
            if steps == 2:
                engine.cancel(requests[1])
                engine.cancel(requests[5])
        engine.step()
        assert engine.model.held == set() and engine.lane.speculator.model.held == set()
    for start, request in enumerate(requests):
        wanted = [(start + 1 + i) % V for i in range(5 + 3 * start)]
        assert request.token_ids == wanted[: len(request.token_ids)]
        assert request.finish_reason == ("cancelled" if start in (1, 5) else "length")
        assert start in (1, 5) or request.token_ids == wanted


def test_leaving_a_stream_early_cancels_it() -> None:
    with _engine() as engine:
        for _ in engine.stream([1, 2], SamplingParams(max_new_tokens=200)):
            break
        assert engine.model.held == set()


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ([], 5, "no tokens"),
        ([1, V], 5, "0..11"),
        ([1, -1], 5, "0..11"),
        ([1] * 50, 50, "max_tokens=64"),
        ([1, 1.5], 5, "want text or token ids"),
        ([1, None], 5, "want text or token ids"),
        (None, 5, "want text or token ids"),
        ("half \ud83d", 5, "want text or token ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_any_work(
    prompt, new_tokens, message
) -> None:
    with _engine(max_tokens=64) as engine:
        with pytest.raises(ConfigError, match=message):
            engine.generate([[1, 2], prompt], SamplingParams(max_new_tokens=new_tokens))
        assert engine.stats()["rounds"] == 0
        assert engine.generate([1, 2], SamplingParams(max_new_tokens=2))[0].token_ids == [3, 4]


def test_text_needs_a_tokenizer() -> None:
    with _engine(tokenizer=None) as engine:
        for call in (
            lambda: engine.generate("bc"),
            lambda: engine.generate([1], SamplingParams(stop=("a",))),
            lambda: next(engine.stream([1])),
        ):
            with pytest.raises(ConfigError, match="tokenizer"):
                call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": -1}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
        {"min_p": -0.1}, {"min_p": 1.1}, {"seed": 2**63}, {"stop": ("",)},
        {"top_k": 2**31}, {"top_k": 1.5}, {"temperature": 1e39}, {"max_new_tokens": 2.5},
        {"temperature": "1"}, {"top_p": "1"}, {"min_p": [0]}, {"stop": 5}, {"stop": (1,)},
        {"stop_token_ids": 5}, {"stop_token_ids": (1.0,)}, {"allowed_token_ids": "ab"},
        {"allowed_token_ids": ()}, {"repetition_penalty": 0.0}, {"repetition_penalty": 1e-300},
        {"frequency_penalty": float("nan")}, {"presence_penalty": None}, {"logprobs": -1},
        {"logprobs": True}, {"min_new_tokens": 129}, {"ignore_eos": "no"}, {"seed": 1.0},
    ],
)  # fmt: skip
def test_sampling_parameters_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "magic"}, {"rule": "beam"}, {"k": 0}, {"k": 65}, {"branches": 0},
        {"ranking": "x"}, {"fallback": "x"}, {"lane": "x"}, {"max_batch": 0}, {"impl": "x"},
        {"draft_timeout_s": 0.0}, {"draft_timeout_s": float("inf")}, {"threads": 0}, {"k": 2.5},
        {"k": True}, {"downweight": None}, {"downweight": 0}, {"draft_timeout_s": "1"},
        {"memory_limit": 0}, {"reproducible": "no"}, {"device": 0}, {"draft_device": 1},
        {"downweight": 0.5, "rule": "coupled"},
    ],
)  # fmt: skip
def test_engine_options_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_prompts_come_as_lists_arrays_and_tensors_but_not_as_a_tokenizers_whole_output() -> None:
    params = SamplingParams(max_new_tokens=2)
    with _engine() as engine:
        for one in ([1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([[1, 2]])):
            assert [its.token_ids for its in engine.generate(one, params)] == [[3, 4]]
        assert engine.generate([], params) == []
        assert engine.generate([1, 2], iter([params]))[0].token_ids == [3, 4]
        for wrong in ({"input_ids": [1, 2]}, 5, None):
            with pytest.raises(ConfigError, match="prompts: got"):
                engine.generate(wrong, params)
        with pytest.raises(ConfigError, match="params: got"):
            engine.generate([1], None)


def test_texts_of_an_array_are_prompts_each() -> None:
    texts = ["ab", "bc"]
    for array in (np.array(texts), np.array(texts, dtype=object), iter(texts)):
        assert several(array) == texts


@pytest.mark.parametrize("method", ["ar", "ssd"])
def test_a_callers_inference_mode_leaves_nothing_behind(method: str) -> None:
    """What is made at its first use is used by later rounds outside that mode."""
    params = SamplingParams(max_new_tokens=80)
    with _engine(method=method) as engine:
        with torch.inference_mode():
            inside = engine.generate([[1, 2], [2, 3]], params)
        outside = engine.generate([[1, 2], [2, 3]], params)
        stats = engine.stats()
    assert [output.token_ids for output in inside] == [output.token_ids for output in outside]
    assert method == "ar" or stats["speculation"] == "on"


def test_ids_that_stop_and_ids_that_are_allowed() -> None:
    with _engine() as engine:
        # An id that no logits are for never comes; counted from the end it would be another one.
        params = SamplingParams(max_new_tokens=3, min_new_tokens=3, stop_token_ids=(3 - V, V + 5))
        assert engine.generate([1, 2], params)[0].token_ids == [3, 4, 5]
        params = SamplingParams(min_new_tokens=1, stop_token_ids=(3, 4), allowed_token_ids=(4, 3))
        with pytest.raises(ConfigError, match="end the text"):
            engine.generate([1, 2], params)


def test_options_are_frozen_and_print_themselves() -> None:
    params = SamplingParams(stop="end")
    assert params.stop == ("end",) and "temperature=0.0" in repr(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_text_stream_alone() -> None:
    stream = TextStream(Letters(), ["ef"])
    taken = []
    for token in (1, 11, 0, 4, 3, 4, 5, 6):
        if not stream.stopped:
            stream.append(token)
            taken.append(stream.take())
    assert "".join(taken) == stream.text == "béed"
    assert stream.stopped
