"""SGLang's contracts: what its verification writes where, the law, and the algorithm registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from saguaro_runtime import ConfigError, UnsupportedError
from saguaro_runtime.integrations import sglang

P = torch.tensor([[0.05, 0.4, 0.1, 0.25, 0.2], [0.3, 0.3, 0.2, 0.1, 0.1]])
Q = torch.tensor([0.3, 0.2, 0.1, 0.25, 0.15])
DRAWS = 1 << 12


def chains(drafts: torch.Tensor, counts: list[int] | None = None, seed: int = 0) -> dict[str, Any]:
    """Arguments as SGLang's workers make them for topk = 1; `counts`: drafts of each row."""
    batch, width = drafts.shape[0], drafts.shape[1] + 1
    generator = torch.Generator().manual_seed(seed)
    following = torch.arange(1, width + 1).repeat(batch, 1)
    following[:, -1] = -1
    for row, count in enumerate(counts or []):
        following[row, count:] = -1
    return {
        "predicts": torch.full((batch * width,), -7, dtype=torch.int32),
        "accept_index": torch.full((batch, width), -1, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), -7, dtype=torch.int32),
        "candidates": torch.cat((torch.full((batch, 1), 4), drafts), 1),
        "retrive_index": torch.arange(batch * width).view(batch, width),
        "retrive_next_token": following,
        "retrive_next_sibling": torch.full((batch, width), -1),
        "uniform_samples": torch.rand(batch, width, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": P[[0, 1, 1]][:width].expand(batch, width, 5),
        "draft_probs": torch.zeros(batch, width, 5),
    }


def tokens(case: dict[str, Any]) -> torch.Tensor:
    """The new tokens of each row as SGLang reads them: predicts at the accepted places."""
    index = case["accept_index"].long()
    return torch.where(index >= 0, case["predicts"][index.clamp(min=0)].long(), -1)


def test_outputs_lie_where_sglang_reads_them() -> None:
    drafts = torch.tensor([[1, 0], [3, 2], [0, 1], [1, 1]])
    case = chains(drafts, counts=[2, 2, 0, 1])
    before = {name: value.clone() for name, value in case.items()}
    sglang.tree_speculative_sampling_target_only(**case, impl="reference")
    for row, count in enumerate([2, 2, 0, 1]):
        k = int(case["accept_token_num"][row])
        assert 0 <= k <= count
        assert case["accept_index"][row].tolist() == [3 * row + i for i in range(k + 1)] + [-1] * (
            2 - k
        )
        assert tokens(case)[row, :k].tolist() == drafts[row, :k].tolist()
        assert 0 <= int(tokens(case)[row, k]) < 5
        # Places that are not accepted keep what they held.
        assert (case["predicts"][3 * row + k + 1 : 3 * row + 3] == -7).all()
    for name in list(case)[3:]:
        assert torch.equal(case[name], before[name]), name
    again = chains(drafts, counts=[2, 2, 0, 1])
    sglang.tree_speculative_sampling_target_only(**again, impl="reference")
    assert torch.equal(again["predicts"], case["predicts"])  # ranks with the same coins agree


@pytest.mark.parametrize("drawn", [False, "token", "block"])
def test_law_of_the_first_two_tokens(drawn: bool | str) -> None:
    generator = torch.Generator().manual_seed(3)
    drafts = torch.multinomial(Q, 2 * DRAWS, True, generator=generator).view(DRAWS, 2)
    call = sglang.tree_speculative_sampling_target_only
    case = chains(drafts, seed=1)
    if drawn:
        call = sglang.chain_speculative_sampling
        case["draft_probs"] = Q.expand(DRAWS, 2, 5)
        case["block_verification"] = drawn == "block"
    call(**case, impl="reference")
    text = tokens(case)
    rest = torch.multinomial(P[1], DRAWS, True, generator=generator)
    second = torch.where(case["accept_token_num"] > 0, text[:, 1], rest)
    counts = np.bincount((5 * text[:, 0] + second).numpy(), minlength=25)
    assert oracles.follows(counts, np.einsum("i,j->ij", *P.double().numpy()).ravel())
    overlap = float(torch.minimum(P[0], Q).sum()) if drawn else float((P[0] * Q).sum())
    rate = float((case["accept_token_num"] > 0).double().mean())
    if drawn != "block":  # which keeps more, and less often just one
        assert abs(rate - overlap) < 5 * (0.25 / DRAWS) ** 0.5


