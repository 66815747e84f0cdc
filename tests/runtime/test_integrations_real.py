"""The demo's pair behind generate(): the ids of plain and of assisted generation, float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from saguaro_runtime import EngineConfig
from saguaro_runtime.demo.model import load_pair
from saguaro_runtime.integrations.candidates import SaguaroCandidateGenerator
from saguaro_runtime.integrations.transformers import Saguaro
from saguaro_runtime.models.draft import whole_vocab
from saguaro_runtime.models.loading import load_draft, load_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PROMPTS = [
    "Why is the sky blue?",
    "Once upon a time",
    "The three largest cities of France are",
    "def fibonacci(n):",
]
CONFIG = EngineConfig(k=4, branches=8, impl="reference")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    target_path, draft_path = load_pair()
    tokenizer = AutoTokenizer.from_pretrained(target_path, padding_side="left")
    target = load_model(target_path, torch.float32)
    return target, load_draft(draft_path, target, torch.float32), tokenizer


class StopsAfter(StoppingCriteria):
    """A row ends when its text has these letters."""

    def __init__(self, tokenizer: Any, letters: str) -> None:
        self.tokenizer, self.letters = tokenizer, letters

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, -3:])
        return torch.tensor([self.letters in text for text in texts])


def test_one_prompt_with_everything_set(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    its = tokenizer(PROMPTS[1], return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 32, "repetition_penalty": 1.1}
    plain = target.generate(**its, **options)
    assert plain.shape[1] == its["input_ids"].shape[1] + 32  # there is a text to stop
    stop = tokenizer.decode(plain[0, its["input_ids"].shape[1] + 20 :][:2])

    def criteria() -> StoppingCriteriaList:
        return StoppingCriteriaList([StopsAfter(tokenizer, stop)])

    plain = target.generate(**its, **options, stopping_criteria=criteria())
    assisted = target.generate(
        **its, **options, stopping_criteria=criteria(), assistant_model=whole_vocab(draft)
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with Saguaro(draft, config=CONFIG, streamer=streamer) as saguaro:
        ours = target.generate(
            **its, **options, stopping_criteria=criteria(), custom_generate=saguaro
        )
        assert saguaro.stats()["accepted"] > 0
    length = ours.shape[1]
    assert torch.equal(ours, plain) and length < its["input_ids"].shape[1] + 32
    assert torch.equal(assisted[:, :length], ours)  # theirs asks once a round
    assert "".join(streamer) == tokenizer.decode(ours[0, its["input_ids"].shape[1] :])


def test_a_ragged_batch(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    its = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 24}
    with Saguaro(draft, config=CONFIG) as saguaro:
        ours = target.generate(**its, **options, custom_generate=saguaro)
    for prompt, row in zip(PROMPTS, ours[:, its["input_ids"].shape[1] :].tolist(), strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        new = target.generate(**alone, **options)[0, alone["input_ids"].shape[1] :].tolist()
        assert row == new + [tokenizer.pad_token_id] * (len(row) - len(new))
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(**its, **options, assistant_model=draft)


def test_their_loop_with_our_drafter(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    its = tokenizer(PROMPTS[2], return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 24}
    drafter = SaguaroCandidateGenerator(draft, target, config=CONFIG)
    with drafter.attached():
        ours = target.generate(**its, **options, assistant_model=draft)
    drafter.close()
    assert torch.equal(ours, target.generate(**its, **options))
