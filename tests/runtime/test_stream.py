"""The stream lane on GPUs that are not there: its text, its order and what the host waits for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pretend_cuda
import pytest
import scripts
import tiny_models
import torch

from saguaro_runtime import ConfigError, Engine, SamplingParams
from saguaro_runtime.lanes import StreamLane
from saguaro_runtime.models.draft import restrict_vocab

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [40] * 20, [3, 1]]
OPTIONS = {"k": 2, "branches": 4, "max_batch": 3, "max_tokens": 512, "prefill_chunk": 5}
PLAIN = [scripts.sampled(seed, 9, temperature=0.8 * (seed % 2)) for seed in range(len(PROMPTS))]
PLAIN[3] = scripts.sampled(3, 9, temperature=0.8, top_k=20)


def _engine(
    machine: pretend_cuda.Machine | None = None, *, draft_vocab: bool = False, **options: Any
) -> Engine:
    """An engine on the CPU, or on the first and the last GPU of a machine."""
    target = tiny_models.llama(scale=1.5)
    draft = tiny_models.llama(1, near=target, scale=1.5)
    if draft_vocab:
        restrict_vocab(draft, torch.arange(0, tiny_models.VOCAB, 2))
    if machine is None:
        return scripts.engine(target, draft, **(OPTIONS | options))
    machine.place(target, "cuda:0")
    machine.place(draft, f"cuda:{machine.devices - 1}")
    return scripts.engine(target, draft, impl="auto", **({"lane": "auto"} | OPTIONS | options))


def _texts(
    engine: Engine,
    prompts: Sequence[list[int]] = PROMPTS,
    params: Sequence[SamplingParams] = PLAIN,
) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with _engine() as engine:
        return _texts(engine)


@pytest.mark.parametrize("devices, peers", [(1, True), (2, True), (2, False)])
def test_text_order_and_waits(
    devices: int, peers: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all lengths join and leave. The text is that of one thread on a CPU, no access
    races with another, and the host waits for copies that it was promised and for nothing else: the
    outcome, and what the draft had predicted before it began the branches."""
    with pretend_cuda.Machine(monkeypatch, devices=devices, peers=peers) as machine:
        with _engine(machine) as engine:
            assert isinstance(engine.lane, StreamLane)
            machine.waits.clear()
            texts = _texts(engine)
            waits = dict(machine.waits)
            stats = engine.stats()
        machine.sweep()
    assert stats["speculation"] == "on", stats["draft_faults"]
    assert texts == expected
    assert stats["hits"] > 0 and stats["misses"] > 0
    assert not machine.races, machine.races[:5]
    rounds = len([span for span in engine.spans if span.name == "verify"])
    assert set(waits) == {"event"} and rounds < waits["event"] <= 2 * rounds
    assert stats["t_verify_ms"] > 0 and stats["t_look_ahead_ms"] > 0


