"""Providers of other projects, on stand-ins that hold them to their projects' contracts."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import outside
from bench.inputs import rows_inputs, verify_inputs
from bench.inputs_slots import chain_attention_inputs, chain_attention_op
from saguaro_kernels import compat
from saguaro_runtime.integrations import sglang, vllm

SHAPE = {"B": 3, "K": 2, "V": 64, "T": 0.7, "rule": "token"}
B, K, V = 3, 2, 64


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts modules where an import finds them: stand_in("a.b", name=function)."""

    def put(path: str, **functions: Any) -> None:
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__spec__ = importlib.machinery.ModuleSpec(name, None)
                monkeypatch.setitem(sys.modules, name, module)
        for name, function in functions.items():
            setattr(sys.modules[path], name, function)

    return put


def _inputs(rule: str, temperature: float = 0.7) -> SimpleNamespace:
    return verify_inputs({**SHAPE, "rule": rule, "T": temperature}, torch.float32, "cpu")


def test_nothing_is_offered_that_is_not_installed(capsys) -> None:
    here = {its.label for its in outside.KNOWN if outside._installed(its.module)}
    lines = outside.missing()
    assert len(lines) == len({its.package for its in outside.KNOWN if its.label not in here})
    for kind in ("token", "block", "greedy", "sample", "chain attention"):
        assert set(outside.providers(kind)) <= here
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(line in listed for line in lines)


