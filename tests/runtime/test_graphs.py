"""CUDA graphs on GPUs that are not there: the text, what is captured, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pretend_cuda
import pytest
import scripts
import tiny_models
import torch
import transformers

from saguaro_runtime import ConfigError, Engine, EngineConfig
from saguaro_runtime.graphs import Graphs
from saguaro_runtime.transfer import CPU, Seat

K, BRANCHES, ROWS = 2, 4, 5
BATCHES = (1, 2, 4, 5)
PROMPTS = [[5, 6, 7], [1], list(range(12)), [40] * 20, [3, 1], [8], [2, 2]]
JOINS = (0, 0, 1, 3, 4, 5, 9)
"""The round before which each request is added."""
LENGTHS = (12, 30, 4, 9, 12, 3, 8)


def _engine(
    machine: pretend_cuda.Machine | None, spoil: Any = None, target: Any = None, **options: Any
) -> Engine:
    target = target or tiny_models.llama(scale=1.5)
    draft = tiny_models.llama(1, near=tiny_models.llama(scale=1.5), scale=1.5)
    draft = draft.to(target.dtype)
    if spoil is not None:
        draft.model.layers[0].register_forward_hook(spoil)
    settings = {"k": K, "branches": BRANCHES, "max_batch": ROWS, "max_tokens": 512}
    if machine is not None:
        machine.place(target, "cuda:0")
        machine.place(draft, f"cuda:{machine.devices - 1}")
        settings |= {"lane": "auto", "impl": "auto"}
    return scripts.engine(target, draft, **(settings | options))


def _texts(engine: Engine) -> list[list[int]]:
    """Requests that join, leave and are cancelled, greedy and sampled."""
    requests: list[Any] = []
    for step in range(200):
        for index, join in enumerate(JOINS):
            if join == step:
                its = scripts.sampled(index, LENGTHS[index], temperature=0.8 * (index % 2))
                requests.append(engine.add(PROMPTS[index], its))
        if step == 7:
            engine.cancel(requests[1])
        if len(requests) == len(JOINS) and all(its.finish_reason for its in requests):
            return [its.token_ids for its in requests]
        engine.step()
    raise AssertionError("not all requests ended")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with _engine(None) as engine:
        assert engine.stats()["cuda_graphs"] == {}  # no GPU, no graphs
        return _texts(engine)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_text_is_the_same(
    graphs: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of 1 to 5. All buckets are captured before the first request, none after, and
    every forward but the prompts' is a replay."""
    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        with _engine(machine, cuda_graphs=graphs) as engine:
            captures, machine.replays = machine.captures, 0
            machine.waits.clear()
            texts = _texts(engine)
            waits, stats = set(machine.waits), engine.stats()
            page = engine.prometheus()
        machine.sweep()
    assert texts == expected
    assert not machine.races, machine.races[:5]
    assert waits == {"event"} and stats["hits"] > 0 and stats["misses"] > 0
    assert {span.rows for span in engine.spans if span.name == "feed_last"} == {1, 2, 3, 4, 5}
    assert machine.captures == captures
    found = stats["cuda_graphs"]
    if not graphs:
        assert captures == machine.replays == 0 and found == {}
        return
    assert found["target"]["captured"] == 2 * len(BATCHES)  # a token, a chain
    assert found["draft"]["captured"] == 3 * len(BATCHES)  # and a step of the tree
    assert captures == 5 * len(BATCHES)
    assert f"saguaro_cuda_graphs {captures}\n" in page
    assert {(its["eager"], its["why"]) for its in found.values()} == {(0, None)}
    assert machine.replays > 50


def _waits(module: Any, given: Any, output: Any) -> None:
    states = output[0] if isinstance(output, tuple) else output
    assert states.sum().item() != 0


KEPT: list[torch.Tensor] = []


