"""With reproducible=True a seed's text does not depend on batch, lane or method."""

from __future__ import annotations

import pytest
import scripts
import torch

from saguaro_runtime import SamplingParams

P = scripts.random_law(5, seed=1)
Q = scripts.random_law(5, seed=2, near=P)
PROMPTS = [[1, 2], [0, 3, 4, 4, 1], [2], [1, 2]]
PARAMS = [
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=11),
    SamplingParams(max_new_tokens=41, temperature=0.6, seed=12),
    SamplingParams(max_new_tokens=5, temperature=0.0),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=14),
]


def _texts(**options: object) -> list[list[int]]:
    with scripts.engine(scripts.model(P), scripts.model(Q), **options) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [len(o.token_ids) for o in outputs] == [p.max_new_tokens for p in PARAMS]
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_ssd_equals_sd(rule: str) -> None:
    assert _texts(method="ssd", rule=rule, branches=3) == _texts(method="sd", rule=rule)


def test_coupled_equals_plain_decoding() -> None:
    assert _texts(method="ssd", rule="coupled", branches=3) == _texts(method="ar", rule="coupled")


def test_lanes_agree(no_leaks: None) -> None:
    assert _texts(lane="process", branches=3) == _texts(lane="inline", branches=3)


@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_alone_equals_in_a_batch(max_batch: int) -> None:
    """Fewer rows than requests: they join as others leave."""
    assert _texts(max_batch=max_batch) == _texts(max_batch=8)


def test_seeds_differ_and_repeat() -> None:
    with scripts.engine(scripts.model(P), scripts.model(Q)) as engine:
        one, again, other = engine.generate(
            [[1, 2]] * 3, [scripts.sampled(seed, 40) for seed in (1, 1, 2)]
        )
    assert one.token_ids == again.token_ids != other.token_ids


def test_longer_limit_only_appends() -> None:
    with scripts.engine(scripts.model(P), scripts.model(Q)) as engine:
        short, long = engine.generate(
            [[1, 2]] * 2, [scripts.sampled(3, 17), scripts.sampled(3, 40)]
        )
    assert short.token_ids == long.token_ids[:17]


@pytest.mark.parametrize(
    ("branches", "ranking", "rounds"),
    [(1, "noise", 60), (2, "probability", 60), (5, "probability", 300), (24, "noise", 60)],
)
def test_draft_equal_to_target_is_accepted_round_after_round(
    branches: int, ranking: str, rounds: int
) -> None:
    """Through hits and misses; a key one slot off would show here and nowhere else."""
    greedy = SamplingParams(max_new_tokens=4 * rounds, temperature=0.0)
    with scripts.engine(
        scripts.model(P, slots=1600), scripts.model(P, slots=1600),
        branches=branches, ranking=ranking, max_batch=2,
    ) as engine:  # fmt: skip
        output = engine.generate([1, 2], greedy)[0]
        stats = engine.stats()
    assert stats["rounds"] >= rounds
    assert stats["accepted"] == stats["drafted"] > 0
    assert stats["hits"] + stats["misses"] == stats["rounds"] - 1
    assert all(round.committed == 4 for round in output.rounds[1:-1])


def test_ids_one_model_does_not_have_are_harmless() -> None:
    """A draft with more ids, or fewer, than the target: the law and the text stay the target's."""
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0)
    wide = scripts.random_law(7, seed=5)
    narrow = scripts.random_law(3, seed=6)
    with scripts.engine(scripts.model(P), None, method="ar") as engine:
        wanted = engine.generate(PROMPTS, greedy)
    for law in (wide, narrow):
        with scripts.engine(scripts.model(P), scripts.model(law)) as engine:
            got = engine.generate(PROMPTS, greedy)
            sampled = engine.generate([[1, 2]], scripts.sampled(1, 80))[0]
        assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
        assert set(sampled.token_ids) == set(range(5))


def test_scripted_model_reads_its_tokens_from_the_slots() -> None:
    """The instrument itself: a branch fed into a slot that is not its own changes the logits."""
    model = scripts.model(P, rows=1)
    rows, trunk = torch.tensor([0]), torch.tensor([4], dtype=torch.int32)
    model.prefill(0, torch.tensor([0, 1, 2, 3]))
    chain = model.extend(rows, torch.tensor([[4, 1, 2]]), trunk)
    depth = torch.tensor([[1, 0]], dtype=torch.int32)
    tree = model.decode_tree(rows, torch.tensor([[2, 3]]), trunk, depth, 2, 0)
    assert torch.equal(chain[0, 2], model.logits[1 * 5 + 2])
    assert torch.equal(tree[0, 0], model.logits[1 * 5 + 2])
    assert torch.equal(tree[0, 1], model.logits[4 * 5 + 3])
    model.promote(rows, trunk, torch.tensor([1]), torch.tensor([0], dtype=torch.int32), 2, 2)
    assert model.tokens[0, :7].tolist() == [0, 1, 2, 3, 4, 1, 2]
