"""Penalties, masks, functions and log-probabilities: the target's law with them, at every position.

The drafts know nothing of them here, so nearly every round refuses one.
"""

from __future__ import annotations

import itertools
import math

import faulty
import numpy as np
import pytest
import scripts
import torch

import oracles
from saguaro_runtime import ConfigError, SamplingParams, processors

V, K, ROWS = 5, 3, 256
P = scripts.random_law(V, seed=1)
Q = scripts.random_law(V, seed=2, near=P)
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.6}
PROMPT = [1, 2]


def _engine(draft: torch.Tensor = Q, rows: int = 8, **options: object):
    batch = {"max_batch": rows, "max_tokens": rows * 128}
    target, draft = scripts.model(P, rows), scripts.model(draft, rows)
    return scripts.engine(target, draft, k=K, **(batch | options))


def _penalized_law(length: int) -> np.ndarray:
    """The joint law of the first tokens with PENALTIES, one text after another, in plain Python."""
    law = []
    for text in itertools.product(range(V), repeat=length):
        weight = 1.0
        for at in range(length):
            seen = [*PROMPT, *text[:at]]
            row = []
            for id, probability in enumerate(P[seen[-2] * V + seen[-1]].tolist()):
                z, count = math.log(probability), text[:at].count(id)
                if id in seen:
                    z *= 1.6  # logarithms of probabilities are negative
                row.append(math.exp(z - 0.7 * count - 0.4 * (count > 0)))
            weight *= row[text[at]] / sum(row)
        law.append(weight)
    return np.array(law)


def _counts(**options: object) -> np.ndarray:
    params = [scripts.sampled(seed, 3, **PENALTIES) for seed in range(600)]
    with _engine(rows=ROWS, branches=4, **options) as engine:
        outputs = engine.generate([PROMPT] * len(params), params)
    return scripts.joint(np.array([output.token_ids for output in outputs]), V)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_penalties_keep_the_law_of_plain_decoding(rule: str) -> None:
    assert oracles.follows(_counts(rule=rule), _penalized_law(3))


def test_penalties_applied_once_per_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    edit_rows = processors.edit_rows

    def wrong(logits, editors, texts, drafts):
        once = [[*text] for text in texts]
        return edit_rows(logits, editors, once, [_Blind(draft) for draft in drafts])

    class _Blind(list):
        def __getitem__(self, index):
            return []  # what was drafted before the position

    monkeypatch.setattr("saguaro_runtime.verifier.edit_rows", wrong)
    assert not oracles.follows(_counts(), _penalized_law(3))


def _forced(prompt, new, logits):
    """One legal id at each position, which depends on every token before it."""
    only = (7 * sum(prompt) + sum((at + 1) * id for at, id in enumerate(new)) + len(new)) % V
    logits[torch.arange(V) != only] = -torch.inf
    return logits


MIXED = [
    SamplingParams(max_new_tokens=60, frequency_penalty=0.6),
    scripts.sampled(3, 60, temperature=0.7, presence_penalty=1.5, top_k=4),
    scripts.sampled(4, 60),
    scripts.sampled(4, 60, logits_processor=lambda prompt, new, row: row / (1 + len(new) % 3)),
    scripts.sampled(5, 60, repetition_penalty=1.3, logprobs=0),
]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_a_frequency_penalty_with_draft_equal_to_target_is_plain_decoding(
    method: str, rule: str
) -> None:
    """Greedy, by plain Python: the draft repeats itself, the text must not."""
    wanted: list[int] = []
    for _ in range(60):
        seen = [*PROMPT, *wanted]
        law = P[seen[-2] * V + seen[-1]].log().tolist()
        row = [z - 0.6 * wanted.count(id) for id, z in enumerate(law)]
        wanted.append(row.index(max(row)))
    params = SamplingParams(60, frequency_penalty=0.6)
    with _engine(P, method=method, rule=rule) as engine:
        output, free = engine.generate([PROMPT] * 2, [params, SamplingParams(60)])
    assert output.token_ids == wanted != free.token_ids


