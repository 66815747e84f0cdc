"""The kernel cases: inputs, providers and lower bounds of every op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from saguaro_kernels import Keys, Sampling, Stream, distribution, saguaro_sample
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.outcomes import predict_outcomes
from saguaro_kernels.promotion import promote_branch
from saguaro_kernels.rng import uniform_reference
from saguaro_kernels.tree_attention import tree_attention
from saguaro_kernels.verification import Draft, verify

from . import outside
from .registry import Case, Shape, register

V = 128256
PAGE = 16


def logits_pair(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, noise: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits: one Zipf law over scattered ids, each side with noise of its own."""
    generator = torch.Generator(device=device).manual_seed(0)
    order = torch.rand(shape, generator=generator, device=device).argsort(dim=-1)
    base = -1.5 * (1.0 + order.float()).log()
    sides = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    target, draft = ((base + noise * side).to(dtype) for side in sides)
    return target, draft


def keys(rows: int, device: str) -> Keys:
    """Seeds and bases of `rows` requests."""
    index = torch.arange(rows, device=device)
    return Keys(seed=1234 + index, base=100 + 7 * index)


def _temperatures(shape: Shape, rows: int, device: str) -> Sampling:
    filters = {}
    if "top_k" in shape:
        filters["top_k"] = torch.full((rows,), shape["top_k"], dtype=torch.int32, device=device)
    if "top_p" in shape:
        filters["top_p"] = torch.full((rows,), shape["top_p"], device=device)
    return Sampling(torch.full((rows,), float(shape["T"]), device=device), **filters)


def rows_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """R independent rows of logits, for row_stats and saguaro_sample."""
    logits, _ = logits_pair((shape["R"], shape["V"]), dtype, device)
    return SimpleNamespace(
        logits=logits,
        sampling=_temperatures(shape, shape["R"], device),
        keys=keys(shape["R"], device),
        downweight=torch.full((shape["R"],), shape["C"], device=device) if "C" in shape else None,
        top_f=shape.get("F", 0),
    )


def _stats(impl: str) -> Any:
    return lambda x: distribution.row_stats(x.logits, x.sampling, impl=impl)


def _sample(impl: str) -> Any:
    def run(x: SimpleNamespace) -> Any:
        scaled = x.downweight is not None
        return saguaro_sample(
            x.logits,
            x.sampling,
            x.keys,
            offset=0,
            top_f=x.top_f,
            scale_f=x.top_f if scaled else 0,
            downweight=x.downweight,
            scheme="downweight" if scaled else "plain",
            impl=impl,
        )

    return run


def verify_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """B requests with K drafts drawn from their own rows, as `rule` needs them.

    "close" sides differ by little: the joint ratio is below 1 and every residual is nearly empty,
    so that block verification has to compute all of them before it finds none to stop at.
    """
    B, K, vocab, mode = shape["B"], shape["K"], shape["V"], shape["rule"]
    close = shape.get("inputs") == "close"
    target, draft = logits_pair(
        (B, K + 1, vocab), dtype, device, **({"noise": 0.05} if close else {})
    )
    draft = draft[:, :K].contiguous()
    sampling, request_keys = _temperatures(shape, B, device), keys(B, device)
    stream = Stream.COUPLED if mode == "coupled" else Stream.DRAFT
    sample = saguaro_sample(
        draft.flatten(0, 1),
        Sampling(sampling.temperature.repeat_interleave(K)),
        Keys(request_keys.seed.repeat_interleave(K), request_keys.base.repeat_interleave(K)),
        offset=torch.arange(K, device=device).repeat(B),
        stream=stream,
        impl="reference" if device == "cpu" else "auto",
    )
    num_draft = torch.full((B,), K, dtype=torch.int32, device=device)
    tokens, logq, lse = (field.view(B, K) for field in (sample.tokens, sample.logq, sample.lse))
    one_hot = mode in ("greedy", "coupled")
    proposed = (
        Draft(tokens, num_draft)
        if one_hot
        else Draft(tokens, num_draft, draft, logq, lse, sampling=sampling)
    )
    if close:
        request_keys = _late_keys(target[:, :K], proposed, request_keys)
    return SimpleNamespace(target=target, draft=proposed, sampling=sampling, keys=request_keys)


