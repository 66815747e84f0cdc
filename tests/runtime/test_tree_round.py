"""Drafting ahead in the steady round: what a graph could capture waits for nothing, and launches
the same kernels every time."""

from __future__ import annotations

from typing import Any

import pytest
import scripts
import torch
import transformers

from bench.traffic import Meter
from saguaro_runtime.models.scripted import ScriptedModel
from saguaro_runtime.round import Admission, Decision, Turn
from saguaro_runtime.speculator import Speculator

P = scripts.random_law(9, seed=1)
K, M, ROWS = 2, 3, 2


class _Unmetered(ScriptedModel):
    """A model's own work is its own affair."""

    meter: Meter | None = None

    def _call(self, name: str, *args: Any) -> Any:
        meter, self.meter = self.meter, None
        if meter is not None:
            meter._in_kernel = True
        result = getattr(super(), name)(*args)
        if meter is not None:
            meter._in_kernel = False
        self.meter = meter
        return result

    def extend(self, *args: Any) -> Any:
        return self._call("extend", *args)

    def decode_tree(self, *args: Any) -> Any:
        return self._call("decode_tree", *args)

    def promote(self, *args: Any) -> Any:
        return self._call("promote", *args)


def _turn(number: int, base: list[int], last: list[int], accepted: list[int]) -> Turn:
    return Turn(
        number=number,
        decision=Decision(draft_len=K, branches=M, retry=K, ranking="noise"),
        rows=torch.arange(ROWS),
        uid=torch.arange(ROWS),
        base=torch.tensor(base),
        last=torch.tensor(last),
        accepted=torch.tensor(accepted, dtype=torch.int32),
        budget=torch.full((ROWS,), K, dtype=torch.int32),
    )


@pytest.mark.parametrize("allocation", ["best", "histogram"])
def test_a_steady_round_waits_for_nothing_and_repeats_its_launches(allocation: str) -> None:
    model = _Unmetered(P, rows=ROWS)
    speculator = Speculator(
        model, rows=ROWS, draft_len=K, branches=M, allocation=allocation, impl="triton"
    )
    prompts = [[1, 2, 3], [4, 5, 6]]
    speculator.admit(
        [Admission(row, prompts[row], scripts.sampled(row, 100), 200) for row in range(ROWS)]
    )
    base, last, accepted = [3, 3], [3, 6], [-1, -1]
    rounds = []
    for number in range(1, 4):
        turn = _turn(number, base, last, accepted)
        meters = Meter(), Meter()
        model.meter = meters[0]
        with torch.no_grad(), meters[0]:
            reply = speculator.next_chain(turn)
        model.meter = meters[1]
        with torch.no_grad(), meters[1]:
            speculator.look_ahead()
        model.meter = None
        rounds.append((bool(reply.hit.all()), *meters))
        # The next outcome is the first one prepared, so every later round hits.
        depth, store = speculator.branches.predictor.depth, speculator.branches.cache
        rows = store.key_rows.view(ROWS, M, -1)
        accepted = depth[:, 0].tolist()
        last = rows[:, 0, 4].tolist()
        base = [before + count + 1 for before, count in zip(base, accepted, strict=True)]
    assert [hit for hit, *_ in rounds] == [False, True, True]
    for _, answer, ahead in rounds[2:]:
        assert answer.syncs <= 1, [(e.name, e.syncs) for e in answer.events if e.syncs]
        assert ahead.syncs == 0, ahead.kernels
        steady = [event.name for event in ahead.events if event.kind != "torch"]
        assert steady == [event.name for event in rounds[1][2].events if event.kind != "torch"]
        assert sum("scan" in name for name in steady) >= K  # the draws of each tree step
        assert any("insert" in name for name in steady)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_hits_the_keys_are_those_of_a_fresh_forward(temperature: float) -> None:
    """Two layers, so that keys depend on all that was seen: of target and draft, after every round
    of hits and misses."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(4.0)
    options = {"k": 3, "branches": 6, "max_batch": 1, "ranking": "probability"}
    with scripts.engine(model, model, **options) as engine:
        request = engine.add([5, 6, 7], scripts.sampled(3, 100, temperature=temperature))
        drafter = engine.lane.speculator.drafter
        checked = 0
        for _ in range(24):
            engine.step()
            text = [*request.prompt, *request.token_ids]
            # What was drafted and not kept, and the last token, have no keys that count.
            sizes = len(text) - 1, min(len(text) - 1, int(drafter.fed[0]))
            with torch.no_grad():
                fresh = model(torch.tensor([text]), use_cache=True).past_key_values
            for side, size in zip((engine.model, drafter.model), sizes, strict=True):
                kv, slots = side.kv, torch.arange(size)
                pages = kv.page_table[0, slots // kv.page_size].long()
                held = kv.data[:, :, pages, slots % kv.page_size]
                for layer, its in enumerate(fresh.layers):
                    for mine, wanted in zip(held[layer], (its.keys, its.values), strict=True):
                        wanted = wanted[0, :, :size].transpose(0, 1)
                        assert (mine - wanted).abs().max() <= 1e-5
                        checked += size
        stats = engine.stats()
    assert stats["hits"] >= 5 and checked > 1000
    assert temperature == 0 or stats["misses"] >= 2
