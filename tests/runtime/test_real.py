"""The demo's pair, real weights, float32: every method gives the target's own text."""

from __future__ import annotations

import pytest
import torch

from bench.equality import Equality, chat_prompts, code_prompts, passes, render

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def equality() -> Equality:
    import transformers

    from saguaro_runtime.demo.model import load_pair
    from saguaro_runtime.models.loading import load_draft, load_model

    target_path, draft_path = load_pair()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path)
    target = load_model(target_path, torch.float32)
    draft = load_draft(draft_path, target, torch.float32)
    prompts = chat_prompts(tokenizer, 2) + code_prompts(tokenizer, 2)
    return Equality(target, draft, prompts, 48, impl="reference")


def test_all_methods_give_the_targets_text(equality: Equality) -> None:
    report = equality.report()
    print(render(report))
    assert report["passed"], render(report)


def test_other_seeds_give_other_texts(equality: Equality) -> None:
    equality.prompts = [equality.prompts[0]] * 4
    texts = [tuple(output.token_ids) for output in equality.run("ssd", 1.0, batch=4)]
    assert len(set(texts)) == 4


def test_a_wrong_token_is_not_called_a_near_tie(equality: Equality) -> None:
    """The instrument: texts that part where the target was sure are different."""
    from saguaro_runtime import SamplingParams
    from saguaro_runtime.compare import compare_texts

    prompt, sure = equality.prompts[0], equality.run("ar", 0.0)[0].token_ids
    wrong = [*sure[:10], (sure[10] + 1) % 1000, *sure[11:]]
    found = compare_texts(sure, wrong, prompt, SamplingParams(48), target=equality.target)
    assert found.verdict == "different" and found.position == 10
    assert not passes([found])