def _late_keys(target: torch.Tensor, draft: Draft, start: Keys) -> Keys:
    """Seeds whose uniforms refuse the last draft and leave every other one to its residual."""
    temperature = draft.sampling.temperature
    log_p = (target.float() / temperature[:, None, None]).log_softmax(-1)
    ratio = (log_p.gather(-1, draft.tokens[..., None])[..., 0] - draft.logq).exp()
    joint = torch.ones_like(temperature)
    a = torch.stack([joint := (joint * r).clamp(max=1.0) for r in ratio.unbind(1)], dim=1).cpu()
    seeds = []
    for row in a:
        candidates = torch.arange(20000)
        every = Keys(candidates, torch.full_like(candidates, int(start.base[len(seeds)])))
        u = torch.stack(
            [uniform_reference(every, i, Stream.ACCEPT) for i in range(len(row))], dim=1
        )
        late = (u[:, -1] > row[-1]) & (u[:, :-1] < row[:-1]).all(1)
        seeds.append(int(candidates[late][0]))
    return Keys(torch.tensor(seeds, device=start.seed.device), start.base)


def _verify(rule: str, impl: str) -> Any:
    return lambda x: verify(x.target, x.draft, x.sampling, x.keys, rule=rule, impl=impl)


def outcomes_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """K + 1 draft rows of B requests."""
    B, K = shape["B"], shape["K"]
    _, draft = logits_pair((B, K + 1, shape["V"]), dtype, device)
    return SimpleNamespace(
        logits=draft,
        tokens=draft[:, :K].argmax(-1),
        num_draft=torch.full((B,), K, dtype=torch.int32, device=device),
        sampling=_temperatures(shape, B, device),
        keys=keys(B, device),
        accept_prob=torch.tensor([0.2 * 0.8**k for k in range(K + 1)], device=device).repeat(B, 1),
        branches=shape["M"],
    )


def _outcomes(impl: str) -> Any:
    return lambda x: predict_outcomes(
        x.logits,
        x.tokens,
        x.num_draft,
        x.sampling,
        x.keys,
        branches=x.branches,
        accept_prob=x.accept_prob,
        ranking="noise",
        impl=impl,
    )


