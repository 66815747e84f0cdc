"""vLLM's contracts: shapes, padding, call order, and the law, on stand-ins for its modules."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scripts
import torch

import oracles
import saguaro_runtime
from saguaro_runtime import ConfigError, UnsupportedError
from saguaro_runtime.integrations import vllm
from saguaro_runtime.models.draft import SHARED_EMBEDDINGS

P = torch.tensor([[0.05, 0.4, 0.1, 0.25, 0.2], [0.3, 0.3, 0.2, 0.1, 0.1]]).log()
Q = torch.tensor([0.3, 0.2, 0.1, 0.25, 0.15])
DRAWS = 1 << 12


def metadata(**fields: Any) -> SimpleNamespace:
    """The parts of SamplingMetadata that verification reads."""
    its = {"all_greedy": False, "all_random": True, "temperature": None, "generators": {}}
    return SimpleNamespace(**(its | fields))


def flat(numbers: list[int]) -> dict[str, Any]:
    """SpecDecodeMetadata of requests with these numbers of drafts, as a runner lays them out."""
    total = sum(numbers)
    generator = torch.Generator().manual_seed(len(numbers))
    return {
        "draft_token_ids": torch.randint(5, (total,), generator=generator).int(),
        "num_draft_tokens": numbers,
        "max_spec_len": max(numbers),
        "cu_num_draft_tokens": torch.tensor(numbers).cumsum(0).int(),
        "draft_probs": torch.rand(total, 5, generator=generator).softmax(-1),
        "target_logits": torch.randn(total, 5, generator=generator),
        "bonus_token_ids": torch.full((len(numbers), 1), 3),
    }


def test_first_runner_pads_and_keeps_requests_apart() -> None:
    case = flat([3, 0, 1, 2])
    output = vllm.rejection_sample(*case.values(), metadata(), impl="reference")
    assert output.shape == (4, 4) and output.dtype == torch.int32
    for row, count in zip(output.tolist(), case["num_draft_tokens"], strict=True):
        k = sum(id >= 0 for id in row) - 1
        assert k <= count and row[k + 1 :] == [-1] * (3 - k)
        if k == count:
            assert row[k] == 3
    greedy = vllm.rejection_sample(
        *case.values(), metadata(all_greedy=True, all_random=False), impl="reference"
    )
    best = case["target_logits"].argmax(-1).tolist()
    assert [row[0] for row in greedy.tolist()] == [best[0], 3, best[3], best[4]]
    mixed = vllm.rejection_sample(
        *case.values(),
        metadata(all_random=False, temperature=torch.tensor([-1.0, 1.0, 0.0, 1.0])),
        impl="reference",
    )
    assert mixed[0, 0] == best[0] and mixed[2, 0] == best[3]


def test_a_requests_generator_decides_its_tokens_whatever_the_batch() -> None:
    case = flat([2, 2, 2])
    rows = []
    for other in (0, 1):
        torch.manual_seed(other)
        its = metadata(generators={1: torch.Generator().manual_seed(9)})
        output = vllm.rejection_sample(*case.values(), its, impl="reference")
        rows.append(output.tolist())
    assert rows[0][1] == rows[1][1] and rows[0] != rows[1]
    # A request without drafts draws nothing, so its generator stands where it stood.
    case, generator = flat([0, 2]), torch.Generator().manual_seed(9)
    before = generator.get_state()
    vllm.rejection_sample(*case.values(), metadata(generators={0: generator}), impl="reference")
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(UnsupportedError, match="synthetic"):
        vllm.rejection_sample(*case.values(), metadata(), True)


def test_first_runner_law() -> None:
    generator = torch.Generator().manual_seed(1)
    drafts = torch.multinomial(Q, DRAWS, True, generator=generator)
    bonus = torch.zeros(DRAWS, 1, dtype=torch.int64)
    torch.manual_seed(2)
    output = vllm.rejection_sample(
        drafts, [1] * DRAWS, 1, torch.arange(DRAWS) + 1, Q.expand(DRAWS, 5),
        P[0].expand(DRAWS, 5), bonus, metadata(), impl="reference",
    )  # fmt: skip
    counts = np.bincount(output[:, 0].numpy(), minlength=5)
    assert oracles.follows(counts, P[0].exp().double().numpy())


def second(numbers: list[int], steps: int, **options: Any) -> Any:
    """A call as the second runner makes it: `numbers` drafts per request, states in any order."""
    batch, total = len(numbers), sum(numbers) + len(numbers)
    cu = torch.tensor([0, *np.cumsum(np.array(numbers) + 1)])
    states = torch.arange(batch).flip(0)
    local = torch.cat([torch.arange(number + 1) for number in numbers])
    index = torch.arange(batch).repeat_interleave(torch.tensor(numbers) + 1)
    arguments = {
        "target_logits": P[local.clamp(max=1)],
        "draft_logits": Q.log().expand(batch + 2, steps, 5),
        "draft_sampled": torch.zeros(total, dtype=torch.int32),
        "cu_num_logits": cu.int(),
        "pos": 10 + local,
        "idx_mapping": states.int(),
        "expanded_idx_mapping": states[index].int(),
        "expanded_local_pos": local.int(),
        "temperature": torch.ones(batch + 2),
        "seed": torch.arange(batch + 2),
        "num_speculative_steps": steps,
    }
    return vllm.rejection_sample_v2(**(arguments | options), impl="reference")


@pytest.mark.parametrize("block", [False, True])
def test_second_runner_law(block: bool) -> None:
    """Two drafts each: the joint law of the first two tokens; one-hot judged as drawn fails it."""
    generator = torch.Generator().manual_seed(3)
    drafts = torch.multinomial(Q, 2 * DRAWS, True, generator=generator).view(DRAWS, 2)
    fed = torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), drafts), 1).flatten()
    law = np.einsum("i,j->ij", *P.exp().double().numpy()).ravel()
    rows = P[[0, 1, 1]].repeat(DRAWS, 1)
    for wrong in (False, True):
        sampled, count = second(
            [2] * DRAWS, 2, draft_sampled=fed, target_logits=rows, use_block_verification=block,
            draft_logits=(Q if not wrong else torch.ones(5) / 5).log().expand(DRAWS + 2, 2, 5),
        )  # fmt: skip
        rest = torch.multinomial(P[1].exp(), DRAWS, True, generator=generator)
        text = torch.stack((sampled[:, 0], torch.where(count > 1, sampled[:, 1], rest)), 1)
        counts = np.bincount((text @ torch.tensor([5, 1])).numpy(), minlength=25)
        assert oracles.follows(counts, law) is not wrong


def test_second_runner_layout() -> None:
    numbers = [2, 0, 1, 3]
    fed = torch.randint(5, (10,), generator=torch.Generator().manual_seed(5)).int()
    sampled, count = second(numbers, 3, draft_sampled=fed)
    assert sampled.shape == (4, 4) and sampled.dtype == torch.int64 and count.dtype == torch.int32
    start = 0
    for row, number, n in zip(sampled.tolist(), numbers, count.tolist(), strict=True):
        assert 1 <= n <= number + 1 and row[n:] == [-1] * (4 - n)
        assert row[: n - 1] == fed[start + 1 : start + n].tolist()
        start += number + 1
    alone, _ = second(
        [2], 3, draft_sampled=fed[:3], idx_mapping=torch.tensor([3]), seed=torch.arange(6),
        draft_logits=Q.log().expand(6, 3, 5), temperature=torch.ones(6),
    )  # fmt: skip
    assert torch.equal(alone[0], sampled[0])  # the text of a seed is the same alone
    # Greedy: the argmax decides; an id below 0 is no draft, nor is what follows it.
    greedy, count = second(
        [2], 2, draft_sampled=torch.tensor([0, 1, 0]), temperature=torch.zeros(3),
        target_logits=P[[0, 1, 1]],
    )  # fmt: skip
    assert greedy.tolist() == [[1, 0, 0]] and count.tolist() == [3]
    cut, count = second([2], 2, draft_sampled=torch.tensor([0, -1, 1]))
    assert count.tolist() == [1]
    one_hot, count = second(
        [1], 1, draft_logits=None, draft_sampled=torch.tensor([0, 1]),
        target_logits=torch.tensor([[-9.0, 9, -9, -9, -9], [9.0, -9, -9, -9, -9]]) * 9,
    )  # fmt: skip
    assert one_hot.tolist() == [[1, 0]]
    # A draft with a smaller vocabulary: its ids end before the target's.
    small, count = second([1], 1, draft_logits=Q[:3].log().expand(3, 1, 3),
                          draft_sampled=torch.tensor([0, 2]))  # fmt: skip
    assert 0 <= int(small[0, 0]) < 5
    with pytest.raises(UnsupportedError, match="watermark"):
        second([1], 1, watermark_key=3)


def theirs_v1(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
    target_logits, bonus_token_ids, sampling_metadata,
):  # fmt: skip
    """The arguments of vllm.v1.sample.rejection_sampler.rejection_sample."""


def theirs_v2(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping,
    expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps,
    synthetic_conditional_rates=None, use_fp64=False, use_block_verification=False,
):  # fmt: skip
    """Those of the second runner's function."""