def test_lossy_thresholds_are_refused() -> None:
    case = chains(torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedError, match="threshold"):
        sglang.tree_speculative_sampling_target_only(**case, threshold_single=0.5)


def theirs(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs,
    draft_probs, threshold_single=1.0, threshold_acc=1.0, deterministic=True,
):  # fmt: skip
    """The arguments of sgl_kernel.tree_speculative_sampling_target_only."""


def their_chains(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs,
    draft_probs, threshold_single, threshold_acc, deterministic, *, block_verification=False,
):  # fmt: skip
    """The arguments of chain_speculative_sampling_triton in newer versions."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stand-ins for SGLang's registry, its algorithms and a module with its verification."""
    registry: dict[str, Any] = {}

    class CustomSpecAlgo:
        def __init__(self, name, factory, *, supports_overlap=False, validate_server_args=None):
            self.name, self.factory, self.supports_overlap = name, factory, supports_overlap
            self.validate_server_args = validate_server_args

        def is_standalone(self) -> bool:
            return False

        def is_eagle(self) -> bool:
            return False

        def has_draft_kv(self) -> bool:
            return True

        def need_topk(self) -> bool:
            return False

        def create_worker(self, server_args):
            return self.factory(server_args)

    class SpeculativeAlgorithm(Enum):
        EAGLE = auto()
        STANDALONE = auto()

        @classmethod
        def register(cls, name, *, spec_class, **options):
            missing = {n for n in vars(cls) if n.startswith(("is_", "supports_"))} - set(
                dir(spec_class)
            )
            assert not missing and name.upper() not in registry

            def decorator(factory):
                registry[name.upper()] = spec_class(name.upper(), factory, **options)
                return factory

            return decorator

        def is_standalone(self) -> bool:
            return self is type(self).STANDALONE

        def is_eagle(self) -> bool:
            return self is type(self).EAGLE

        def supports_ragged_verify(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return self.is_standalone()

        def build_disagg_draft_input(self, batch, last_tokens_tensor, future_map):
            return (self.name, batch, last_tokens_tensor, future_map)

        def create_worker(self, server_args):
            return ("worker of", self.name)

    modules = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "sglang.srt.speculative.spec_registry": {
            "CustomSpecAlgo": CustomSpecAlgo,
            "get_spec": lambda name: registry.get(name.upper()),
        },
        "sglang.srt.speculative.eagle_info": {
            "tree_speculative_sampling_target_only": theirs,
            "chain_speculative_sampling_triton": their_chains,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    yield SimpleNamespace(registry=registry)


def test_the_algorithm_is_standalone_with_our_verification(engine: SimpleNamespace) -> None:
    sglang.register()
    sglang.register()  # a plugin may be loaded twice
    algorithm = engine.registry["SAGUARO"]
    assert algorithm.supports_overlap
    assert algorithm.is_standalone() and not algorithm.is_eagle()
    assert not algorithm.supports_ragged_verify() and algorithm.need_topk()
    assert algorithm.build_disagg_draft_input(1, 2, future_map=3) == ("STANDALONE", 1, 2, 3)
    assert algorithm.create_worker(SimpleNamespace()) == ("worker of", "STANDALONE")
    eagle_info = sys.modules["sglang.srt.speculative.eagle_info"]
    name = "tree_speculative_sampling_target_only"
    assert getattr(eagle_info, name) is sglang.tree_speculative_sampling_target_only
    assert eagle_info.chain_speculative_sampling_triton is sglang.chain_speculative_sampling


def test_server_args_that_are_not_lossless_are_refused(engine: SimpleNamespace) -> None:
    sglang.register()
    check = engine.registry["SAGUARO"].validate_server_args
    check(SimpleNamespace(speculative_eagle_topk=1, speculative_accept_threshold_acc=1.0))
    with pytest.raises(ConfigError, match="topk"):
        check(SimpleNamespace(speculative_eagle_topk=4))
    with pytest.raises(ConfigError, match="threshold_single"):
        check(SimpleNamespace(speculative_accept_threshold_single=0.8))
    del sys.modules["sglang.srt.speculative.eagle_info"]
    with pytest.raises(UnsupportedError, match="SGLang"):
        sglang.use_saguaro_verify()