def test_flashinfer(stand_in) -> None:
    given: list[Any] = []

    def sampled(logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (2, V) and logits.dtype == torch.float32
        return logits.argmax(-1)

    def filtered(logits: torch.Tensor, top_k: Any, top_p: Any) -> torch.Tensor:
        given.append([its.tolist() if torch.is_tensor(its) else its for its in (top_k, top_p)])
        return logits.argmax(-1) + 100

    stand_in(
        "flashinfer.sampling",
        chain_speculative_sampling=functools.partial(
            compat.chain_speculative_sampling, impl="reference"
        ),
        sampling_from_logits=sampled,
        top_k_top_p_sampling_from_logits=filtered,
    )
    verdict = outside.providers("token")["flashinfer"](_inputs("token"))
    tokens = verdict[0] if isinstance(verdict, tuple) else verdict
    assert tokens.shape == (B, K + 1)
    sample = outside.providers("sample")["flashinfer"]
    for filters, offset in (({}, 0), ({"top_k": 5}, 100), ({"top_p": 0.9}, 100)):
        x = rows_inputs({"R": 2, "V": V, "T": 0.7, **filters}, torch.bfloat16, "cpu")
        assert torch.equal(sample(x), x.logits.float().div(0.7).argmax(-1) + offset)
    assert given == [[[5, 5], 1.0], [V, pytest.approx([0.9, 0.9])]]
    with pytest.raises(NotImplementedError, match="down-weighting"):
        sample(rows_inputs({"R": 2, "V": V, "T": 0.7, "F": 4, "C": 0.8}, torch.float32, "cpu"))


def test_vllm(stand_in) -> None:
    calls = []

    def first(ids: Any, counts: Any, steps: Any, ends: Any, *rest: Any) -> torch.Tensor:
        assert counts == [K] * B and ends.tolist() == [2, 4, 6] and ids.dtype == torch.int32
        draft_probs, target, bonus, _ = rest
        assert torch.allclose(draft_probs.sum(-1), torch.ones(B * K))
        assert target.is_contiguous() and bonus.shape == (B, 1)
        return vllm.rejection_sample(ids, counts, steps, ends, *rest, impl="reference")

    def second(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return vllm.rejection_sample_v2(*arguments, **options, impl="reference")

    stand_in("vllm.v1.sample.rejection_sampler", rejection_sample=first)
    stand_in("vllm.v1.worker.gpu.spec_decode.rejection_sampler", rejection_sample=second)
    token = outside.providers("token")
    output = token["vllm"](_inputs("token"))
    assert output.shape == (B, K + 1) and output.dtype == torch.int32
    x = _inputs("token")
    tokens, count = token["vllm-v2"](x)
    assert tokens.shape == (B, K + 1) and ((count >= 1) & (count <= K + 1)).all()
    fed = calls[-1][0][2].view(B, K + 1)
    assert torch.equal(fed[:, 1:], x.draft.tokens)
    # What their kernels are given is scaled already; temperature 1 needs no copy.
    assert torch.allclose(calls[-1][0][0], x.target.flatten(0, 1) / 0.7)
    plain = _inputs("token", 1.0)
    token["vllm-v2"](plain)
    assert calls[-1][0][0].data_ptr() == plain.target.data_ptr()
    outside.providers("block")["vllm-v2"](_inputs("block"))
    assert calls[-1][1] == {"use_block_verification": True}
    greedy = _inputs("greedy", 0.0)
    tokens, count = outside.providers("greedy")["vllm-v2"](greedy)
    assert calls[-1][0][1] is None
    best = greedy.target.argmax(-1)
    assert all(int(tokens[b, n - 1]) == int(best[b, n - 1]) for b, n in enumerate(count))


def test_sgl_kernel(stand_in) -> None:
    def greedy(*arguments: Any) -> None:
        predicts, accepted, count, candidates, places, after, beside, best = arguments
        assert after.tolist() == [[1, 2, -1]] * B and (beside == -1).all()
        assert candidates.shape == best.shape == places.shape == accepted.shape == (B, K + 1)
        count.copy_((candidates[:, 1:] == best[:, :-1]).int().cumprod(1).sum(1))

    chain = functools.partial(sglang.chain_speculative_sampling, impl="reference")
    stand_in("sgl_kernel", tree_speculative_sampling_target_only=chain, verify_tree_greedy=greedy)
    known = outside.providers("token")["sgl-kernel"](_inputs("token"))
    assert ((known.count >= 0) & (known.count <= K)).all()
    kept = known.count + 1
    assert ((known.accepted >= 0).sum(1) == kept).all()
    known = outside.providers("greedy")["sgl-kernel"](_inputs("greedy", 0.0))
    assert known.count.tolist() == [K // 2] * B


def test_flash_attn_gives_what_ours_gives(stand_in) -> None:
    def attention(
        q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any, causal: bool
    ) -> torch.Tensor:
        assert causal and cache_seqlens.dtype == block_table.dtype == torch.int32
        assert k.shape[1] % 256 == 0
        out = torch.empty_like(q)
        for b, length in enumerate(cache_seqlens.tolist()):
            keys, values = (
                its[block_table[b].long()].flatten(0, 1)[:length].transpose(0, 1) for its in (k, v)
            )
            width = q.shape[1]
            seen = torch.arange(length) <= length - width + torch.arange(width)[:, None]
            out[b] = torch.nn.functional.scaled_dot_product_attention(
                q[b].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen,
                enable_gqa=True,
            )[0].transpose(0, 1)  # fmt: skip
        return out

    stand_in("flash_attn", flash_attn_with_kvcache=attention)
    shape = {"B": 2, "K": 2, "L": 20, "Hq": 4, "Hkv": 2, "D": 32, "page": 256}
    x = chain_attention_inputs(shape, torch.float32, "cpu")
    theirs = outside.providers("chain attention")["flash-attn"](x)
    assert torch.allclose(theirs, chain_attention_op("reference")(x), atol=1e-5)


def test_a_failing_outsider_fails_no_run(stand_in, capsys, monkeypatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    stand_in("flashinfer.sampling", sampling_from_logits=broken)
    case = command_case("saguaro_sample")
    monkeypatch.setitem(case.providers, "flashinfer", outside.providers("sample")["flashinfer"])
    shape = ("--shapes", "R=1,V=16384,T=1.0")
    line = ["saguaro_sample", "--no-gate", *shape, "--providers", "ours,flashinfer"]
    assert command.main(line) == 0
    assert "no kernel image" in capsys.readouterr().out
    assert outside.is_outside("flashinfer") and not outside.is_outside("ours")


def command_case(name: str) -> Any:
    from bench import cases  # noqa: F401
    from bench.registry import CASES

    return CASES[name]