def test_the_plugin_acts_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = {path: ModuleType(path) for path, _ in vllm.RUNNERS}
    both = dict(zip(runners, (theirs_v1, theirs_v2), strict=True))
    for path, module in runners.items():
        module.rejection_sample = both[path]
        parts = path.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, path, module)
    for value in (None, "", "others"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        vllm.register()
        assert {path: its.rejection_sample for path, its in runners.items()} == both
    monkeypatch.setenv("VLLM_PLUGINS", "others, saguaro")
    vllm.register()
    first, later = runners.values()
    assert first.rejection_sample is vllm.rejection_sample
    assert later.rejection_sample is vllm.rejection_sample_v2
    for changed in (lambda draft_token_ids, tree: None, lambda num_draft_tokens: None):
        first.rejection_sample = changed
        with pytest.raises(UnsupportedError, match="place"):
            vllm.use_saguaro_verify()
        assert first.rejection_sample is changed
    for path in runners:
        monkeypatch.setitem(sys.modules, path, None)
    with pytest.raises(UnsupportedError, match="vLLM"):
        vllm.use_saguaro_verify()


def test_no_module_imports_an_engine_when_imported() -> None:
    root = Path(saguaro_runtime.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            tops = {name.partition(".")[0] for name in names}
            assert not tops & {"vllm", "sglang", "sgl_kernel"}, path
            hooks = {"transformers.py", "processors.py", "candidates.py", "rows.py", "generate.py"}
            if path.parent.name == "integrations" and path.name not in hooks:
                assert "transformers" not in tops, path


V, K = 7, 3
LAW = scripts.random_law(V, seed=4)


def proposer(draft: Any, **options: Any) -> vllm.SaguaroProposer:
    its = {"draft": draft, "branches": 6, "lane": "inline", "impl": "reference"}
    return vllm.SaguaroProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: V),
            additional_config={"saguaro": its | options},
        )
    )


