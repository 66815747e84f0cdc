"""A draft with a part of the target's ids: exact laws, the same texts, its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
import scripts
import tiny_models
import torch
from part_model import PartModel
from safetensors.torch import load_file, save_file

import oracles
from saguaro_kernels.errors import ConfigError
from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.compare import compare_texts
from saguaro_runtime.demo.measure import AssistedRun
from saguaro_runtime.distill.student import student_config, student_weights, write_student
from saguaro_runtime.integrations.candidates import SaguaroCandidateGenerator
from saguaro_runtime.models.draft import DRAFT_VOCAB, all_logits, restrict_vocab, whole_vocab
from saguaro_runtime.models.loading import load_draft

GOLDEN = oracles.load_golden()
ROWS = 256


def engine_of(name: str, ids: list[int], **options: Any) -> Engine:
    case = GOLDEN[name]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    batch = {"max_batch": ROWS, "max_tokens": ROWS * 128, "branches": 2, "k": case["K"]}
    draft = PartModel(q, ids, rows=ROWS)
    return scripts.engine(scripts.model(p, ROWS), draft, **(batch | options))


@pytest.mark.parametrize(
    ("name", "ids", "options"),
    [
        ("markov2-V4-K2", [0, 2, 3], {"rule": "token", "ranking": "noise"}),
        ("markov2-V4-K2", [0, 3], {"rule": "token", "downweight": 0.5, "branches": 4}),
        (
            "markov2-V4-K2",
            [1, 2],
            {"rule": "block", "fallback": "partial_accept", "reproducible": False},
        ),
    ],
    ids=["token", "C", "block-ngram"],
)
def test_first_tokens_follow_the_golden_law(
    name: str, ids: list[int], options: dict[str, Any]
) -> None:
    case = GOLDEN[name]
    with engine_of(name, ids, **options) as engine:
        tokens = scripts.texts(engine, case["start"], 450, case["L"])
        stats = engine.stats()
    assert stats["accepted"] > 50 and stats["hits"] > 15 and stats["speculation"] == "on"
    law = np.array(case["target_joint"])
    if law.reshape((case["V"],) * case["L"]).sum(axis=tuple(range(1, case["L"]))).min() > 0.01:
        assert set(range(case["V"])) - set(ids) <= set(tokens[:, -1].tolist())
    assert oracles.follows(scripts.joint(tokens, case["V"]), law)


def test_a_map_that_is_not_used_is_caught() -> None:
    """The control: columns taken for the target's ids."""
    case = GOLDEN["markov2-V4-K2"]
    with engine_of("markov2-V4-K2", [0, 2, 3], method="sd") as engine:
        engine.lane.chain.vocab_map = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
        tokens = scripts.texts(engine, case["start"], 1000, case["L"])
    counts = scripts.joint(tokens, case["V"])
    assert not oracles.follows(counts, np.array(case["target_joint"]))


P = scripts.random_law(9, seed=1)
Q = scripts.random_law(9, seed=2, near=P)
PART = [0, 2, 3, 4, 7]


def texts(**options: Any) -> list[list[int]]:
    draft = PartModel(Q, PART)
    with scripts.engine(scripts.model(P), draft, **({"branches": 3} | options)) as engine:
        params = [scripts.sampled(seed, 20) for seed in range(4)]
        params += [SamplingParams(20), SamplingParams(20, 0.8, top_k=4, seed=5)]
        return [out.token_ids for out in engine.generate([[1, 5]] * 6, params)]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_ssd_equals_sd(rule: str) -> None:
    found = texts(rule=rule)
    assert found == texts(rule=rule, method="sd")
    if rule == "coupled":
        assert found == texts(rule=rule, method="ar")
    assert {1, 5, 6, 8} & {token for text in found for token in text}


def test_the_coupled_rule_and_the_noise_work_by_the_targets_ids() -> None:
    """A draft of the target's own law, cut to most of its mass, is nearly always agreed with."""
    law = torch.full((36, 6), 0.002, dtype=torch.float64)
    law[:, 2:] = torch.rand(36, 4, generator=torch.Generator().manual_seed(3)).double() + 0.2
    law /= law.sum(-1, keepdim=True)
    params = [scripts.sampled(seed, 40) for seed in range(6)]
    rates = {}
    for rule in ("coupled", "block"):
        draft = PartModel(law, [2, 3, 4, 5])
        with scripts.engine(scripts.model(law), draft, rule=rule, branches=4) as engine:
            engine.generate([[2, 3]] * 6, params)
            rates[rule] = engine.stats()
    assert rates["coupled"]["acceptance"] > 0.95
    # By the noise of the extra token four of twenty outcomes are enough.
    assert rates["block"]["hit_rate"] > 0.9


# In a folder.

