"""Verification under the contracts of other engines: probabilities in, padded token ids out.

Both functions are the token rule of `verify` on its own kernels, exact in law. Rows count by their
measured mass, so that rows which sum to 0.998 in bfloat16 are distributions too, and no row of the
vocabulary's size is written.

The random numbers are a function of (seed, offset, request): raise `offset` with every call, or
pass neither and let torch's generator of the device give a seed, which CUDA graphs replay rightly.
Both are integers of 64 bits, signed or not: -2^63 .. 2^64 - 1.

An id outside the vocabulary is a draft that is rejected. Ids of a bonus token are emitted as given.

Sources: the documented interfaces of flashinfer.sampling.chain_speculative_sampling and of vLLM's
rejection sampler; the rule, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

import torch

from ._launch import FLOATS, Impl, check_int, check_sizes, check_tensor
from .distribution import PAD, Sampling
from .errors import ShapeError
from .rng import Keys
from .verification.contract import Draft, Inputs
from .verification.op import run

_GOLDEN = -7046029254386353131
"""2^64 / golden ratio, odd: spreads the requests over the seeds."""


@torch.no_grad()
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify a chain of drafts per request, as flashinfer.sampling.chain_speculative_sampling.

    Args:
        draft_probs: [B, K, V] float16 | bfloat16 | float32, rows of any positive mass.
        draft_token_ids: [B, K] int32 | int64, drawn from these rows.
        target_probs: [B, K+1, V], likewise.
        maybe_output_accepted_token_num: [B] int32, added to in place: the drafts that pass their
            own test, whatever came before them. Default: zeros.
        maybe_output_emitted_draft_token_num: [B] int32, added to in place: the drafts that are
            emitted. Default: zeros.
        deterministic: accepted for the interface; results always are.
        generator, seed, offset: see the module. Integers, or tensors of one element.
    Returns:
        (output_token_ids [B, K+1] int32: accepted, extra, -1...; accepted and emitted [B] int32).
    Raises:
        ShapeError, DTypeError, DeviceError: a tensor does not fit. ConfigError: a number does not.
    Cost:
        2 launches of `verify`, one sum over the draft rows and a few ops on [B, K]; 0 host syncs.
    Source:
        See the module.
    """
    device = target_probs.device
    check_tensor(
        "draft_token_ids", draft_token_ids, (None, None), (torch.int32, torch.int64), device
    )
    num_requests, num_steps = draft_token_ids.shape
    draft_shape = (num_requests, num_steps, None)
    check_tensor("draft_probs", draft_probs, draft_shape, FLOATS, device, contiguous_last=True)
    vocab = draft_probs.shape[-1]
    check_sizes("draft_probs", draft_probs, V=vocab)
    target_shape = (num_requests, num_steps + 1, vocab)
    check_tensor("target_probs", target_probs, target_shape, FLOATS, device, contiguous_last=True)
    tokens = draft_token_ids.to(torch.int64)
    num_draft = torch.full((num_requests,), num_steps, dtype=torch.int32, device=device)
    accepted, emitted = (
        torch.zeros(num_requests, dtype=torch.int32, device=device) if count is None else count
        for count in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    )
    per_request = (num_requests,)
    check_tensor("maybe_output_accepted_token_num", accepted, per_request, torch.int32, device)
    check_tensor("maybe_output_emitted_draft_token_num", emitted, per_request, torch.int32, device)
    keys = _keys(num_requests, device, generator, seed, offset)
    passing = torch.empty_like(num_draft)
    ones = torch.ones(num_requests, dtype=torch.float32, device=device)
    mass = draft_probs.sum(-1, dtype=torch.float32)
    verdict = run(
        target_probs,
        Draft(
            tokens,
            num_draft,
            draft_probs,
            logq=_log_of_token(draft_probs, tokens) - mass.log(),
            sampling=Sampling(ones),
        ),
        Sampling(ones),
        keys,
        rule="token",
        inputs=Inputs(target_probs=True, draft_probs=True, num_passing=passing),
        impl=impl,
    )
    accepted.add_(passing)
    emitted.add_(verdict.num_accepted)
    return verdict.tokens.to(torch.int32), accepted, emitted


