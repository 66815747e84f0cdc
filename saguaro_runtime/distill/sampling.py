"""The target's own text: a batch of prompts decoded by transformers, on any device.

The noise is that of plain decoding in the engine, so a seed's text is that of method="ar" (up to
the rounding of forwards of other widths) and does not depend on what was sampled before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from saguaro_kernels import Keys, Sampling, Stream, saguaro_sample


def complete(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    tick: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, a stop id included; `tick` is called at each token."""
    device = model.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    length, position = mask.sum(1), (mask.cumsum(1) - 1).clamp(min=0)
    sampling = Sampling(torch.tensor(temperatures, dtype=torch.float32, device=device))
    seed = torch.tensor(seeds, device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    columns: list[torch.Tensor] = []
    # Renamed in the course of transformers 5.
    renamed = "cache" in inspect.signature(model.forward).parameters
    cache = {"cache" if renamed else "past_key_values": DynamicCache(config=model.config)}
    with torch.no_grad():
        while len(columns) < max_new_tokens and not bool(ended.all()):
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **cache,
            ).logits[:, -1]
            tokens = saguaro_sample(
                logits,
                sampling,
                Keys(seed, length),
                offset=0,
                stream=Stream.EXTRA,
                impl="reference" if device.type == "cpu" else "auto",
            ).tokens
            columns.append(tokens.masked_fill(ended, -1))
            ended = ended | torch.isin(tokens, stops)
            ids, position, length = tokens[:, None], length[:, None], length + 1
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            tick()
    new = torch.stack(columns, dim=1).tolist() if columns else [[] for _ in prompts]
    return [[token for token in row if token >= 0] for row in new]
