"""flash-attn's place in the runtime, with a stand-in of its published signature."""

from __future__ import annotations

import sys
from collections import Counter

import pretend_cuda
import pretend_flash
import pytest
import scripts
import tiny_models
import torch
from pretend_flash import ALSO, CALLS, flash_attn_with_kvcache

from saguaro_kernels.tree_attention.reference import tree_attention_reference
from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.models import as_model, flash
from saguaro_runtime.models.transformers import TransformersModel


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_flash.install(monkeypatch)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("width, heads, kv_heads", [(1, 4, 2), (5, 6, 2), (5, 2, 2), (70, 4, 1)])
def test_chains_are_those_of_tree_attention(
    width: int, heads: int, kv_heads: int, window: int | None, softcap: float | None,
    installed: None,
) -> None:  # fmt: skip
    """Rows of several lengths, across pages and up to a full one, in pages out of order."""
    draw = torch.Generator().manual_seed(width)
    trunk = torch.tensor([0, 7, 256, 512 - width, 600], dtype=torch.int32)
    table = torch.randperm(15, generator=draw).to(torch.int32).reshape(5, 3)
    keys, values = torch.randn(2, 15, 256, kv_heads, 16, generator=draw).to(torch.bfloat16)
    query = torch.randn(5, heads, width, 16, generator=draw).to(torch.bfloat16).transpose(1, 2)
    scale = 0.4 if heads == 6 else None
    options = {"scale": scale, "softcap": softcap, "window": window}
    found = flash.attend(query, keys, values, table, trunk + width, **options)
    expected = tree_attention_reference(
        query.double(), keys.double(), values.double(), table, trunk_len=trunk,
        depth=torch.arange(width, dtype=torch.int32).repeat(5, 1), draft_len=0, step=-1, **options,
    )  # fmt: skip
    assert [tuple(query.shape)] == CALLS and found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.to(torch.bfloat16), rtol=2**-7, atol=1e-6)


def test_a_name_that_is_not_in_the_signature_is_an_error(installed: None) -> None:
    """The control of the stand-in: 2.8.3 calls the table `block_table`, flash-attn 3 page_table."""
    with pytest.raises(TypeError, match="page_table"):
        flash_attn_with_kvcache(*torch.zeros(3, 1, 1, 1, 8), page_table=None)
    with pytest.raises(AssertionError, match="divisible by 256"):
        pages = torch.zeros(2, 1, 64, 1, 8, dtype=torch.float16)
        query = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
        length = torch.ones(1, dtype=torch.int32)
        flash.attend(query, *pages, torch.zeros(1, 1, dtype=torch.int32), length)


def test_logits_of_prompt_and_verification(installed: None) -> None:
    """bfloat16, a prompt over two pages: within what that type rounds."""
    prompt, chain = torch.arange(280) % 250, torch.tensor([[1, 2, 3], [4, 5, 6]])
    target = tiny_models.llama(length=512, scale=1.0).to(torch.bfloat16)
    logits = []
    for attention in ("tree", "flash"):
        model = as_model(target, rows=2, tokens=1024, impl="reference", attention=attention)
        for row, length in enumerate((280, 40)):
            model.allocate(row, 300)
            model.prefill(row, prompt[:length])
        trunk = torch.tensor([280, 40], dtype=torch.int32)
        logits.append(model.extend(torch.arange(2), chain, trunk).float())
        assert bool(CALLS) == (attention == "flash")
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


def test_an_engine_on_a_gpu_that_is_not_there(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of transformers models go through flash-attn, branches do not, nor does what is a
    `Model` already: the other's chains still do. The text stays the same."""
    monkeypatch.setattr(flash, "DTYPES", (torch.float32,))
    ALSO.append(torch.float32)
    target = tiny_models.llama(scale=1.5)
    draft = tiny_models.llama(1, near=target, scale=1.5)
    prompts = [[5, 6, 7], [40] * 20]
    params = [SamplingParams(6), scripts.sampled(1, 6)]
    options = {"k": 2, "branches": 4, "max_batch": 2, "max_tokens": 512}
    with scripts.engine(target, draft, **options) as engine:
        expected = [its.token_ids for its in engine.generate(prompts, params)]
    assert not CALLS
    calls = {}
    for own in ("", "target", "draft"):
        CALLS.clear()
        with pretend_cuda.Machine(monkeypatch) as machine:
            models = {"target": target, "draft": draft}
            for model in models.values():
                machine.place(model, "cuda:0")
            if own:
                models[own] = TransformersModel(models[own], rows=2, tokens=768)
            with scripts.engine(
                *models.values(), lane="stream", impl="auto", attention="flash", **options
            ) as engine:
                found = [its.token_ids for its in engine.generate(prompts, params)]
                stats = engine.stats()
            machine.sweep()
        calls[own] = Counter(CALLS)
        assert stats["speculation"] == "on" and stats["hits"] > 0
        assert all(side["captured"] for side in stats["cuda_graphs"].values())
        assert found == expected
        assert not machine.races, machine.races[:5]
    assert {shape[1] for shape in calls[""]} >= {1, 3, 19}  # draft tokens, verifications, a prompt
    assert calls["target"] and calls["draft"]
    assert calls[""] == calls["target"] + calls["draft"]


def test_it_is_imported_by_nobody_who_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import of it raises
    target = tiny_models.llama()
    with Engine(target, None, EngineConfig(method="ar", impl="reference")) as engine:
        assert engine.generate([1, 2], SamplingParams(2))[0].token_ids
    with pytest.raises(flash.UnsupportedError, match=r"cannot be imported.*saguaro-ssd\[flash\]"):
        flash.check_machine(torch.device("cuda", 0))


def test_what_it_does_not_take_is_refused_by_name(installed: None) -> None:
    target = tiny_models.llama()
    with pytest.raises(flash.UnsupportedError, match="target lies on cpu, want a GPU"):
        Engine(target, None, EngineConfig(method="ar", attention="flash"))
    flash.check_machine(torch.device("cuda", 0))
    with pytest.raises(flash.UnsupportedError, match="LlamaForCausalLM is in torch.float32"):
        TransformersModel(target, rows=1, tokens=256, page_size=256, attention="flash")
    with pytest.raises(flash.UnsupportedError, match="heads of 264"):
        flash.check_model("Big", torch.float16, 264)
    with pytest.raises(flash.UnsupportedError, match="heads of 12,"):
        flash.check_model("Odd", torch.float16, 12)
