"""Drafts for transformers' own assisted loop: its text, its law, our branches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tiny_models
import torch

from saguaro_kernels import Keys, Stream
from saguaro_kernels.rng import gumbel_reference
from saguaro_runtime import ConfigError, EngineConfig
from saguaro_runtime.integrations.candidates import SaguaroCandidateGenerator

CONFIG = EngineConfig(k=3, branches=4, lane="inline", impl="reference", max_tokens=32)
TARGET = tiny_models.llama()
DRAFT = tiny_models.llama(1, near=TARGET)
PROMPT = tiny_models.tokenizer()("speculate", return_tensors="pt")["input_ids"]


def generate(**options: Any) -> Any:
    return TARGET.generate(PROMPT, **({"do_sample": False, "max_new_tokens": 16} | options))


def test_greedy_text_with_hits() -> None:
    drafter = SaguaroCandidateGenerator(DRAFT, TARGET, config=CONFIG)
    with drafter.attached():
        for _ in range(2):  # the second sequence starts from its prompt again
            assert torch.equal(generate(assistant_model=DRAFT), generate())
        long = generate(assistant_model=DRAFT, max_new_tokens=30)
    assert torch.equal(long, generate(max_new_tokens=30))
    assert drafter._drafter is not None and drafter._drafter.lane.off is None
    names = {span.name for span in drafter._drafter.lane.spans()}
    assert {"promote", "tree_step", "draft_step"} <= names
    assert "_get_candidate_generator" not in vars(TARGET)
    drafter.close()


def test_candidates_follow_what_was_accepted() -> None:
    drafter = SaguaroCandidateGenerator(TARGET, TARGET, config=CONFIG)
    text, accepted = PROMPT, 0
    greedy = generate(max_new_tokens=20)
    assert drafter.get_candidates(text)[0] is text
    while text.shape[1] < greedy.shape[1] - 5:
        text = greedy[:, : text.shape[1] + 1]
        candidates, logits = drafter.get_candidates(text)
        assert logits is None
        # Draft = target: every candidate is the greedy text's next token.
        assert torch.equal(candidates, greedy[:, : candidates.shape[1]])
        accepted += candidates.shape[1] - text.shape[1]
        text = candidates
    assert accepted >= 3
    drafter.close()


def test_sampled_candidates_are_drawn_from_the_logits_they_come_with() -> None:
    """Then the loop's own rule keeps the law. Each is the Gumbel-argmax of its row, filters on."""
    drafter = SaguaroCandidateGenerator(DRAFT, TARGET, config=CONFIG, seed=7)
    proper, seen = drafter.get_candidates, 0

    def checked(input_ids: torch.Tensor, **its: Any) -> Any:
        nonlocal seen
        candidates, logits = proper(input_ids, **its)
        base = input_ids.shape[1]
        keys = Keys(torch.tensor([7]), torch.tensor([base]))
        for offset, token in enumerate(candidates[0, base:].tolist()):
            row = logits[0, offset].log_softmax(-1)
            assert logits.shape[2] == tiny_models.VOCAB and int((row > -torch.inf).sum()) == 4
            noise = gumbel_reference(keys, offset, Stream.DRAFT, len(row))[0]
            assert token == int((row + noise).argmax())
            seen += 1
        return candidates, logits

    drafter.get_candidates = checked  # type: ignore[method-assign]
    torch.manual_seed(0)
    with drafter.attached():
        generate(assistant_model=DRAFT, do_sample=True, top_k=4, temperature=0.8)
    assert seen >= 8
    drafter.close()


def test_what_does_not_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="method"):
        SaguaroCandidateGenerator(DRAFT, TARGET, config=dataclasses.replace(CONFIG, method="ar"))
