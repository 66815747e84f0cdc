"""Inputs of the kernel cases that work on rows of logits, and the calls that run each op on them:
`op(impl)(inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from saguaro_kernels import Keys, Sampling, Stream, distribution, saguaro_sample, sample_geometric
from saguaro_kernels._launch import Impl
from saguaro_kernels.outcomes import predict_outcomes
from saguaro_kernels.residual import residual
from saguaro_kernels.rng import uniform_reference
from saguaro_kernels.verification import Draft, verify

from .registry import Shape

Run = Callable[[SimpleNamespace], Any]


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


def stats_op(impl: Impl) -> Run:
    return lambda x: distribution.row_stats(x.logits, x.sampling, impl=impl)


def sample_op(impl: Impl) -> Run:
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
    assert draft.sampling is not None and draft.logq is not None  # as verify_inputs makes it
    temperature = draft.sampling.temperature
    log_p = (target.float() / temperature[:, None, None]).log_softmax(-1)
    ratio = (log_p.gather(-1, draft.tokens[..., None])[..., 0] - draft.logq).exp()
    joint = torch.ones_like(temperature)
    a = torch.stack([joint := (joint * r).clamp(max=1.0) for r in ratio.unbind(1)], dim=1).cpu()
    seeds: list[int] = []
    for row in a:
        candidates = torch.arange(20000)
        every = Keys(candidates, torch.full_like(candidates, int(start.base[len(seeds)])))
        u = torch.stack(
            [uniform_reference(every, i, Stream.ACCEPT) for i in range(len(row))], dim=1
        )
        late = (u[:, -1] > row[-1]) & (u[:, :-1] < row[:-1]).all(1)
        seeds.append(int(candidates[late][0]))
    return Keys(torch.tensor(seeds, device=start.seed.device), start.base)


def verify_op(rule: str, impl: Impl) -> Run:
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


def outcomes_op(impl: Impl) -> Run:
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


def residual_op(impl: Impl) -> Run:
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


def geometric_op(impl: Impl) -> Run:
    def run(x: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        sample, row = sample_geometric(x.draft, x.target, x.sampling, x.keys, offset=0, impl=impl)
        return sample.tokens, row

    return run