@torch.no_grad()
def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    target_is_probs: bool = False,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Verify ragged drafts laid out flat, as vLLM's rejection sampler.

    Args:
        draft_token_ids: [N] int32 | int64, the drafts of all requests one after the other.
        num_draft_tokens: their numbers per request, on the host; only their count is used.
        max_spec_len: the largest of them that the output has room for.
        cu_num_draft_tokens: [B] int32 | int64, running sum of the numbers, the own one included.
        draft_probs: [N, V] probabilities, or None for deterministic drafts (n-gram).
        target_logits: [N, V], the target's rows, temperature and filters already applied; or its
            probabilities with `target_is_probs`.
        bonus_token_ids: [B] or [B, 1], emitted where all of a request's drafts are accepted.
        temperature: [B] float32; 0 marks greedy requests. Default: none is.
        generator, seed, offset: see the module. A seed may be [B], one per request.
    Returns:
        [B, max_spec_len + 1] int32: accepted, then the recovered or the bonus token, then -1.
    Raises:
        ShapeError, DTypeError, DeviceError: a tensor does not fit. ConfigError: a number does not.
    Cost:
        2 launches of `verify`, one sum over the draft rows and a few ops on [B, K]; 0 host syncs.
    Source:
        See the module.
    """
    device, ids = target_logits.device, (torch.int32, torch.int64)
    num_requests = len(num_draft_tokens)
    check_tensor("draft_token_ids", draft_token_ids, (None,), ids, device)
    check_tensor("cu_num_draft_tokens", cu_num_draft_tokens, (num_requests,), ids, device)
    num_rows = draft_token_ids.shape[0]
    check_tensor("target_logits", target_logits, (num_rows, None), FLOATS, device)
    check_sizes("target_logits", target_logits, V=target_logits.shape[1])
    bonus_shape = (num_requests, 1)[: max(1, bonus_token_ids.dim())]
    check_tensor("bonus_token_ids", bonus_token_ids, bonus_shape, ids, device)
    if temperature is not None:
        check_tensor("temperature", temperature, (num_requests,), FLOATS, device)
    for number in num_draft_tokens:
        check_int("num_draft_tokens", number, 0)
    check_int("max_spec_len", max_spec_len, max(num_draft_tokens, default=0))
    if sum(num_draft_tokens) > num_rows:
        raise ShapeError(
            f"draft_token_ids: got {num_rows}, want {sum(num_draft_tokens)}, the sum of "
            "num_draft_tokens"
        )
    keys = _keys(num_requests, device, generator, seed, offset)
    end = cu_num_draft_tokens.to(torch.int64)
    start = torch.nn.functional.pad(end, (1, 0))[:-1]
    step = torch.arange(max_spec_len + 1, device=device)
    row_index = (start[:, None] + step).clamp(0, max(num_rows - 1, 0))
    inside = (start[:, None] + step < end[:, None])[:, :max_spec_len]
    if num_rows == 0:
        # No row to point at, and none is read.
        target_logits = target_logits.new_zeros((1, target_logits.shape[1]))
        tokens = torch.full((num_requests, max_spec_len), PAD, dtype=torch.int64, device=device)
        draft_probs = None
    else:
        tokens = draft_token_ids.to(torch.int64)[row_index[:, :max_spec_len]]
        tokens = tokens.masked_fill(~inside, PAD)
    ones = torch.ones(num_requests, dtype=torch.float32, device=device)
    logq = None
    if draft_probs is not None:
        shape = (num_rows, None)
        check_tensor("draft_probs", draft_probs, shape, FLOATS, device, contiguous_last=True)
        flat = draft_token_ids.to(torch.int64)
        logq = _log_of_token(draft_probs, flat) - draft_probs.sum(-1, dtype=torch.float32).log()
        logq = logq[row_index[:, :max_spec_len]]
    verdict = run(
        target_logits,
        Draft(
            tokens,
            (end - start).clamp(0, max_spec_len).to(torch.int32),
            draft_probs,
            logq=logq,
            sampling=Sampling(ones),
            row_index=None if draft_probs is None else row_index[:, :max_spec_len],
        ),
        Sampling(ones if temperature is None else (temperature > 0).to(torch.float32)),
        keys,
        rule="token",
        row_index=row_index,
        inputs=Inputs(
            target_probs=target_is_probs,
            draft_probs=True,
            bonus_tokens=bonus_token_ids.reshape(num_requests).to(torch.int64),
        ),
        impl=impl,
    )
    return verdict.tokens.to(torch.int32)


def _log_of_token(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log of each row's entry at its token, without the mass; the token of PAD is not read."""
    picked = probs.gather(-1, tokens.clamp(0, probs.shape[-1] - 1)[..., None])[..., 0]
    inside = (tokens >= 0) & (tokens < probs.shape[-1])
    return picked.to(torch.float32).masked_fill(~inside, 0.0).log()


def _keys(
    num_requests: int,
    device: torch.device,
    generator: torch.Generator | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
) -> Keys:
    """Keys of one call: a seed per request from the call's, base = offset."""
    if seed is None:
        seed = torch.randint(2**62, (1,), generator=generator, dtype=torch.int64, device=device)
    seed = _word("seed", seed, num_requests, device)
    offset = _word("offset", 0 if offset is None else offset, num_requests, device)
    request = torch.arange(num_requests, device=device) * _GOLDEN
    # A base has 32 bits; what an offset has beyond them goes to the seed.
    return Keys((seed ^ (offset >> 32)) + request, offset.expand(num_requests) & 0xFFFFFFFF)


def _word(
    name: str, value: int | torch.Tensor, num_requests: int, device: torch.device
) -> torch.Tensor:
    """[1] or [B] int64 of the same 64 bits."""
    if isinstance(value, torch.Tensor):
        value = value.reshape(1) if value.numel() == 1 else value
        size = 1 if value.shape == (1,) else num_requests
        check_tensor(name, value, (size,), (torch.int64, torch.int32, torch.uint64), device)
        return value.to(torch.int64)
    check_int(name, value, -(2**63), 2**64 - 1)
    signed = (int(value) + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=device)
