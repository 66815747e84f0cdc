"""Prompts are taken in by pieces; pages and slots are counted, and freed exactly once."""

from __future__ import annotations

import random

import pytest
import scripts
import torch

from saguaro_runtime import ConfigError, EngineConfig, SamplingParams
from saguaro_runtime.models.kv import PagedKV
from saguaro_runtime.models.scripted import ScriptedModel

P = scripts.random_law(5, seed=1)
PROMPT = [1, 2, 3, 4, 0, 2, 1, 1, 3, 0, 4]


class Recorded(ScriptedModel):
    """Remembers the pieces it was fed, and fails at one of them."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(P)
        self.pieces: list[tuple[int, int, int]] = []
        self.fails_at = fails_at

    def prefill(self, row: int, tokens: torch.Tensor, start: int = 0) -> None:
        self.pieces.append((row, start, len(tokens)))
        if len(self.pieces) == self.fails_at:
            raise RuntimeError("out of memory")
        super().prefill(row, tokens, start)


def test_a_long_prompt_does_not_hold_up_other_texts() -> None:
    """Three rounds while it is taken in, on both sides; then its drafts are all accepted."""
    target, draft = Recorded(), Recorded()
    with scripts.engine(target, draft, prefill_chunk=4) as engine:
        first = engine.add([1, 2], SamplingParams(60))
        engine.step()
        second = engine.add(PROMPT, SamplingParams(30))
        rounds = []
        while not second.token_ids:
            engine.step()
            rounds.append((len(first.rounds), engine.stats()["prefilling"]))
        assert rounds == [(2, 1), (3, 1), (4, 0)]
        while second.finish_reason is None:
            engine.step()
        alone = engine.generate(PROMPT, SamplingParams(30))[0]
    assert target.pieces[1:4] == draft.pieces[1:4] == [(1, 0, 4), (1, 4, 4), (1, 8, 2)]
    assert second.token_ids == alone.token_ids
    assert second.counts.accepted == second.counts.drafted > 0


def test_short_prompts_share_a_piece() -> None:
    target = Recorded()
    with scripts.engine(target, Recorded(), prefill_chunk=6) as engine:
        for prompt in ([1], [1, 2, 3], PROMPT, [3, 4]):
            engine.add(prompt, SamplingParams(20))
        engine.step()
        # The long one waits: its first piece would be cut by what the others left of it.
        assert target.pieces == [(1, 0, 2)] and engine.stats()["prefilling"] == 2
        engine.step()
        assert target.pieces[1:] == [(2, 0, 6)]
        engine.step()
        assert target.pieces[2:] == [(2, 6, 4), (3, 0, 1)] and engine.stats()["prefilling"] == 0


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_request_that_leaves_amid_its_prompt_frees_all_it_had(fails_at: int) -> None:
    """Cancelled, or out of memory at its second piece: nobody else is touched."""
    target = Recorded(fails_at)
    with scripts.engine(target, Recorded(), prefill_chunk=4, max_tokens=64) as engine:
        request = engine.add(PROMPT, SamplingParams(20))
        engine.step()
        waits = engine.add(PROMPT, SamplingParams(20))
        assert request.token_ids == []
        if fails_at:
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
            assert request.finish_reason == "error" and "out of memory" in request.error
        else:
            engine.cancel(request)
            assert request.finish_reason == "cancelled"
        assert engine.model.held == engine.lane.speculator.model.held == set()
        assert engine.stats()["slots_used"] == 0
        while waits.finish_reason is None:
            engine.step()
        assert len(waits.token_ids) == 20 and engine.stats()["slots_used"] == 0


def _pages(rows: int = 6, tokens: int = 640) -> PagedKV:
    return PagedKV(layers=1, kv_heads=1, head_dim=2, rows=rows, tokens=tokens)


def test_pages_are_given_once_and_freed_once() -> None:
    """Any order: no page has two owners, and all come back."""
    kv, dice, held = _pages(), random.Random(0), {}
    refused = 0
    for _ in range(400):
        row = dice.randrange(6)
        if row in held and dice.random() < 0.7:
            kv.release(row)
            del held[row]
        elif row in held:
            with pytest.raises(ConfigError, match="already holds"):
                kv.allocate(row, 64)
        else:
            tokens = dice.randrange(0, 260)
            if -(-tokens // 64) * 64 > kv.free_tokens:
                with pytest.raises(ConfigError, match=f"wants {tokens} slots, {kv.free_tokens}"):
                    kv.allocate(row, tokens)
                refused += 1
            else:
                kv.allocate(row, tokens)
                held[row] = -(-tokens // 64)
        owned = [page for its in held for page in kv.page_table[its, : held[its]].tolist()]
        assert len(owned) == len(set(owned)) == sum(held.values())
        assert kv.free_tokens == (10 - len(owned)) * 64
    for row in held:
        kv.release(row)
        with pytest.raises(ConfigError, match="holds no pages"):
            kv.release(row)
    assert kv.free_tokens == 640 and refused > 20


def test_more_memory_than_there_is_is_refused_by_its_size() -> None:
    with pytest.raises(ConfigError, match=r"slots of 6 rows take \d+\.\d GiB.*max_tokens"):
        _pages(tokens=1 << 50)


def test_requests_that_never_fit_are_refused_and_the_others_take_turns() -> None:
    with scripts.engine(scripts.model(P), scripts.model(P), max_tokens=40, max_batch=4) as engine:
        with pytest.raises(ConfigError, match="need 42 key-value slots, max_tokens=40"):
            engine.add([1, 2], SamplingParams(36))
        requests = [engine.add([1, 2], SamplingParams(20)) for _ in range(4)]
        while any(request.finish_reason is None for request in requests):
            engine.step()
            assert engine.stats()["running"] <= 1
        assert all(len(request.token_ids) == 20 for request in requests)


def test_the_size_of_a_piece_is_checked() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk"):
        EngineConfig(prefill_chunk=0)
