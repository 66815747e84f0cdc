"""Inputs of the kernel cases, and the calls that run each op on them: `op(impl)(inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from saguaro_kernels import Keys, Sampling, Stream, distribution, saguaro_sample, sample_geometric
from saguaro_kernels.cache import SpeculationCache
from saguaro_kernels.ngram import ngram_propose
from saguaro_kernels.outcomes import allocate_fan_out, predict_outcomes
from saguaro_kernels.promotion import promote_branch, promote_pages
from saguaro_kernels.residual import residual
from saguaro_kernels.rng import uniform_reference
from saguaro_kernels.tree import chain_layout, tree_layout
from saguaro_kernels.tree_attention import tree_attention
from saguaro_kernels.verification import Draft, verify

from .registry import Shape

Run = Callable[[SimpleNamespace], Any]

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


def stats_op(impl: str) -> Run:
    return lambda x: distribution.row_stats(x.logits, x.sampling, impl=impl)


def sample_op(impl: str) -> Run:
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
    if mode == "greedy":
        # One refusal: where all are accepted, any implementation reads the bonus row too.
        tokens = tokens.clone()
        tokens[:, K // 2] = (tokens[:, K // 2] + 1) % vocab
    one_hot = mode in ("greedy", "coupled")
    proposed = (
        Draft(tokens, num_draft)
        if one_hot
        else Draft(tokens, num_draft, draft, logq, lse, sampling=sampling)
    )
    if close:
        request_keys = _late_keys(target[:, :K], proposed, request_keys)
    return SimpleNamespace(
        target=target, draft=proposed, sampling=sampling, keys=request_keys,
        temperature=float(shape["T"]),
    )  # fmt: skip


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


def verify_op(rule: str, impl: str) -> Run:
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


def outcomes_op(impl: str) -> Run:
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
    per_request = -(-slots // shape.get("page", PAGE))
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
        keys=random(pages, shape.get("page", PAGE), kv_heads, D),
        values=random(pages, shape.get("page", PAGE), kv_heads, D),
        table=table,
        trunk=torch.full((B,), shape["L"], dtype=torch.int32, device=device),
        depth=(torch.arange(M, device=device, dtype=torch.int32) % (K + 1)).repeat(B, 1),
        draft_len=K,
    )


def attention_op(impl: str) -> Run:
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


def chain_attention_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The K + 1 queries that a verification asks of B requests, over L keys before them."""
    B, K = shape["B"], shape["K"]
    inputs = attention_inputs({"M": K + 1, **shape}, dtype, device)
    inputs.depth = torch.arange(K + 1, device=device, dtype=torch.int32).repeat(B, 1)
    return inputs


def chain_attention_op(impl: str) -> Run:
    return lambda x: tree_attention(
        x.query,
        x.keys,
        x.values,
        x.table,
        trunk_len=x.trunk,
        depth=x.depth,
        draft_len=x.draft_len,
        step=-1,
        impl=impl,
    )


