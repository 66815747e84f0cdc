"""How good a draft is on held-out prompts: acceptance in the engine's rounds, times, the plan."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError

from ..config import EngineConfig
from ..engine import Engine
from ..models import as_model
from ..models.draft import DRAFT_VOCAB, all_logits
from ..params import SamplingParams
from ..planner import Deployment, MissLaw, plan
from ..planner.search import interpolate

TEMPERATURES = (0.0, 0.6, 1.0)
KS = (2, 4)
_BRANCHES = 16
_FAN_OUTS = (1, 2, 4, 8, 16, 32)
_USUAL_MISS = MissLaw(0.25, 0.5)
"""Used if too few drafts were rejected to fit one: what `saguaro plan` assumes."""


def measure(
    target: Any,
    draft: Any,
    prompts: Sequence[list[int]],
    *,
    seed: int,
    new_tokens: int = 48,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return what SD does with this draft, on the CPU, as plain numbers.

    acceptance: by temperature, the mean of sum over x of min(p(x), q(x)) at the target's own text.
    tokens_per_round: by K and temperature. draft_vocab: of a draft with a part of the target's ids,
    their number, how much of the target's text they are, and the times with the whole head. miss:
    P(the token that replaces a rejected draft is not among the F best others) at temperature 0, as
    scale * F^-exponent. `tick` is called per run.
    """
    acceptance: dict[str, float] = {}
    tokens_per_round: dict[str, dict[str, float]] = {str(k): {} for k in KS}
    miss = _USUAL_MISS
    for temperature in TEMPERATURES:
        params = SamplingParams(new_tokens, temperature, seed=seed)
        for k in KS:
            config = _config(k, prompts, new_tokens)
            with Engine(target, draft, config) as engine:
                outputs = engine.generate(prompts, params)
                found = engine.stats()["tokens_per_round"]
            tokens_per_round[str(k)][f"{temperature:g}"] = found
            tick()
        texts = [(ids, out.token_ids) for ids, out in zip(prompts, outputs, strict=True)]
        rows = list(_rows(target, draft, texts, temperature))
        accepted = torch.cat([torch.minimum(p, q).sum(-1) for p, q in rows])
        acceptance[f"{temperature:g}"] = float(accepted.mean())
        if temperature == 0:
            miss = _miss_law(rows)
    times = _times(target, draft)
    part = _part(target, draft, texts)
    return {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "acceptance": acceptance,
        "tokens_per_round": tokens_per_round,
        "ms": times,
        "draft_vocab": part,
        "miss": dataclasses.asdict(miss),
        "plan": _plan(acceptance["0"], miss, times),
    }


def render(found: Mapping[str, Any]) -> str:
    """The numbers as a table, and what to expect of them."""
    ms, best = found["ms"], found["plan"]
    titles = ["temperature", *(f"{t:g}" for t in TEMPERATURES)]
    lines = [titles, ["acceptance", *(f"{share:.2f}" for share in found["acceptance"].values())]]
    for k, by_temperature in found["tokens_per_round"].items():
        name = f"tokens per round, K = {k}"
        lines.append([name, *(f"{tokens:.2f}" for tokens in by_temperature.values())])
    width = max(len(line[0]) for line in lines)
    table = [line[0].ljust(width) + "".join(cell.rjust(7) for cell in line[1:]) for line in lines]
    if part := found["draft_vocab"]:
        whole = part["ms"]
        table.append(
            f"logits for {part['ids']} ids, {part['covered']:.1%} of the target's text; for all of "
            f"them a draft step takes {whole['step']:.1f} ms, {_BRANCHES} branches "
            f"{whole['tree_step']:.1f} ms"
        )
    miss = f"{found['miss']['scale']:.3g}:{found['miss']['exponent']:.3g}"
    step = f"1={ms['step']:.2f},{_BRANCHES}={ms['tree_step']:.2f}"
    return "\n".join(
        [
            f"{found['prompts']} held-out prompts, {found['new_tokens']} tokens each, rule block",
            *table,
            f"a draft step {ms['step']:.1f} ms ({ms['step'] / ms['verify']:.2f} of the target's "
            f"{ms['verify']:.1f} ms for {max(KS) + 1} tokens), {ms['tree_step']:.1f} ms for "
            f"{_BRANCHES} branches",
            f"predicted at temperature 0: SD {best['sd_speed_vs_ar']:.2f} x AR (K = "
            f"{best['sd_k']}), SSD {best['speed_vs_ar']:.2f} x AR (K = {best['k']}, "
            f"{best['branches']} branches), by",
            f"  saguaro plan --verify-ms {ms['verify']:.2f} --step-ms {step} "
            f"--acceptance {found['acceptance']['0']:.3f} --miss {miss}",
        ]
    )


