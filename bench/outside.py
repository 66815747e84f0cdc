"""Providers from other projects, offered where they can be imported; none is needed.

They take probabilities where ours take logits, so their softmax is part of their time. A call that
fails leaves the provider out, with the reason in its row.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scale = temperature.view(-1, *[1] * (logits.dim() - 1))
    return (logits.float() / scale).softmax(-1)


def verifiers() -> dict[str, Any]:
    """Token verification: FlashInfer's chain speculative sampling, softmaxes included."""
    if not _installed("flashinfer"):
        return {}
    from flashinfer.sampling import chain_speculative_sampling

    def run(x: Any) -> Any:
        return chain_speculative_sampling(
            _probabilities(x.draft.logits, x.sampling.temperature),
            x.draft.tokens.int(),
            _probabilities(x.target, x.sampling.temperature),
        )

    return {"flashinfer": run}


def samplers() -> dict[str, Any]:
    """Sampling rows: FlashInfer's sampling from logits."""
    if not _installed("flashinfer"):
        return {}
    from flashinfer.sampling import sampling_from_logits

    def run(x: Any) -> Any:
        return sampling_from_logits(x.logits.float() / x.sampling.temperature[:, None])

    return {"flashinfer": run}