def _pages(shape: Shape, slots: int, device: str) -> tuple[torch.Tensor, int]:
    """A page table whose pages are not in order, as in a cache that has lived."""
    per_request = -(-slots // PAGE)
    order = torch.randperm(shape["B"] * per_request, generator=torch.Generator().manual_seed(0))
    return order.view(shape["B"], per_request).to(torch.int32).to(device), len(order)


def attention_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """M branches of B requests at the last tree step, over a trunk of L keys."""
    B, M, K, D = shape["B"], shape["M"], shape["K"], shape["D"]
    heads, kv_heads = shape["Hq"], shape["Hkv"]
    table, pages = _pages(shape, shape["L"] + K + 1 + (K + 1) * M, device)
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    return SimpleNamespace(
        query=random(B, M, heads, D),
        keys=random(pages, PAGE, kv_heads, D),
        values=random(pages, PAGE, kv_heads, D),
        table=table,
        trunk=torch.full((B,), shape["L"], dtype=torch.int32, device=device),
        depth=(torch.arange(M, device=device, dtype=torch.int32) % (K + 1)).repeat(B, 1),
        draft_len=K,
    )


def _attention(impl: str) -> Any:
    return lambda x: tree_attention(
        x.query,
        x.keys,
        x.values,
        x.table,
        trunk_len=x.trunk,
        depth=x.depth,
        draft_len=x.draft_len,
        step=x.draft_len,
        impl=impl,
    )


def promotion_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The hit branches of B requests in a cache of all layers."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    table, pages = _pages(shape, 256 + K + 1 + (K + 1) * M, device)
    size = (2 * shape["layers"], pages, PAGE, shape["Hkv"], shape["D"])
    return SimpleNamespace(
        pages=torch.zeros(size, dtype=dtype, device=device),
        table=table,
        trunk=torch.full((B,), 256, dtype=torch.int32, device=device),
        depth=torch.full((B,), 3, dtype=torch.int32, device=device),
        branch=torch.full((B,), M // 2, dtype=torch.int32, device=device),
        draft_len=K,
        branches=M,
    )


def _promote(impl: str) -> Any:
    return lambda x: promote_branch(
        x.pages,
        x.table,
        trunk_len=x.trunk,
        depth=x.depth,
        branch=x.branch,
        draft_len=x.draft_len,
        branches=x.branches,
        impl=impl,
    )


def cache_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """A full table of B * M chains; one outcome per request, half of them prepared."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    cache = SpeculationCache(2 * B * M, B * M, device, draft_len=K)
    uid = torch.arange(B, device=device).repeat_interleave(M)
    branch = torch.arange(M, device=device).repeat(B)
    base, accepted = torch.full_like(uid, 50), (branch % (K + 1)).to(torch.int32)
    slot = torch.arange(B * M, dtype=torch.int32, device=device)
    cache.insert(
        uid, 3, base, accepted, branch, slot, impl="reference" if device == "cpu" else "auto"
    )
    request = torch.arange(B, device=device)
    extra = torch.where(request < (B + 1) // 2, 0, 10**6)
    return SimpleNamespace(
        cache=cache,
        uid=request,
        base=base[:B],
        accepted=torch.zeros(B, dtype=torch.int32, device=device),
        extra=extra,
    )


def _lookup(impl: str) -> Any:
    return lambda x: x.cache.lookup(x.uid, 3, x.base, x.accepted, x.extra, impl=impl)


def _ours(make: Any, *arguments: str) -> dict[str, Any]:
    return {"ours": make(*arguments, "triton"), "torch": make(*arguments, "reference")}


register(
    Case(
        name="row_stats",
        summary="max, argmax, log-normaliser and cutoff of each row",
        gate="tests/kernels/test_distribution.py",
        shapes=(
            {"R": 8, "V": V, "T": 1.0},
            {"R": 8, "V": V, "T": 0.7},
            {"R": 8, "V": V, "T": 0.7, "top_k": 50},
            {"R": 8, "V": V, "T": 0.7, "top_p": 0.9},
        ),
        inputs=rows_inputs,
        providers=_ours(_stats),
        bound=lambda s, size: s["R"] * s["V"] * size,
        limit=1.05,
    )
)
register(
    Case(
        name="saguaro_sample",
        summary="one token per row, its log q, the top-F ids",
        gate="tests/kernels/test_sampling.py",
        shapes=(
            {"R": 8, "V": V, "T": 1.0, "F": 8},
            {"R": 24, "V": V, "T": 1.0, "F": 32},
            {"R": 24, "V": V, "T": 0.7, "F": 8},
            {"R": 24, "V": V, "T": 1.0, "F": 8, "C": 0.8},
            {"R": 8, "V": V, "T": 0.7, "F": 8, "top_p": 0.9},
        ),
        inputs=rows_inputs,
        providers=_ours(_sample) | outside.samplers(),
        bound=lambda s, size: s["R"] * s["V"] * size,
        limit=1.05,
    )
)


def _verify_case(rule: str, rows: Any, *, launches: int, limit: float, **extra: Any) -> None:
    law = rule.partition("-")[0]
    temperatures = (0.0,) if rule == "greedy" else (1.0, 0.7)
    register(
        Case(
            name=f"verify.{rule}",
            summary=f"accepted drafts and the extra token, {rule}",
            gate="tests/kernels/test_verification.py",
            shapes=tuple(
                {"B": B, "K": 7, "V": V, "T": T, "rule": law, **extra}
                for B in (1, 8)
                for T in temperatures
            ),
            inputs=verify_inputs,
            providers=_ours(_verify, "token" if law == "greedy" else law)
            | (outside.verifiers() if rule == "token" else {}),
            bound=lambda s, size: s["B"] * rows(s["K"]) * s["V"] * size,
            limit=limit,
            launches=launches,
            quick=len(temperatures),
        )
    )


# Rows of V that must be read: K normalisers and one (p, q) pair; for block also rows 2..K of q,
# less what a backward scan can skip; greedy needs no bonus row; coupled may.
_verify_case("token", lambda K: K + 2, launches=3, limit=1.15)
_verify_case("block", lambda K: K + 2, launches=4, limit=3.2 / 2.31)
_verify_case("block-close", lambda K: 2 * K + 1, launches=4, limit=5.6 / 3.85, inputs="close")
_verify_case("coupled", lambda K: K + 1, launches=3, limit=1.15)
_verify_case("greedy", lambda K: K, launches=2, limit=1.9 / 1.8)
register(
    Case(
        name="predict_outcomes",
        summary="the M most promising (k, extra) of each request",
        gate="tests/kernels/test_outcomes.py",
        shapes=(
            {"B": 1, "K": 7, "V": V, "M": 24, "T": 1.0},
            {"B": 8, "K": 7, "V": V, "M": 24, "T": 1.0},
        ),
        inputs=outcomes_inputs,
        providers=_ours(_outcomes),
        bound=lambda s, size: s["B"] * (s["K"] + 1) * s["V"] * size,
        limit=1.05,
    )
)


def _attention_bytes(s: Shape, size: int) -> float:
    own = (s["K"] + 1) * s["M"] + s["K"] + 1
    per_slot = 2 * s["Hkv"] * s["D"]
    return s["B"] * size * ((s["L"] + own) * per_slot + 2 * s["M"] * s["Hq"] * s["D"])


register(
    Case(
        name="tree_attention",
        summary="one query per branch over the shared trunk and its own keys",
        gate="tests/kernels/test_tree_attention.py",
        shapes=(
            {"B": 1, "M": 24, "K": 7, "L": 1024, "Hq": 32, "Hkv": 8, "D": 64},
            {"B": 1, "M": 24, "K": 7, "L": 8192, "Hq": 32, "Hkv": 8, "D": 64},
            {"B": 8, "M": 16, "K": 7, "L": 2048, "Hq": 32, "Hkv": 8, "D": 128},
        ),
        inputs=attention_inputs,
        providers=_ours(_attention),
        bound=_attention_bytes,
        flops=lambda s: 4.0 * s["B"] * s["M"] * s["Hq"] * s["D"] * (s["L"] + s["K"] + 1),
        # The interpreter multiplies bfloat16 matrices as if their bits were integers.
        dtype=torch.float16,
    )
)
register(
    Case(
        name="promote_branch",
        summary="the hit branch's keys and values, copied into the trunk",
        gate="tests/kernels/test_promotion.py",
        shapes=(
            {"B": 1, "M": 24, "K": 7, "layers": 16, "Hkv": 8, "D": 64},
            {"B": 8, "M": 24, "K": 7, "layers": 16, "Hkv": 8, "D": 64},
        ),
        inputs=promotion_inputs,
        providers=_ours(_promote),
        bound=lambda s, size: (
            2 * s["B"] * (s["K"] + 1) * 2 * s["layers"] * s["Hkv"] * s["D"] * size
        ),
        launches=1,
    )
)
register(
    Case(
        name="cache_lookup",
        summary="is the outcome prepared? its slot and its chain",
        gate="tests/kernels/test_cache.py",
        shapes=({"B": 32, "M": 24, "K": 7}, {"B": 1, "M": 24, "K": 7}),
        inputs=cache_inputs,
        providers=_ours(_lookup),
        # The key of the outcome, one bucket, the stored key; and for half of them a chain.
        bound=lambda s, size: s["B"] * (36 + 8 + 40 + 13 + 1.5 * 8 * s["K"]),
        limit=4.0,
        launches=1,
    )
)
