"""Whether two runs gave the same text: equal, different, or diverging at a near tie.

Forwards of different widths round differently. Where two runs of one seed part, the comparison that
decided is computed again from fresh forwards over the common prefix. If it was closer than TIE,
rounding may have turned it; if not, something else did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from saguaro_kernels import Keys, Sampling, Stream, saguaro_sample
from saguaro_kernels.distribution import is_within_reference
from saguaro_kernels.errors import ConfigError
from saguaro_kernels.rng import gumbel_reference, uniform_reference

from .config import EngineConfig
from .models.draft import all_logits
from .params import SamplingParams
from .requests import Round

TIE = 1e-3
"""Gap in logits or relative probability below which rounding may decide a comparison."""


class Comparison(NamedTuple):
    """verdict; if they part, where (index of the new token) and how close the decision was."""

    verdict: Literal["equal", "near_tie", "different"]
    position: int | None = None
    gap: float | None = None


def compare_texts(
    first: Sequence[int],
    second: Sequence[int],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    target: Any,
    draft: Any = None,
    config: EngineConfig | None = None,
    rounds: Sequence[Round] = (),
) -> Comparison:
    """Compare the new tokens of two runs of one request.

    Args:
        first, second: their token ids; prompt: its ids; params: how both were sampled.
        target, draft: transformers models in the runs' dtype. draft, config and rounds (the first
            run's `Output.rounds`) are needed where the temperature is above 0.
    """
    length = min(len(first), len(second))
    part = next((i for i in range(length) if first[i] != second[i]), length)
    if part == len(first) == len(second):
        return Comparison("equal")
    if part == length:
        return Comparison("different", part)
    prefix = [*prompt, *first[:part]]
    if params.temperature == 0:
        logits = _last_logits(target, prefix)
        gap = float(logits.max() - logits[[first[part], second[part]]].min())
    else:
        begun = [one for one in rounds if one.base <= len(prefix)]
        if config is None or not begun or (draft is None and begun[-1].drafted):
            raise ConfigError("compare_texts: sampled runs need draft, config and rounds")
        base, drafted = begun[-1].base, begun[-1].drafted
        gap = min(_gaps(prefix, base, drafted, params, target, draft, config.rule))
    return Comparison("near_tie" if gap < TIE else "different", part, gap)


def _gaps(
    prefix: list[int],
    base: int,
    drafted: int,
    params: SamplingParams,
    target: Any,
    draft: Any,
    rule: str,
) -> Iterator[float]:
    """How close the comparisons were that the token after `prefix` hung on, in its round."""
    keys = Keys(torch.tensor([params.seed]), torch.tensor([base]))
    offset = len(prefix) - base
    if rule == "coupled" or offset >= drafted:
        stream = Stream.COUPLED if rule == "coupled" else Stream.EXTRA
        yield _draw(_law(_last_logits(target, prefix), params), keys, offset, stream)[1]
    if rule == "coupled" or not drafted:
        return
    ratio, chain = 1.0, prefix[:base]
    for step in range(drafted):
        # The token rule looks no further than the token in question, block at the whole chain.
        if rule == "token" and step > offset:
            return
        proposal = _law(_last_logits(draft, chain), params)
        wanted = _law(_last_logits(target, chain), params)
        token, gap = _draw(proposal, keys, step, Stream.DRAFT)
        yield gap
        p, q = float(wanted[token].exp()), float(proposal[token].exp())
        uniform = float(uniform_reference(keys, step, Stream.ACCEPT)[0])
        if rule == "token":
            yield abs(uniform * q - p) / max(p, 1e-30)
        else:
            if step:
                before = float(uniform_reference(keys, step - 1, Stream.ACCEPT)[0])
                yield abs(before - _block_threshold(ratio, wanted, proposal))
            if step == drafted - 1:
                yield abs(uniform - min(1.0, ratio * p / q))
        if step == offset:
            rest = (ratio * wanted.exp() - proposal.exp()).clamp(min=0).log()
            yield _draw(rest, keys, step, Stream.EXTRA)[1]
        if rule != "token":
            ratio = min(1.0, ratio * p / q)
        chain = [*chain, prefix[base + step] if base + step < len(prefix) else token]


def _block_threshold(ratio: float, wanted: torch.Tensor, proposal: torch.Tensor) -> float:
    """h_i of the block rule, from a_i and the rows after the i-th draft."""
    rest = float((ratio * wanted.exp() - proposal.exp()).clamp(min=0).sum())
    return rest / (rest + 1 - ratio) if ratio < 1 else 1.0


def _last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return all_logits(model, torch.tensor([list(ids)]), logits_to_keep=1)[0, -1].double()


def _law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities of the row after temperature and filters: [V] float64."""
    one = lambda value, dtype=torch.float32: (  # noqa: E731
        None if value is None else torch.tensor([value], dtype=dtype)
    )
    sampling = Sampling(
        torch.tensor([params.temperature]),
        one(params.top_k, torch.int32),
        one(params.top_p),
        one(params.min_p),
    )
    zero = torch.zeros(1, dtype=torch.int64)
    row = logits.float()[None]
    sample = saguaro_sample(row, sampling, Keys(zero, zero), offset=0, impl="reference")
    kept = is_within_reference(row, torch.arange(row.shape[1]), sample.cutoff, sample.cutoff_id)
    return (logits / params.temperature).masked_fill(~kept[0], -torch.inf).log_softmax(-1)


def _draw(log_prob: torch.Tensor, keys: Keys, offset: int, stream: Stream) -> tuple[int, float]:
    """The Gumbel-argmax of a row, and the distance of the runner-up."""
    noise = gumbel_reference(keys, offset, stream, len(log_prob))[0].double()
    best = (log_prob + noise).topk(2)
    gap = float(best.values[0] - best.values[1])
    return int(best.indices[0]), gap if gap == gap else 0.0
