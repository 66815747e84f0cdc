"""Random verification cases for the kernel tests: drafts drawn as the packages draw them."""

from __future__ import annotations

from typing import Any

import torch

from saguaro_kernels import Draft, Keys, Sampling, saguaro_sample

FIELDS = ("num_accepted", "tokens", "status")


def draw_draft(
    logits: torch.Tensor,
    num_draft: torch.Tensor,
    sampling: Sampling,
    keys: Keys,
    *,
    downweight: float | None = None,
    scale_f: int = 0,
    **options: Any,
) -> Draft:
    """A draft of num_draft [B] tokens from logits [B, K, V], sampled under stream DRAFT."""
    requests, steps, vocab = logits.shape
    rows = Sampling(
        *(v if v is None else v.repeat_interleave(steps) for v in vars(sampling).values())
    )
    scale = None if downweight is None else torch.full((requests,), downweight)
    sample = saguaro_sample(
        logits.reshape(requests * steps, vocab),
        rows,
        Keys(keys.seed.repeat_interleave(steps), keys.base.repeat_interleave(steps)),
        offset=torch.arange(steps).repeat(requests),
        scheme="plain" if scale is None else "downweight",
        scale_f=scale_f,
        downweight=None if scale is None else scale.repeat_interleave(steps),
        impl="reference",
        **options,
    )
    names = ("tokens", "logq", "lse", "cutoff", "cutoff_id", "scale_logit", "scale_id")
    fields = {name: getattr(sample, name).view(requests, steps) for name in names}
    beyond = torch.arange(steps) >= num_draft[:, None]
    fields["tokens"] = fields["tokens"].masked_fill(beyond, -1)
    return Draft(num_draft=num_draft, logits=logits, sampling=sampling, downweight=scale, **fields)


def random_case(
    requests: int,
    steps: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    *,
    temperature: float | list[float] = 1.0,
    draft_vocab: int | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `verify`: a draft near its target, num_draft 0..K over the requests."""
    generator = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(requests, steps + 1, vocab, generator=generator)
    noise = torch.randn(requests, steps, vocab, generator=generator)
    draft = (target[:, :steps] + 0.5 * noise)[..., :draft_vocab].to(dtype)
    temperatures = torch.tensor(temperature, dtype=torch.float32).expand(requests).contiguous()
    sampling = Sampling(temperatures)
    keys = Keys(torch.arange(requests) + 1000 * seed, 7 + torch.arange(requests))
    num_draft = (steps - torch.arange(requests) % (steps + 1)).to(torch.int32)
    return {
        "target_logits": target.to(dtype),
        "draft": draw_draft(draft, num_draft, sampling, keys, **options),
        "target_sampling": sampling,
        "keys": keys,
    }