@pytest.mark.parametrize("draft", [P, Q], ids=["draft-is-target", "another-draft"])
def test_coupled_with_penalties_equals_plain_decoding(draft: torch.Tensor) -> None:
    texts = []
    for method in ("ar", "ssd"):
        with _engine(draft, rule="coupled", method=method) as engine:
            texts.append([its.token_ids for its in engine.generate([PROMPT] * 5, MIXED)])
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == 5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_ssd_equals_sd_with_penalties_on_any_lane(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.local_children(monkeypatch)  # what is sent is pickled, and that is all there is to it
    texts = []
    for method, lane in (("sd", "inline"), ("ssd", "inline"), ("ssd", "process")):
        with _engine(method=method, rule=rule, lane=lane) as engine:
            texts.append([its.token_ids for its in engine.generate([PROMPT] * 5, MIXED)])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_a_function_sees_the_tokens_before_each_position(method: str, temperature: float) -> None:
    wanted: list[int] = []
    for _ in range(30):
        wanted.append(int(_forced([3, 1], wanted, torch.zeros(V)).argmax()))
    params = scripts.sampled(1, 30, temperature=temperature, logits_processor=_forced)
    with _engine(method=method) as engine:
        output, other = engine.generate([[3, 1], [3, 1]], [params, SamplingParams(30)])
        alone = engine.generate([3, 1], SamplingParams(30))[0]
    assert output.token_ids == wanted
    assert other.token_ids == alone.token_ids != wanted


def test_a_function_that_raises_ends_its_own_request_where_the_text_needs_it() -> None:
    seen: list[list[int]] = []

    def fails(prompt, new, logits):
        seen.append([*new])
        if len(new) >= 5:
            raise ValueError("no sixth token")
        return logits

    refused = {"count": 0}

    def fails_on_drafts(prompt, new, logits):
        if list(new) != wanted[: len(new)]:
            refused["count"] += 1
            raise ValueError("not the text")
        return logits

    with _engine() as engine:
        wanted = engine.generate(PROMPT, SamplingParams(20))[0].token_ids
        params = [
            SamplingParams(20, logits_processor=fails),
            SamplingParams(20, logits_processor=fails_on_drafts),
            SamplingParams(20, logits_processor=lambda *_: torch.zeros(3)),
        ]
        one, two, three = engine.generate([PROMPT] * 3, params)
    assert one.token_ids == wanted[:5] and one.finish_reason == "error"
    assert one.error == "ValueError: no sixth token"
    assert two.token_ids == wanted and two.error is None and refused["count"] > 0
    assert three.token_ids == [] and "returned [3], want [5]" in three.error


def test_allowed_ids_and_shortest_length() -> None:
    with _engine() as engine:
        allowed = SamplingParams(40, temperature=1.0, allowed_token_ids=(1, 3))
        assert set(engine.generate(PROMPT, allowed)[0].token_ids) == {1, 3}
        for least in range(2 * K):
            stops = (0, 1, 2, 3)
            params = SamplingParams(20, 1.0, stop_token_ids=stops, min_new_tokens=least)
            ids = engine.generate(PROMPT, params)[0].token_ids
            assert ids[:least] == [4] * least and len(ids) > least
        with pytest.raises(ConfigError, match=r"allowed_token_ids.*0\.\.4"):
            engine.add(PROMPT, SamplingParams(allowed_token_ids=(5,)))


def test_stop_strings_before_the_shortest_length_are_text() -> None:
    class Letters:
        eos_token_id = None

        def decode(self, ids, skip_special_tokens=False) -> str:
            return "".join("abcde"[id] for id in ids)

    cycle = torch.full((V * V, V), 1e-9)
    for last in range(V):
        cycle[last::V, (last + 1) % V] = 1.0
    for least, text in ((0, ""), (2, ""), (3, "deabc"), (7, "deabc"), (8, "deabcdeabc")):
        params = SamplingParams(20, stop=("de", "xyzxyz"), min_new_tokens=least)
        with scripts.engine(
            scripts.model(cycle), scripts.model(Q), k=K, tokenizer=Letters()
        ) as engine:
            output = engine.generate(PROMPT, params)[0]
            assert output.text == text and output.finish_reason == "stop"
            assert "".join(engine.stream(PROMPT, params)) == text


@pytest.mark.parametrize("method", ["ar", "ssd"])
def test_logprobs_are_the_models_own_and_end_with_the_text(method: str) -> None:
    params = scripts.sampled(2, 30, logprobs=2, frequency_penalty=1.0, stop_token_ids=(0,))
    with _engine(method=method) as engine:
        outputs = engine.generate(
            [PROMPT] * 6, [*(params for _ in range(5)), scripts.sampled(1, 3)]
        )
    assert outputs[-1].logprobs is None
    for output in outputs[:-1]:
        text = [*PROMPT, *output.token_ids]
        assert len(output.logprobs) == len(output.token_ids)
        for at, its in enumerate(output.logprobs):
            law = P[text[at] * V + text[at + 1]].log()
            assert its.token == pytest.approx(float(law[text[at + 2]]), abs=1e-5)
            best = law.topk(2)
            assert list(its.top) == best.indices.tolist()
            assert list(its.top.values()) == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_new_tokens": -1}, {"min_new_tokens": 200}, {"repetition_penalty": 0.0},
        {"frequency_penalty": 101.0}, {"presence_penalty": float("nan")},
        {"allowed_token_ids": ()}, {"logits_processor": 3}, {"logprobs": -1},
    ],
)  # fmt: skip
def test_parameters_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)
