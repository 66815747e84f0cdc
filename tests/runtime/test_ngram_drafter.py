"""Drafting without a model: exact laws, the target's own text, and what "ssd" means with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scripts
import tiny_models
import torch

import oracles
from saguaro_kernels import Keys, Stream, _launch
from saguaro_kernels.errors import UnsupportedError
from saguaro_kernels.rng import uniform_reference
from saguaro_runtime import SamplingParams, cli
from saguaro_runtime.integrations.candidates import SaguaroCandidateGenerator
from saguaro_runtime.ngram import NgramDrafter
from saguaro_runtime.round import Reply, Turn

GOLDEN = oracles.load_golden()
ROWS = 256


def sampled_counts(rule: str, drafter: type[NgramDrafter] | None = None) -> tuple[Any, Any]:
    """First tokens after a prompt whose end is found earlier in it, with a likely continuation."""
    case = GOLDEN["markov2-V4-K2"]
    law = np.array(case["target_joint"]).reshape((case["V"],) * case["L"])
    likely = list(np.unravel_index(law.argmax(), law.shape))
    target = scripts.model(scripts.law_of_two(case["p"], case["V"]), ROWS)
    batch = {"max_batch": ROWS, "max_tokens": ROWS * 128, "k": 3, "rule": rule}
    with scripts.engine(target, "ngram", **batch) as engine:
        if drafter:
            engine.lane.speculator.__class__ = drafter
        prompt = [*case["start"], *likely, *case["start"]]
        tokens = scripts.texts(engine, prompt, 1500, case["L"])
        return scripts.joint(tokens, case["V"]), engine.stats()


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_first_tokens_follow_the_golden_law(rule: str) -> None:
    counts, stats = sampled_counts(rule)
    assert 300 < stats["accepted"] < stats["drafted"] - 300
    assert oracles.follows(counts, np.array(GOLDEN["markov2-V4-K2"]["target_joint"]))


class Peeks(NgramDrafter):
    """Wrong: it proposes where the number that will judge the proposal is kind to it."""

    def next_chain(self, turn: Turn) -> Reply:
        reply = super().next_chain(turn)
        keys = Keys(self.seeds[turn.rows], turn.base)
        kind = uniform_reference(keys, 0, Stream.ACCEPT) < 0.5
        self.chain.num_draft[turn.rows] *= kind
        return reply

    def admit(self, admissions: list) -> None:
        super().admit(admissions)
        if not hasattr(self, "seeds"):
            self.seeds = torch.zeros(ROWS, dtype=torch.int64)
        for new in admissions:
            self.seeds[new.row] = new.params.seed


def test_a_proposal_that_depends_on_its_judge_is_caught() -> None:
    counts, _ = sampled_counts("token", Peeks)
    assert not oracles.follows(counts, np.array(GOLDEN["markov2-V4-K2"]["target_joint"]))


LAW = scripts.random_law(5, seed=1) ** 4
LAW = LAW / LAW.sum(-1, keepdim=True)
PROMPTS = [[0, 1, 2, 3, 0, 1], [4, 4], [2]]


def texts(
    params: SamplingParams, draft: str | None = "ngram", **options: object
) -> list[list[int]]:
    with scripts.engine(scripts.model(LAW), draft, **({"method": "sd"} | options)) as engine:
        return [out.token_ids for out in engine.generate(PROMPTS, params)]


def test_greedy_text_is_the_targets_in_fewer_rounds() -> None:
    greedy = SamplingParams(40)
    with scripts.engine(scripts.model(LAW), "ngram", method="sd", k=4) as engine:
        outputs = engine.generate(PROMPTS, greedy)
        stats = engine.stats()
    assert [out.token_ids for out in outputs] == texts(greedy, None, method="ar")
    # A greedy chain of two tokens soon goes round and round.
    assert stats["tokens_per_round"] > 2 and stats["speculation"] == "on"
    assert sum(len(out.token_ids) for out in outputs) == 120 == stats["tokens"]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_seeds_text_is_the_same_alone_and_in_a_batch(rule: str) -> None:
    params = scripts.sampled(7, 40)
    together = texts(params, rule=rule)
    assert together == texts(params, rule=rule, max_batch=1)
    if rule == "coupled":
        assert together == texts(params, None, method="ar", rule=rule)


def test_ssd_is_sd() -> None:
    params = scripts.sampled(7, 40)
    with scripts.engine(scripts.model(LAW), "ngram", method="ssd") as engine:
        assert engine.config.method == "sd"
        found = [out.token_ids for out in engine.generate(PROMPTS, params)]
        stats = engine.stats()
    assert found == texts(params)
    assert stats["hits"] == stats["misses"] == 0 and stats["accepted"] > 0


def test_rows_are_used_again_without_their_old_texts() -> None:
    greedy = SamplingParams(12)
    with scripts.engine(scripts.model(LAW), "ngram", method="sd", max_batch=1) as engine:
        long = engine.generate([0, 1, 2] * 30, greedy)[0].token_ids
        short = engine.generate([3], greedy)[0].token_ids
    with scripts.engine(scripts.model(LAW), None, method="ar") as engine:
        assert engine.generate([0, 1, 2] * 30, greedy)[0].token_ids == long
        assert engine.generate([3], greedy)[0].token_ids == short


def test_the_command_and_the_loops_of_others(
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    target = tiny_models.llama(1)
    folder = tiny_models.save(tmp_path_factory.mktemp("target"), target)
    line = ["generate", "--target", folder, "--prompt", "ab ab ab", "--max-new-tokens", "24"]
    assert cli.main([*line, "--draft", "ngram", "--stats"]) == 0
    found = capsys.readouterr()
    assert "tokens per round" in found.err
    assert cli.main([*line, "--method", "ar"]) == 0
    assert capsys.readouterr().out == found.out
    with pytest.raises(UnsupportedError, match="ngram"):
        SaguaroCandidateGenerator("ngram", target)
