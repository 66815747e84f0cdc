"""Providers from other projects, offered where they can be imported; none is needed.

Each is called as its own project calls it. What takes probabilities where ours takes logits has its
softmax in its time; what a project prepares once per step (indices, lengths) is prepared before
the clock starts. A call that fails leaves the provider out, with the reason in its row.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

Run = Callable[[Any], Any]


class Outside(NamedTuple):
    """A function of another project that does what some of our cases do."""

    label: str
    module: str
    """What has to be importable."""
    package: str
    """What to install for it."""
    kinds: tuple[str, ...]
    run: Callable[[Any, str], Any]
    """(inputs, kind) -> its result."""


def providers(kind: str) -> dict[str, Run]:
    """Those that can run cases of this kind here, by label."""

    def bound(its: Outside) -> Run:
        return lambda x: its.run(x, kind)

    return {its.label: bound(its) for its in KNOWN if kind in its.kinds and _installed(its.module)}


def missing() -> list[str]:
    """One line per project that is not installed: its package, and what it would run."""
    kinds: dict[str, list[str]] = {}
    for its in KNOWN:
        if not _installed(its.module):
            kinds.setdefault(its.package, []).extend(f"{its.label}: {kind}" for kind in its.kinds)
    return [f"pip install {package}    {', '.join(its)}" for package, its in kinds.items()]


def is_outside(label: str) -> bool:
    """True for a provider of this module."""
    return any(label == its.label for its in KNOWN)


def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _once(x: Any, name: str, make: Callable[[], SimpleNamespace]) -> SimpleNamespace:
    """What `make` returns, made at the first call on these inputs, which is never timed."""
    prepared = x.__dict__.setdefault("prepared", {})
    if name not in prepared:
        prepared[name] = make()
    return prepared[name]


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scale = temperature.view(-1, *[1] * (logits.dim() - 1))
    return (logits.float() / scale).softmax(-1)


def _flashinfer_verify(x: Any, kind: str) -> Any:
    return _function("flashinfer.sampling", "chain_speculative_sampling")(
        _probabilities(x.draft.logits, x.sampling.temperature),
        x.draft.tokens.int(),
        _probabilities(x.target, x.sampling.temperature),
    )


def _flashinfer_sample(x: Any, kind: str) -> Any:
    if x.downweight is not None:
        raise NotImplementedError("it has no down-weighting")
    scaled = x.logits.float() / x.sampling.temperature[:, None]
    if x.sampling.top_k is None and x.sampling.top_p is None:
        return _function("flashinfer.sampling", "sampling_from_logits")(scaled)
    # No top-k is as many as there are; no top-p is all of the mass.
    top_k = scaled.shape[1] if x.sampling.top_k is None else x.sampling.top_k
    top_p = 1.0 if x.sampling.top_p is None else x.sampling.top_p
    return _function("flashinfer.sampling", "top_k_top_p_sampling_from_logits")(
        scaled, top_k, top_p
    )


def _vllm(x: Any, kind: str) -> Any:
    """The first runner: the bonus token is drawn beforehand, in the way of its sampler."""
    requests, steps = x.draft.tokens.shape
    device = x.target.device

    def make() -> SimpleNamespace:
        return SimpleNamespace(
            counts=[steps] * requests,
            ends=torch.arange(1, requests + 1, device=device, dtype=torch.int32) * steps,
            metadata=SimpleNamespace(
                all_greedy=False,
                all_random=True,
                temperature=x.sampling.temperature,
                generators={},
                top_k=None,
                top_p=None,
            ),  # fmt: skip
        )

    known = _once(x, "vllm", make)
    rows = x.target.float() / x.sampling.temperature[:, None, None]
    bonus = rows[:, steps].softmax(-1)
    bonus = (bonus / torch.empty_like(bonus).exponential_()).argmax(-1, keepdim=True)
    return _function("vllm.v1.sample.rejection_sampler", "rejection_sample")(
        x.draft.tokens.flatten().int(),
        known.counts,
        steps,
        known.ends,
        _probabilities(x.draft.logits, x.sampling.temperature).flatten(0, 1),
        rows[:, :steps].flatten(0, 1).contiguous(),
        bonus,
        known.metadata,
    )


def _vllm_v2(x: Any, kind: str) -> Any:
    """The second runner: temperatures but 0 and 1 are applied to float32 copies of the rows."""
    requests, steps = x.draft.tokens.shape
    device = x.target.device

    def make() -> SimpleNamespace:
        index = torch.arange(requests, device=device, dtype=torch.int32)
        step = torch.arange(steps + 1, device=device, dtype=torch.int32)
        begin = torch.arange(requests + 1, device=device, dtype=torch.int32) * (steps + 1)
        position = (x.keys.base[:, None] - 1 + step).flatten()
        return SimpleNamespace(
            index=index, begin=begin, position=position,
            rows=index.repeat_interleave(steps + 1), step=step.repeat(requests),
        )  # fmt: skip

    known = _once(x, "vllm_v2", make)
    target, draft = x.target.flatten(0, 1), x.draft.logits
    if x.temperature not in (0.0, 1.0):
        target, draft = target.float() / x.temperature, draft.float() / x.temperature
    if kind == "greedy":
        draft = None
    fed = torch.nn.functional.pad(x.draft.tokens, (1, 0)).flatten()
    options = {"use_block_verification": True} if kind == "block" else {}
    return _function("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "rejection_sample")(
        target, draft, fed, known.begin, known.position, known.index, known.rows, known.step,
        x.sampling.temperature, x.keys.seed, steps, **options,
    )  # fmt: skip


def _sgl_kernel(x: Any, kind: str) -> Any:
    """A chain as its tree of one branch; the probabilities of a last draft row are not used."""
    requests, steps = x.draft.tokens.shape
    width, device = steps + 1, x.target.device

    def make() -> SimpleNamespace:
        step = torch.arange(width, device=device)
        after = torch.where(step < steps, step + 1, -1).repeat(requests, 1)
        return SimpleNamespace(
            places=torch.arange(requests * width, device=device).view(requests, width),
            after=after, beside=torch.full_like(after, -1),
            coins=torch.rand(requests, width, device=device),
            last_coin=torch.rand(requests, device=device),
            predicts=torch.full((requests * width,), -1, dtype=torch.int32, device=device),
            accepted=torch.full((requests, width), -1, dtype=torch.int32, device=device),
            count=torch.zeros(requests, dtype=torch.int32, device=device),
        )  # fmt: skip

    known = _once(x, "sgl_kernel", make)
    candidates = torch.nn.functional.pad(x.draft.tokens, (1, 0))
    chain = (known.predicts, known.accepted, known.count, candidates, known.places, known.after)
    if kind == "greedy":
        _function("sgl_kernel", "verify_tree_greedy")(*chain, known.beside, x.target.argmax(-1))
        return known
    draft = _probabilities(x.draft.logits, x.sampling.temperature)
    _function("sgl_kernel", "tree_speculative_sampling_target_only")(
        *chain, known.beside, known.coins, known.last_coin,
        _probabilities(x.target, x.sampling.temperature),
        torch.nn.functional.pad(draft, (0, 0, 0, 1)), 1.0, 1.0, True,
    )  # fmt: skip
    return known


def _flash_attn(x: Any, kind: str) -> Any:
    def make() -> SimpleNamespace:
        return SimpleNamespace(lengths=(x.trunk + x.query.shape[1]).int())

    return _function("flash_attn", "flash_attn_with_kvcache")(
        x.query, x.keys, x.values, cache_seqlens=_once(x, "flash_attn", make).lengths,
        block_table=x.table, causal=True,
    )  # fmt: skip


KNOWN = (
    Outside("flashinfer", "flashinfer", "flashinfer-python", ("token",), _flashinfer_verify),
    Outside("flashinfer", "flashinfer", "flashinfer-python", ("sample",), _flashinfer_sample),
    Outside("vllm", "vllm", "vllm", ("token",), _vllm),
    Outside("vllm-v2", "vllm", "vllm", ("token", "block", "greedy"), _vllm_v2),
    Outside("sgl-kernel", "sgl_kernel", "sgl-kernel", ("token", "greedy"), _sgl_kernel),
    Outside("flash-attn", "flash_attn", "flash-attn", ("chain attention",), _flash_attn),
)
