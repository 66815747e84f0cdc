"""Drafting ahead in the steady round: what a graph could capture waits for nothing, and launches
the same kernels every time."""

from __future__ import annotations

from typing import Any

import pytest
import scripts
import torch

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
