"""vLLM: its rejection samplers on our `verify`, and a proposer that drafts ahead.

    VLLM_PLUGINS=saguaro vllm serve ...            verification by our kernels, in both runners

    speculative_config={"method": "custom_class", "num_speculative_tokens": 4,
                        "model": "saguaro_runtime.integrations.vllm.SaguaroProposer"},
    additional_config={"saguaro": {"draft": "./llama-1b", "branches": 20}}

vLLM is imported where it is asked for and nowhere else. Written against the interfaces of
`vllm.v1.sample.rejection_sampler` and of `vllm.v1.worker.gpu.spec_decode`, the second runner's.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from saguaro_kernels import Draft, Impl, Keys, Sampling, row_stats, verify
from saguaro_kernels.compat import rejection_sample as compat_rejection_sample
from saguaro_kernels.errors import UnsupportedError

from .replace import replace
from .vllm_proposer import SaguaroProposer

__all__ = [
    "SaguaroProposer",
    "register",
    "rejection_sample",
    "rejection_sample_v2",
    "use_saguaro_verify",
]

RUNNERS = (
    ("vllm.v1.sample.rejection_sampler", "rejection_sample"),
    ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "rejection_sample_v2"),
)
"""Modules whose `rejection_sample` is replaced, and by which function of this one."""


def register() -> None:
    """Entry point of `vllm.general_plugins`: replaces the samplers where VLLM_PLUGINS names us.

    vLLM loads every installed plugin when that variable is not set. To have this package installed
    is not to ask for its sampler, so then nothing is done.
    """
    asked = os.environ.get("VLLM_PLUGINS", "").split(",")
    if "saguaro" in (name.strip() for name in asked):
        use_saguaro_verify()


def use_saguaro_verify() -> list[str]:
    """Replace `rejection_sample` in vLLM's runners; returns the modules that have it now.

    Raises:
        UnsupportedError: neither runner is there, or one whose function has other arguments.
    """
    replaced = []
    for path, ours in RUNNERS:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "rejection_sample"):
            replace(module, "rejection_sample", globals()[ours])
            replaced.append(path)
    if not replaced:
        names = ", ".join(path for path, _ in RUNNERS)
        raise UnsupportedError(f"vLLM: got none of {names}; this version has another interface")
    return replaced


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The token rule under the signature of `vllm.v1.sample.rejection_sampler.rejection_sample`.

    Args:
        draft_token_ids .. bonus_token_ids: see saguaro_kernels.compat.rejection_sample.
        sampling_metadata: `all_greedy`, `all_random`, `temperature` [B] (<= 0 is greedy) and
            `generators`, by request, whose texts are then functions of their seeds.
        synthetic_mode, synthetic_conditional_rates: refused.
    Returns:
        [B, max_spec_len + 1] int32, padded with -1.
    """
    if synthetic_mode or synthetic_conditional_rates is not None:
        raise UnsupportedError("synthetic acceptance rates: these are not the target's law")
    num_requests, device = len(num_draft_tokens), target_logits.device
    temperature = None
    if sampling_metadata.all_greedy:
        temperature = torch.zeros(num_requests, device=device)
    elif not sampling_metadata.all_random:
        temperature = sampling_metadata.temperature.to(torch.float32)
    seed = torch.randint(2**62, (num_requests,), device=device)
    for index, generator in sampling_metadata.generators.items():
        if num_draft_tokens[index] > 0:
            seed[index] = torch.randint(2**62, (), generator=generator, device=generator.device)
    return compat_rejection_sample(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        bonus_token_ids,
        temperature=temperature,
        seed=seed,
        impl=impl,
    )


def rejection_sample_v2(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: Any = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token or block rule under the signature of the second runner's `rejection_sample`.

    Args:
        target_logits: [N, V], a request's rows one after the other, its bonus row last;
            temperature, filters and penalties applied.
        draft_logits: [states, K, V_draft], likewise processed, by request state; None: one-hot.
        draft_sampled: [N], the token fed at each row: a row's draft is that of the next row. Ids
            below 0 are no drafts, nor are those behind them.
        cu_num_logits: [B + 1], where requests begin. pos: [N], position of the token fed.
        idx_mapping: [B], a request's state. temperature, seed: [states]; 0 is greedy.
        num_speculative_steps: K, the width of the result less 1.
        expanded_idx_mapping, expanded_local_pos, use_fp64: accepted, not needed.
        synthetic_conditional_rates, contexts .. watermark_key: refused.
    Returns:
        sampled [B, K + 1] int64, -1 beyond num_sampled [B] int32 = accepted + 1.
    Cost:
        `verify`; where draft_logits are given, a copy of the batch's rows and their normalisers. No
        host sync.
    """
    if synthetic_conditional_rates is not None or watermark_key is not None:
        raise UnsupportedError("synthetic rates and watermarks: these are not the target's law")
    steps, states = num_speculative_steps, idx_mapping.to(torch.int64)
    start, end = cu_num_logits[:-1].to(torch.int64), cu_num_logits[1:].to(torch.int64)
    step = torch.arange(steps + 1, device=target_logits.device)
    # A request with fewer drafts points at its bonus row again; the row is not read twice.
    row_index = torch.minimum(start[:, None] + step, end[:, None] - 1)
    tokens = draft_sampled.to(torch.int64)[row_index[:, 1:]]
    given = (step[:-1] < (end - start - 1)[:, None]) & (tokens >= 0)
    count = given.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    row_temperature = temperature.to(torch.float32)[states]
    logits = logq = None
    if draft_logits is not None:
        logits = draft_logits[states]
        flat = Sampling(torch.ones(logits.shape[0] * steps, device=logits.device))
        lse = row_stats(logits.flatten(0, 1), flat, impl=impl).lse.view(-1, steps)
        inside = tokens.clamp(0, logits.shape[2] - 1)
        logq = logits.gather(2, inside[..., None])[..., 0].float() - lse
        logq = logq.masked_fill(tokens >= logits.shape[2], -torch.inf)
    ones = (row_temperature > 0).to(torch.float32)
    draft = Draft(
        tokens.masked_fill(step[:-1] >= count[:, None], -1),
        count,
        logits,
        logq,
        sampling=Sampling(ones),
    )
    verdict = verify(
        target_logits,
        draft,
        Sampling(ones),
        Keys(seed.to(torch.int64)[states], pos.to(torch.int64)[start] + 1),
        rule="block" if use_block_verification else "token",
        row_index=row_index,
        impl=impl,
    )
    return verdict.tokens, verdict.num_accepted + 1