def _keeps(module: Any, given: Any, output: Any) -> None:
    KEPT.append(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize(
    "spoil, words", [(_waits, "makes the host wait"), (_keeps, "kept by somebody")]
)
def test_what_cannot_be_captured_runs_as_it_is(
    spoil: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is named once, and the target keeps its graphs."""
    with _engine(None, max_batch=1) as engine:
        expected = engine.generate(PROMPTS[0], scripts.sampled(0, 6))[0].token_ids
    with pretend_cuda.Machine(monkeypatch) as machine:
        with pytest.warns(UserWarning, match="no CUDA graphs for the draft, Llama") as warned:
            engine = _engine(machine, spoil, max_batch=1)
        with engine:
            text = engine.generate(PROMPTS[0], scripts.sampled(0, 6))[0].token_ids
            stats = engine.stats()
    KEPT.clear()
    assert text == expected and stats["speculation"] == "on"
    target, draft = stats["cuda_graphs"]["target"], stats["cuda_graphs"]["draft"]
    assert words in draft["why"] and words in str(warned[0].message) and len(warned) == 1
    assert draft["captured"] == draft["replayed"] == 0 < draft["eager"]
    assert target["captured"] > 0 == target["eager"] and target["why"] is None


def _mixture(experts: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=256, experts_implementation=experts, eos_token_id=None,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(dtype)
    model.generation_config.eos_token_id = None
    model.lm_head.weight.data.mul_(4.0)
    return model


@pytest.mark.parametrize(
    "experts, dtype", [("batched_mm", torch.float32), ("grouped_mm", torch.bfloat16)]
)
def test_a_mixture_of_experts_is_captured(
    experts: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for graphs in (False, True):
        target = _mixture(experts, dtype)
        options = {"target": target, "max_batch": 1, "cuda_graphs": graphs}
        with pretend_cuda.Machine(monkeypatch) as machine, _engine(machine, **options) as engine:
            texts.append(engine.generate(PROMPTS[0], scripts.sampled(0, 12))[0].token_ids)
            found = engine.stats()["cuda_graphs"]
    assert texts[0] == texts[1] and len(set(texts[0])) > 3
    assert found["target"]["captured"] == 2 and found["target"]["replayed"] > 3
    assert {its["eager"] for its in found.values()} == {0}


@pytest.mark.parametrize(
    "experts, words",
    [("eager", "nonzero makes the host wait"), ("grouped_mm", "_grouped_mm of torch.float32")],
)
def test_a_mixture_of_experts_whose_sizes_the_host_reads_runs_as_it_is(
    experts: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' loop over experts, and torch's where it has no kernel for the type."""
    target = _mixture(experts, torch.float32)
    with _engine(None, target=target, max_batch=2) as engine:
        prompts, params = PROMPTS[:2], [scripts.sampled(0, 12), scripts.sampled(1, 9)]
        expected = [its.token_ids for its in engine.generate(prompts, params)]
    with pretend_cuda.Machine(monkeypatch) as machine:
        match = f"no CUDA graphs for the target, MixtralForCausalLM: {words}"
        with pytest.warns(UserWarning, match=match):
            engine = _engine(machine, target=target, max_batch=2)
        with engine:
            texts = [its.token_ids for its in engine.generate(prompts, params)]
            found = engine.stats()["cuda_graphs"]
    assert texts == expected
    assert found["target"]["captured"] == found["target"]["replayed"] == 0
    assert found["target"]["eager"] > 0 == found["draft"]["eager"]


def test_memory_that_a_graph_reads_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: buffers that are replaced after the capture."""
    with pretend_cuda.Machine(monkeypatch) as machine:
        with _engine(machine, method="ar", max_batch=1) as engine:
            (graph,) = engine.model._graphs.values()
            engine.generate(PROMPTS[0], scripts.sampled(0, 2))
            before = graph.inputs[1]
            graph.inputs[1] = before.clone()
            engine.generate(PROMPTS[0], scripts.sampled(0, 2))  # the old one lives: nothing freed
            del before
            with pytest.raises(RuntimeError, match="given back"):
                engine.generate(PROMPTS[0], scripts.sampled(0, 2))
        with _engine(machine, method="ar", max_batch=1) as engine:
            engine.model.model.kv.page_table = engine.model.model.kv.page_table.clone()
            with pytest.raises(RuntimeError, match="given back"):
                engine.generate(PROMPTS[0], scripts.sampled(0, 2))


def test_a_model_without_a_spare_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scripts.model(scripts.random_law(5, seed=1))
    with pretend_cuda.Machine(monkeypatch):
        graphs = Graphs(model, Seat(CPU), "target", rows=4, widths=(1, 3))
        with pytest.warns(UserWarning, match="for the target, ScriptedModel: it has no spare row"):
            graphs.warm_up()
        rows, tokens = torch.arange(2), torch.ones(2, 3, dtype=torch.int64)
        logits = graphs.extend(rows, tokens, torch.zeros(2, dtype=torch.int32))
    assert logits.shape == (2, 3, 5)
    assert graphs.report() | {"why": ""} == {"captured": 0, "replayed": 0, "eager": 1, "why": ""}


def test_any_k_of_the_policy_has_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"policy": "auto", "reproducible": False, "max_batch": 1}
    with pretend_cuda.Machine(monkeypatch) as machine, _engine(machine, **options) as engine:
        assert engine.stats()["cuda_graphs"]["target"]["captured"] == K + 1
        assert len(engine.generate(PROMPTS[0], scripts.sampled(0, 12))[0].token_ids) == 12
        stats = engine.stats()
    assert stats["speculation"] == "on" and stats["cuda_graphs"]["target"]["eager"] == 0


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs: got 'auto', want True or False"):
        EngineConfig(cuda_graphs="auto")  # type: ignore[arg-type]
