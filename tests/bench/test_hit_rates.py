"""The measurement of hit rates on tiny models: against an engine that really drafts ahead."""

from __future__ import annotations

import json

import pytest
import scripts
import torch
import transformers

from bench import hit_rates
from saguaro_runtime import SamplingParams

P = scripts.random_law(9, seed=1)
Q = scripts.random_law(9, seed=2, near=P)
PROMPTS = [[1, 2], [3, 4, 5], [6]]


def _llama(layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(layers)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rates_are_those_of_an_engine_that_drafts_ahead(temperature: float) -> None:
    """One pass over standard SD predicts as SSD does, ranking by ranking."""
    cells = hit_rates.measure_rates(
        scripts.model(P), scripts.model(Q), PROMPTS,
        temperature=temperature, tokens=30, k=3, branches=5, batch=2, min_rounds=1,
    )  # fmt: skip
    assert len(cells) == len(hit_rates.RANKINGS) * len(hit_rates.ALLOCATIONS)
    params = [SamplingParams(30, temperature, seed=seed) for seed in range(3)]
    for cell in cells:
        if temperature == 0:  # there are no dice to know
            twin = next(its for its in cells if its["allocation"] == cell["allocation"])
            assert cell["hits"] == twin["hits"]
        options = {name: cell[name] for name in ("ranking", "allocation")}
        with scripts.engine(
            scripts.model(P), scripts.model(Q), rule="block", k=3, branches=5, max_batch=2,
            **options,
        ) as engine:  # fmt: skip
            engine.generate(PROMPTS, params)
            stats = engine.stats()
        assert (cell["hits"], cell["rounds"]) == (stats["hits"], stats["hits"] + stats["misses"])


def test_a_model_without_layers_is_the_rest_of_it() -> None:
    model = _llama(4)
    smaller = hit_rates.without_layers(model, (1, 2))
    assert smaller.config.num_hidden_layers == 2
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        layers = model.model.layers
        model.model.layers = torch.nn.ModuleList([layers[0], layers[3]])
        torch.testing.assert_close(smaller(ids).logits, model(ids, use_cache=False).logits)
        steps = hit_rates.measure_tree_steps(smaller, (2, 3), trunk=8, repeats=1, draft_len=2)
    assert [step["branches"] for step in steps] == [2, 3]
    assert all(step["ratio"] > 0 for step in steps)


def test_cells_are_kept_and_only_the_missing_are_computed(tmp_path) -> None:
    path = tmp_path / "rates.json"
    settings = {
        "temperatures": [0.0, 1.0], "tokens": 8, "k": 2, "branches": 3, "batch": 2,
        "min_rounds": 1, "tree_sizes": [2], "trunk": 4, "repeats": 1,
    }  # fmt: skip
    draft = _llama(1)
    pairs = [("tiny", _llama(2), draft)]
    hit_rates.cells(hit_rates.Results(path, settings), iter(pairs), PROMPTS)
    data = json.loads(path.read_text())
    assert len(data["rates"]) == 2 * 6 and len(data["tree_steps"]) == 1
    data["rates"][0]["hit_rate"] = 0.123
    data["rates"] = data["rates"][:6]
    path.write_text(json.dumps(data))
    hit_rates.cells(hit_rates.Results(path, settings), iter(pairs), PROMPTS)
    again = json.loads(path.read_text())
    assert again["rates"][0]["hit_rate"] == 0.123 and len(again["rates"]) == 12
    assert "hit rate" in hit_rates.render(again)
    other = hit_rates.Results(path, settings | {"tokens": 9})
    assert not other.data["rates"]
