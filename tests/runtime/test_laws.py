"""The engine's output has the target's exact law, for every lane; wrong variants are caught."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scripts
import torch

import oracles
from saguaro_kernels import Keys, Stream
from saguaro_kernels.rng import gumbel_reference
from saguaro_runtime.round import Reply, Turn
from saguaro_runtime.speculator import Speculator

GOLDEN = oracles.load_golden()
ROWS = 256


def _engine(p: torch.Tensor, q: torch.Tensor, **options: object):
    batch = {"max_batch": ROWS, "max_tokens": ROWS * 128}
    return scripts.engine(scripts.model(p, ROWS), scripts.model(q, ROWS), **(batch | options))


CASES = [
    ("toy-2-of-3", "token", "probability", "uniform"),
    ("toy-2-of-3", "block", "noise", "uniform"),
    ("markov2-V4-K2", "token", "noise", "best"),
    ("markov2-V4-K2", "block", "probability", "best"),
    ("markov2-V4-K2", "block", "noise", "best"),
    ("markov2-V4-K2", "coupled", "coupled", "best"),
    ("zeros-and-equal-rows", "token", "noise", "uniform"),
    ("zeros-and-equal-rows", "block", "noise", "best"),
]


@pytest.mark.parametrize(("name", "rule", "ranking", "allocation"), CASES)
def test_first_tokens_follow_the_golden_law(
    name: str, rule: str, ranking: str, allocation: str
) -> None:
    case = GOLDEN[name]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    options = {"rule": rule, "ranking": ranking, "allocation": allocation}
    with _engine(p, q, k=case["K"], branches=2, **options) as engine:
        tokens = scripts.texts(engine, case["start"], 2000, case["L"])
        stats = engine.stats()
    # The coupled noise gives nearly every outcome away.
    assert stats["hits"] > 100 and stats["misses"] > (0 if rule == "coupled" else 20)
    counts = scripts.joint(tokens, case["V"])
    assert oracles.follows(counts, np.array(case["target_joint"]))


def test_first_tokens_follow_the_golden_law_across_processes(no_leaks: None) -> None:
    case = GOLDEN["markov2-V4-K2"]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    with _engine(p, q, k=case["K"], branches=2, lane="process") as engine:
        tokens = scripts.texts(engine, case["start"], 2000, case["L"])
        assert engine.stats()["hits"] > 100
    counts = scripts.joint(tokens, case["V"])
    assert oracles.follows(counts, np.array(case["target_joint"]))


class _LengthFromExtra(Speculator):
    """Wrong: the chain is cut where the extra token's noise promises a good one."""

    def next_chain(self, turn: Turn) -> Reply:
        reply = super().next_chain(turn)
        for row, base in zip(turn.rows.tolist(), turn.base.tolist(), strict=True):
            keys = Keys(self.drafter.table.seed[[row]], torch.tensor([base]))
            for length in range(int(self.chain.num_draft[row])):
                noise = gumbel_reference(keys, length, Stream.EXTRA, self.model.vocab_size)
                scores = self.chain.logits[row, length] + noise[0]
                if int(scores.argmax()) != int(self.chain.logits[row, length].argmax()):
                    self.chain.num_draft[row] = length
                    break
        return reply


class _DropsUnlikely(Speculator):
    """Wrong: a drafted token is dropped because of its own low probability."""

    def next_chain(self, turn: Turn) -> Reply:
        reply = super().next_chain(turn)
        for row in turn.rows.tolist():
            likely = self.chain.logq[row].exp() > 0.4
            first = int((~likely).int().argmax()) if not bool(likely.all()) else len(likely)
            self.chain.num_draft[row] = min(int(self.chain.num_draft[row]), first)
        return reply


CONTROLS = {
    "extra=draft": (None, 8000),
    "K from EXTRA": (_LengthFromExtra, 1500),
    "drop low-conf": (_DropsUnlikely, 1500),
}
"""The wrong variant, and draws that tell it from the right one at 1e-3 on the model made for it."""


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
def test_wrong_variants_are_caught(name: str, wrong: bool) -> None:
    control = next(
        its for its in oracles.load_controls() if its["control"] == name and its["rule"] == "token"
    )
    vocab, k = control["V"], control["K"]
    p, q = (scripts.law_of_two(control[law], vocab) for law in "pq")
    variant, draws = CONTROLS[name]
    with _engine(p, q, k=k, method="sd") as engine:
        if wrong and variant:
            engine.lane.speculator.__class__ = variant
        elif wrong:  # the tokens are drafted under the noise that will draw the extra token
            engine.lane.speculator.drafter.stream = Stream.EXTRA
        tokens = scripts.texts(engine, control["markov2_start"], draws, 1 + k)
    # The first round has no draft; the law of the round after it is that of tokens 1..k given
    # token 0.
    law = _joint_law(p, control["markov2_start"], 1 + k)
    caught = oracles.chi_square_p(scripts.joint(tokens, vocab), law) < 1e-3
    assert caught == wrong


def _joint_law(p: torch.Tensor, start: list[int], length: int) -> np.ndarray:
    """The law of the first `length` tokens of plain decoding, most significant first."""
    vocab, law = p.shape[1], {tuple(start): 1.0}
    for _ in range(length):
        law = {
            (*text, token): weight * float(p[text[-2] * vocab + text[-1], token])
            for text, weight in law.items()
            for token in range(vocab)
        }
    return np.array([law[text] for text in sorted(law)])


def test_greedy_rows_keep_the_target_text_whatever_the_draft() -> None:
    p = scripts.random_law(6, seed=3)
    outputs = {}
    for method in ("ar", "ssd"):
        with scripts.engine(
            scripts.model(p), scripts.model(scripts.random_law(6, 4)), method=method
        ) as e:
            greedy = dataclasses.replace(scripts.sampled(0, 50), temperature=0.0)
            outputs[method] = e.generate([[1, 2], [3, 4]], greedy)
    assert [o.token_ids for o in outputs["ar"]] == [o.token_ids for o in outputs["ssd"]]