@pytest.mark.parametrize("dropped, count", [(2, 1), (3, 1), (4, 1), (8, 40)])
def test_a_wait_that_is_left_out_is_found(
    dropped: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control. The first waits are for the buffers, which the host has waited for before, for
    the chains, the outcome, and what the draft had predicted."""
    with (
        pretend_cuda.Machine(monkeypatch, devices=2) as machine,
        _engine(machine, cuda_graphs=False) as engine,
    ):
        machine.dropped = {machine.event_waits + dropped + index for index in range(count)}
        _texts(engine, PROMPTS[:1], PLAIN[1:2])
    assert machine.races


def _delayed(machine: pretend_cuda.Machine, drop: int = 0, **options: Any) -> Any:
    """What a few rounds of two requests queued, one of the waits left out."""
    with _engine(machine, max_batch=2, **options) as engine:
        machine.dropped = {machine.event_waits + drop} if drop else set()
        with machine.delayed() as log:
            engine.generate(PROMPTS[:2], [scripts.sampled(1, 5), scripts.sampled(2, 5)])
    return log


@pytest.mark.parametrize("peers, graphs", [(True, True), (False, False)])
def test_the_same_under_random_delays(
    peers: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of both devices and of the host again, in orders that waits and events allow: the
    host reads the same values."""
    with pretend_cuda.Machine(monkeypatch, devices=2, peers=peers) as machine:
        log = _delayed(machine, cuda_graphs=graphs)
    assert len({entry.actor for entry in log.entries}) >= 3
    for seed in range(3):
        assert log.run_again(random.Random(seed)) > len(log.entries) // 10


@pytest.mark.parametrize("drop", [3, 6])
def test_a_delay_shows_a_wait_that_is_left_out(drop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the host does not wait for the first outcome, the target not for the first
    chains with drafts."""
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        log = _delayed(machine, drop, cuda_graphs=False)
    with pytest.raises(AssertionError, match="another value"):
        for seed in range(10):
            log.run_again(random.Random(seed))


@pytest.mark.parametrize(
    "options",
    [
        {"fallback": "partial_accept", "proposal": "ngram"},
        {"fallback": "partial_accept", "proposal": "replay", "allocation": "histogram"},
        {"fallback": "independent", "downweight": 0.8, "ranking": "probability"},
        {"fallback": "batched_retry", "rule": "coupled", "draft_vocab": True},
        {"fallback": "immediate_retry", "method": "sd", "rule": "block"},
        {"method": "ar"},
        {"lane": "inline", "fallback": "partial_accept"},
    ],
    ids=lambda its: "-".join(map(str, its.values())),
)
def test_every_way_on_after_a_miss(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is mixed across devices, nothing races and nothing waits on the rarer paths; without
    graphs. A map of the vocabulary crosses to the target's device."""
    options = {"policy": "fixed", "reproducible": False, "cuda_graphs": False} | options
    prompts, params = [[7, 8] * 6, [5]], [PLAIN[0], PLAIN[1]]
    with _engine(**({"lane": "inline"} | options)) as engine:
        expected = _texts(engine, prompts, params)
    devices = 2 if "draft_vocab" in options else 1
    with pretend_cuda.Machine(monkeypatch, devices=devices) as machine:
        with _engine(machine, **options) as engine:
            machine.waits.clear()
            texts = _texts(engine, prompts, params)
            waits, stats = set(machine.waits), engine.stats()
        machine.sweep()
    assert stats["speculation"] in ("on", "off") and not stats["draft_faults"]
    assert texts == expected
    assert not machine.races, machine.races[:5]
    assert waits == {"event"}


def test_penalties_masks_and_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(6, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2),
        SamplingParams(6, allowed_token_ids=tuple(range(50)), min_new_tokens=2, logprobs=1),
    ]
    with _engine() as engine:
        expected = engine.generate(PROMPTS[:2], params)
    with pretend_cuda.Machine(monkeypatch) as machine, _engine(machine) as engine:
        found = engine.generate(PROMPTS[:2], params)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [logprob.top.keys() for logprob in one.logprobs] == [
            logprob.top.keys() for logprob in other.logprobs
        ]
    assert not machine.races, machine.races[:5]


def test_n_grams_on_the_target_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = tiny_models.llama(scale=1.5), [[7, 8, 9] * 5]
    with scripts.engine(target, "ngram", **OPTIONS) as engine:
        expected = _texts(engine, prompt, PLAIN[:1])
    with pretend_cuda.Machine(monkeypatch) as machine:
        machine.place(target, "cuda:0")
        with scripts.engine(target, "ngram", **(OPTIONS | {"lane": "auto", "impl": "auto"})) as its:
            assert _texts(its, prompt, PLAIN[:1]) == expected
            assert its.stats()["drafted"] > 0
    assert not machine.races, machine.races[:5]


def test_the_target_goes_on_where_the_draft_s_device_is_full(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine, _engine(machine) as engine:
        tree, calls = engine.lane.speculator.model.decode_tree, []

        def decode_tree(*args: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return tree(*args)

        engine.lane.speculator.model.decode_tree = decode_tree
        assert _texts(engine, PROMPTS[:2], PLAIN[:2]) and len(calls) == 4
        texts, stats = _texts(engine, PROMPTS[:1], PLAIN[:1]), engine.stats()
    assert texts == expected[:1]  # greedy, so the same without a draft
    assert "out of memory" in stats["speculation"] and len(stats["draft_faults"]) == 1
    assert not machine.races, machine.races[:5]


@pytest.mark.parametrize(
    "where, lane, words",
    [
        (("cuda:0", "cpu"), "auto", "both on GPUs"),
        (("cuda:0", "cuda:1"), "inline", "want 'stream' for two devices"),
        (("cuda:0", "cuda:0"), "process", "lane: got 'process'"),
        (("cpu", "cpu"), "stream", "lane: got 'stream'"),
    ],
)
def test_lanes_that_cannot_be(
    where: tuple[str, str], lane: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        models = [machine.place(tiny_models.llama(seed), its) for seed, its in enumerate(where)]
        with pytest.raises(ConfigError, match=words):
            scripts.engine(*models, **(OPTIONS | {"lane": lane, "impl": "auto"}))