def promotion_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The hit branches of B requests in a cache of all layers."""
    M, K = shape["M"], shape["K"]
    table, pages = _pages(shape, 256 + K + 1 + (K + 1) * M, device)
    size = (2 * shape["layers"], pages, PAGE, shape["Hkv"], shape["D"])
    return SimpleNamespace(
        pages=torch.zeros(size, dtype=dtype, device=device),
        changed=("pages",),
        table=table,
        hits=_hits(shape, device),
    )


def promote_op(impl: str) -> Run:
    return lambda x: promote_branch(x.pages, x.table, **x.hits, impl=impl)


def page_promotion_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The hit branches of B requests whose pages hold one slot each."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    slots = 256 + K + 1 + (K + 1) * M
    table = torch.arange(B * slots, dtype=torch.int32, device=device).view(B, slots)
    return SimpleNamespace(table=table, changed=("table",), hits=_hits(shape, device))


def promote_pages_op(impl: str) -> Run:
    return lambda x: promote_pages(x.table, **x.hits, impl=impl)


def _hits(shape: Shape, device: str) -> dict[str, Any]:
    """A branch in the middle, after three accepted drafts, for each request."""
    whole = lambda value: torch.full((shape["B"],), value, dtype=torch.int32, device=device)  # noqa: E731
    lengths = {"trunk_len": whole(256), "depth": whole(3), "branch": whole(shape["M"] // 2)}
    return lengths | {"draft_len": shape["K"], "branches": shape["M"]}


def cache_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """A full table of B * M chains; one outcome per request, half of them prepared."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    cache = SpeculationCache(2 * B * M, B * M, device, draft_len=K)
    uid = torch.arange(B, device=device).repeat_interleave(M)
    branch = torch.arange(M, device=device).repeat(B)
    base, accepted = torch.full_like(uid, 50), (branch % (K + 1)).to(torch.int32)
    slot = torch.arange(B * M, dtype=torch.int32, device=device)
    impl = "reference" if device == "cpu" else "auto"
    cache.insert(uid, 3, base, accepted, branch, slot, impl=impl)
    request = torch.arange(B, device=device)
    extra = torch.where(request < (B + 1) // 2, 0, 10**6)
    return SimpleNamespace(
        cache=cache,
        uid=request,
        base=base[:B],
        accepted=torch.zeros(B, dtype=torch.int32, device=device),
        extra=extra,
        inserted=(uid, base, accepted, branch, slot),
        # Where a key lands may depend on the order of arrival; what is stored for a slot may not.
        changed=("cache.key_rows", "cache.dropped"),
    )


def lookup_op(impl: str) -> Run:
    return lambda x: x.cache.lookup(x.uid, 3, x.base, x.accepted, x.extra, impl=impl)


def insert_op(impl: str) -> Run:
    def run(x: SimpleNamespace) -> None:
        uid, base, accepted, extra, slot = x.inserted
        # A new generation: the table counts as empty again.
        x.cache.insert(uid, 4, base, accepted, extra, slot, impl=impl)

    return run


def residual_op(impl: str) -> Run:
    return lambda x: residual(
        x.target, x.draft, target_sampling=x.sampling, draft_sampling=x.sampling, impl=impl
    )


def residual_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """R pairs of rows."""
    target, draft = logits_pair((shape["R"], shape["V"]), dtype, device)
    sampling = _temperatures(shape, shape["R"], device)
    return SimpleNamespace(target=target, draft=draft, sampling=sampling)


def geometric_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """R pairs of rows, and the noise that draws from their mean."""
    inputs = residual_inputs(shape, dtype, device)
    inputs.keys = keys(shape["R"], device)
    return inputs


def geometric_op(impl: str) -> Run:
    def run(x: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        sample, row = sample_geometric(x.draft, x.target, x.sampling, x.keys, offset=0, impl=impl)
        return sample.tokens, row

    return run


def layout_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """M branches of B requests in pages."""
    B, M, K = shape["B"], shape["M"], shape["K"]
    table, _ = _pages(shape, 256 + K + 1 + (K + 1) * M, device)
    return SimpleNamespace(
        depth=(torch.arange(M, device=device, dtype=torch.int32) % (K + 1)).repeat(B, 1),
        tokens=torch.arange(B * M, device=device).view(B, M),
        trunk=torch.full((B,), 256, dtype=torch.int32, device=device),
        table=table,
        draft_len=K,
    )


def layout_op(impl: str) -> Run:
    return lambda x: tree_layout(
        x.depth,
        x.tokens,
        x.trunk,
        draft_len=x.draft_len,
        page_table=x.table,
        page_size=PAGE,
        impl=impl,
    )


def chain_layout_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """The last token of B requests and its drafts, of several lengths."""
    inputs = layout_inputs({"M": shape["K"] + 1, **shape}, dtype, device)
    inputs.count = 1 + torch.arange(shape["B"], device=device, dtype=torch.int32) % (shape["K"] + 1)
    return inputs


def chain_layout_op(impl: str) -> Run:
    return lambda x: chain_layout(
        x.tokens, x.count, x.trunk, page_table=x.table, page_size=PAGE, impl=impl
    )


def ngram_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """Histories of N tokens in which the last three occurred before."""
    B, N = shape["B"], shape["N"]
    history = torch.arange(N, device=device).repeat(B, 1) % 997
    return SimpleNamespace(
        history=history,
        length=torch.full((B,), N, dtype=torch.int32, device=device),
        num_tokens=shape["K"],
    )


def ngram_op(impl: str) -> Run:
    return lambda x: ngram_propose(x.history, x.length, num_tokens=x.num_tokens, impl=impl)


def fan_out_inputs(shape: Shape, dtype: torch.dtype, device: str) -> SimpleNamespace:
    """Histograms of accepted lengths of B requests."""
    counts = torch.tensor([round(1000 * 0.8**k) for k in range(shape["K"] + 1)], device=device)
    return SimpleNamespace(histogram=counts.repeat(shape["B"], 1), branches=shape["M"])


def fan_out_op(impl: str) -> Run:
    return lambda x: allocate_fan_out(x.histogram, x.branches, 0.5, impl=impl)