IDS = torch.tensor([0, 3, 10, 65, 97, 101, 116, 200, 258])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A tiny target, and the folder of a draft of its own layer with logits for a few ids."""
    target = tiny_models.llama(1)
    folder = tmp_path_factory.mktemp("draft")
    weights = student_weights(target, (0,)) | {DRAFT_VOCAB: IDS}
    write_student(folder, student_config(target.config, (0,)), weights, tiny_models.tokenizer())
    return target, str(folder)


def test_a_loaded_draft_has_the_rows_of_its_ids(pair: tuple[Any, str]) -> None:
    target, folder = pair
    draft = load_draft(folder, target)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        full, part = target(ids).logits, draft(ids).logits
        spread = all_logits(draft, ids)
    assert torch.equal(part, full[..., IDS]) and torch.equal(spread[..., IDS], part)
    assert spread.shape == full.shape and int(spread.isfinite().sum(-1).max()) == len(IDS)
    assert target.get_output_embeddings().weight.shape[0] == tiny_models.VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_own_assistance_gets_all_columns(
    pair: tuple[Any, str], temperature: float
) -> None:
    target, folder = pair
    draft = load_draft(folder, target)
    ids = torch.tensor([[1, 65, 3]])
    whole = whole_vocab(draft)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, all_logits(draft, ids))
        assert draft(ids).logits.shape[-1] == len(IDS)  # the draft itself stays as it is
    assert whole_vocab(target) is target and whole_vocab(whole) is whole
    plain, assisted = AssistedRun(target), AssistedRun(target, assistant_model=draft)
    params = SamplingParams(20, temperature)
    if not temperature:
        assert assisted.decode([[1, 65, 3]], params) == plain.decode([[1, 65, 3]], params)
    else:
        assert len(assisted.decode([[1, 65, 3]], params)[0]) > 0


def test_texts_with_such_a_draft(
    pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """Through the memory and the messages of a draft process."""
    faulty.local_children(monkeypatch)
    target, folder = pair
    params = [SamplingParams(20), scripts.sampled(1, 20), scripts.sampled(2, 20, top_p=0.9)]
    prompts, found = [[1, 65, 3]] * 3, {}
    for method in ("ar", "ssd"):
        config = EngineConfig(
            method=method, k=2, branches=4, lane="process", impl="reference", reproducible=True
        )
        with Engine(target, folder, config, tiny_models.tokenizer()) as engine:
            found[method] = engine.generate(prompts, params)
            stats = engine.stats()
    assert stats["speculation"] == "on" and stats["drafted"] > 0
    assert found["ar"][0].token_ids == found["ssd"][0].token_ids
    drafted = load_draft(folder, target)
    for index in (1, 2):
        out = found["ssd"][index]
        same = compare_texts(
            out.token_ids, out.token_ids[:-1] + [0], prompts[index], params[index], target=target,
            draft=drafted, config=config, rounds=out.rounds,
        )  # fmt: skip
        assert same.gap is not None and same.gap >= 0


def test_candidates_have_logits_of_all_ids(pair: tuple[Any, str]) -> None:
    target, folder = pair
    config = EngineConfig(method="sd", k=3, lane="inline", impl="reference")
    generator = SaguaroCandidateGenerator(folder, target, config=config, seed=3)
    generator.start(SamplingParams(temperature=1.0, seed=3), 100)
    text = torch.tensor([[5, 6, 7]])
    assert torch.equal(generator.get_candidates(text)[0], text)
    text = torch.cat((text, torch.tensor([[8]])), 1)
    candidates, logits = generator.get_candidates(text)
    generator.close()
    new = candidates[0, text.shape[1] :]
    assert len(new) == 3 and bool(torch.isin(new, IDS).all())
    assert logits is not None and logits.shape == (1, 3, tiny_models.VOCAB)
    assert torch.equal(logits[0].isfinite().nonzero()[:, 1].unique(), IDS)


def test_wrong_ids_are_refused(pair: tuple[Any, str], tmp_path: Path) -> None:
    target, folder = pair
    for wrong in ([], [1, 1], [3, 2], [-1, 4], [0, tiny_models.VOCAB]):
        with pytest.raises(ConfigError, match=f"{DRAFT_VOCAB}: want ascending ids of 0..258"):
            restrict_vocab(target, torch.tensor(wrong, dtype=torch.int64))
    weights = load_file(Path(folder) / "model.safetensors")
    weights[DRAFT_VOCAB] = torch.tensor([1, 1000])
    write_student(tmp_path, student_config(target.config, (0,)), {}, None)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="ascending ids"):
        load_draft(str(tmp_path), target)
    small = scripts.model(scripts.random_law(4, seed=1))
    with pytest.raises(ConfigError, match="its vocabulary has id 7, the target has 4"):
        scripts.engine(small, PartModel(Q, PART))