def _config(k: int, prompts: Sequence[list[int]], new_tokens: int) -> EngineConfig:
    slots = sum(len(ids) + new_tokens + 128 for ids in prompts)
    return EngineConfig(
        method="sd",
        k=k,
        lane="inline",
        max_batch=len(prompts),
        max_tokens=max(slots, 1024),
        impl="reference",
    )


def _rows(
    target: Any, draft: Any, texts: Sequence[tuple[list[int], list[int]]], temperature: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(p, q) [L, V] of the new tokens of each text; one-hot at temperature 0."""
    for prompt, new in texts:
        if not new:
            continue
        ids = torch.tensor([prompt + new[:-1]])
        with torch.no_grad():
            p, q = (
                all_logits(model, ids)[0, len(prompt) - 1 :].float() for model in (target, draft)
            )
        if temperature:
            yield (p / temperature).softmax(-1), (q / temperature).softmax(-1)
        else:
            # One-hot, but with the draft's ranking of the other ids kept at negligible mass.
            yield _one_hot(p), _one_hot(q) + q.softmax(-1) * 1e-9


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _miss_law(rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> MissLaw:
    """How often the target's token is not among the draft's F best ones after its first choice."""
    ranks = []
    for p, q in rows:
        token = p.argmax(-1, keepdim=True)
        rank = (q > q.gather(-1, token)).sum(-1)
        ranks.append(rank[rank > 0])
    rank = torch.cat(ranks).double()
    rates = [float((rank > fan_out).double().mean()) if len(rank) else 0.0 for fan_out in _FAN_OUTS]
    try:
        law = MissLaw.fit(_FAN_OUTS, rates)
    except ConfigError:
        return _USUAL_MISS
    return dataclasses.replace(law, exponent=max(law.exponent, 0.0))


def _part(
    target: Any, draft: Any, texts: Sequence[tuple[list[int], list[int]]]
) -> dict[str, Any] | None:
    ids = getattr(draft, DRAFT_VOCAB, None)
    if ids is None:
        return None
    written = torch.tensor([token for _, new in texts for token in new])
    part = draft.get_output_embeddings()
    draft.set_output_embeddings(target.get_output_embeddings())
    setattr(draft, DRAFT_VOCAB, None)
    try:
        times = _times(target, draft)
    finally:
        draft.set_output_embeddings(part)
        setattr(draft, DRAFT_VOCAB, ids)
    covered = float(torch.isin(written, ids).float().mean())
    return {"ids": len(ids), "covered": covered, "ms": times}


def _times(target: Any, draft: Any) -> dict[str, float]:
    """Milliseconds of a verification of K = 4, a draft step, and one of many branches."""
    width, slots = max(KS) + 1, 512
    context = min(64, target.config.max_position_embeddings // 2)
    row = torch.zeros(1, dtype=torch.int64)
    trunk_len = torch.full((1,), context, dtype=torch.int32)
    models = [as_model(model, rows=1, tokens=slots, impl="reference") for model in (target, draft)]
    for model in models:
        model.allocate(0, slots)
        model.prefill(0, torch.zeros(context, dtype=torch.int64))
    verifier, drafter = models
    branches = torch.zeros(1, _BRANCHES, dtype=torch.int64)
    depth = torch.zeros(1, _BRANCHES, dtype=torch.int32)
    verify, single = torch.zeros(1, width, dtype=torch.int64), row[None]
    with torch.no_grad():
        return {
            "verify": _median_ms(lambda: verifier.extend(row, verify, trunk_len)),
            "step": _median_ms(lambda: drafter.extend(row, single, trunk_len)),
            "tree_step": _median_ms(
                lambda: drafter.decode_tree(row, branches, trunk_len, depth, max(KS), 0)
            ),
        }


def _median_ms(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _plan(acceptance: float, miss: MissLaw, ms: Mapping[str, float]) -> dict[str, Any]:
    deployment = Deployment(
        acceptance=acceptance,
        miss=miss,
        verify_seconds=ms["verify"] / 1e3,
        step_seconds=interpolate({1: ms["step"] / 1e3, _BRANCHES: ms["tree_step"] / 1e3}),
    )
    return dataclasses.asdict(plan(deployment, ks=tuple(range(1, 9))))