def greedy_after(text: list[int]) -> int:
    return int(LAW[text[-2] * V + text[-1]].argmax())


def test_the_proposer_follows_texts_through_a_changing_batch() -> None:
    """Rows move, requests pause, join and leave, as in vLLM's input batch; texts stay greedy.

    Draft = target, so that every draft offered must be accepted wherever its row was.
    """
    generator = np.random.default_rng(0)
    drafter = proposer(scripts.model(LAW, rows=4, slots=512))
    token_ids = np.zeros((4, 64), dtype=np.int32)
    texts: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    offered = rejected = 0
    for step in range(60):
        if step % 7 == 0 and len(texts) < 4:
            texts[step] = generator.integers(0, V, size=3 + step % 4).tolist()
            drafts[step] = []
        batch = [int(uid) for uid in generator.permutation(list(texts))]
        sampled: list[list[int]] = []
        for row, uid in enumerate(batch):
            if generator.random() < 0.2:  # still in its prefill, or discarded: nothing sampled
                sampled.append([])
                token_ids[row, : len(texts[uid])] = texts[uid]
                continue
            new: list[int] = []
            for draft in [*drafts[uid], None]:
                new.append(greedy_after(texts[uid] + new))
                if draft != new[-1]:
                    rejected += draft is not None
                    break
            offered += len(drafts[uid])
            texts[uid] += new
            sampled.append(new)
            token_ids[row, : len(texts[uid])] = texts[uid]
        lengths = np.array([len(texts[uid]) for uid in batch])
        found = drafter.propose(sampled, lengths, token_ids, slot_mappings=None)
        assert all(not its for its, new in zip(found, sampled, strict=True) if not new)
        for uid, new, its in zip(batch, sampled, found, strict=True):
            if new:
                drafts[uid] = its
                assert all(0 <= id < V for id in its) and len(its) <= K
                assert len(texts[uid]) + len(its) <= 64
        for uid in [uid for uid in texts if len(texts[uid]) > 50]:
            del texts[uid], drafts[uid]
    assert offered > 60 and rejected == 0
    drafter.close()


def test_the_proposer_refuses_what_it_was_not_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({SHARED_EMBEDDINGS: True}))
    with pytest.raises(ConfigError, match="embedding"):
        proposer(str(tmp_path)).load_model()
    with pytest.raises(ConfigError, match="draft"):
        proposer(None)
    with pytest.raises(ConfigError, match="branches"):
        proposer("x", branches=0)
    drafter = proposer(scripts.model(LAW, rows=4, slots=512), max_tokens=8)
    # A text that fits nowhere is not drafted for; the request goes on without.
    token_ids = np.zeros((1, 64), dtype=np.int32)
    assert drafter.propose([[1]], np.array([40]), token_ids) == [[]]
