"""Saguaro behind transformers' generate().

    model.generate(**inputs, custom_generate=Saguaro(draft))

generate() prepares inputs, processors and stopping criteria as for its own loops and then calls the
object instead of one of them. Processors and criteria are called per row and per token, processors
also for drafts that may be rejected: they must be functions of their arguments. Two things never
reach such a callable, because generate() keeps them: `streamer` and `tokenizer`. So the object
carries them.

    Saguaro(draft, streamer=TextStreamer(tokenizer), seed=7)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from saguaro_kernels.errors import ConfigError, UnsupportedError

from ..config import EngineConfig
from ..engine import Engine
from ..params import SamplingParams
from .processors import processors_of_row, request_options, split_criteria, split_processors
from .rows import Columns, Record, Row

_SPREAD = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: the rows of a batch get seeds far from those of the next call."""
_IGNORED = frozenset(("use_cache", "logits_to_keep", "cache_position", "return_dict"))
"""Say how a forward is done, not what comes out."""
_CACHES = ("past_key_values", "cache")


class Saguaro:
    """`custom_generate=` of transformers: its generate(), decoded with a draft.

    Keep the object to call it again: it keeps the engine and, on more than one core, the draft's
    process. It is freed with close(), at the end of `with`, or with the object.

    Args:
        draft: a loaded transformers model or a folder; None with EngineConfig(method="ar").
        config: see EngineConfig. `max_tokens` grows to what a call needs; rows beyond `max_batch`
            wait for one to end.
        streamer: a transformers streamer. It gets the prompt and then a token of every row at a
            time, as generate() would put them.
        seed: of the first row; the others' follow from it. Given, every call returns the same text:
            it sets EngineConfig(reproducible=True). None takes one from torch's generator, so
            torch.manual_seed() governs it; see `reproducible` for what a seed then promises.
        tokenizer, stop_strings: stop at these strings. generate(stop_strings=...) asks for a
            tokenizer that it does not pass on, so it cannot be used here.
    """

    def __init__(
        self,
        draft: Any,
        *,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        streamer: Any = None,
        seed: int | None = None,
        tokenizer: Any = None,
        stop_strings: str | Sequence[str] = (),
    ) -> None:
        if seed is not None and config.rule != "coupled":
            config = dataclasses.replace(config, reproducible=True)
        self.draft, self.config, self.streamer, self.seed = draft, config, streamer, seed
        if stop_strings and tokenizer is None:
            raise ConfigError("stop_strings: got no tokenizer, want Saguaro(..., tokenizer=...)")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        self._stop_strings = StopStringCriteria(tokenizer, strings) if strings else None
        self._model: Any = None
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Called by generate() with what it has prepared; returns what generate() returns.

        Raises:
            UnsupportedError: beams, an encoder, a cache that holds tokens, attentions or hidden
                states asked for, a processor that keeps a state; each by its name.
        """
        _check(generation_config, model_kwargs)
        prompts = _prompts(input_ids, model_kwargs)
        stops = split_criteria(stopping_criteria)
        if self._stop_strings is not None:
            stops.criteria.append(self._stop_strings)
        pad = generation_config._pad_token_tensor
        if pad is None and len(prompts) > 1 and (stops.stop_ids or stops.criteria):
            raise ConfigError("pad_token_id: got None, want an id for the rows that end first")
        width = input_ids.shape[1]
        room = (stops.max_length or generation_config.max_length) - width
        sampled = split_processors(logits_processor, generation_config.do_sample)
        params = [
            SamplingParams(
                max_new_tokens=room,
                seed=seed,
                stop_token_ids=stops.stop_ids,
                ignore_eos=True,
                **sampled.options,
                **request_options(
                    sampled.processors, row, len(prompts), input_ids[row], width - len(prompts[row])
                ),
            )
            for row, seed in enumerate(self._seeds(len(prompts), generation_config.do_sample))
        ]
        engine = self._engine_for(model, max(map(len, prompts)) + room + self.config.k + 1)
        requests = engine.scheduler.add_all(list(zip(prompts, params, strict=True)))
        columns = Columns(self.streamer, 0 if pad is None else int(pad))
        want = generation_config if generation_config.return_dict_in_generate else None
        record = Record(engine, want)
        rows = [
            Row(request, ids, stops.criteria, record)
            for request, ids in zip(requests, input_ids, strict=True)
        ]
        try:
            columns.start(input_ids)
            while not all(row.done for row in rows):
                engine.step()
                for row in rows:
                    row.advance()
                    if row.done:
                        engine.cancel(row.request)
                columns.put(rows)
        finally:
            record.close()
            for request in requests:
                engine.cancel(request)
        sequences: Any = columns.end(input_ids, rows)
        if want is None:
            return sequences
        each = [processors_of_row(logits_processor, i, len(rows)) for i in range(len(rows))]
        return GenerateDecoderOnlyOutput(sequences=sequences, **record.output(rows, each))

    def stats(self) -> dict[str, Any]:
        """Counts and times of all calls with the present model, see docs/operations.md."""
        return {} if self._engine is None else self._engine.stats()

    def take_over(self, other: Saguaro) -> None:
        """Use the engine of `other` if draft and configuration are the same; it then has none."""
        if other.draft is self.draft and other.config == self.config:
            self.close()
            self._engine, self._model = other._engine, other._model
            other._engine = other._model = None

    def close(self) -> None:
        """End the engine and the draft's process. Safe to call twice; a later call starts anew."""
        engine, self._engine, self._model = self._engine, None, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Saguaro:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.close()

    def _engine_for(self, model: Any, tokens: int) -> Engine:
        """The engine of the last call, if it serves this one too."""
        engine = self._engine
        if engine is None or self._model is not model or engine.config.max_tokens < tokens:
            self.close()
            config = dataclasses.replace(
                self.config, max_tokens=max(tokens, self.config.max_tokens)
            )
            self._engine, self._model = Engine(model, self.draft, config), model
        assert self._engine is not None
        return self._engine

    def _seeds(self, rows: int, sampled: bool) -> list[int]:
        first = self.seed
        if first is None:
            first = int(torch.randint(2**62, (1,))) if sampled else 0
        spread = ((first + row * _SPREAD) % 2**64 for row in range(rows))
        return [seed - 2**64 if seed >= 2**63 else seed for seed in spread]


def _check(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse by name what generate() allows and the engine does not do."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(f"generation mode {mode.value}: want greedy search or sampling")
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                raise UnsupportedError(f"{name}: the engine does not keep them")
    for name, value in model_kwargs.items():
        if name in _CACHES and value is not None and value.get_seq_length() > 0:
            raise UnsupportedError(f"{name}: holds tokens already; pass the whole text instead")
        if name in _IGNORED or name in _CACHES or name in ("attention_mask", "position_ids"):
            continue
        if value is not None:
            raise UnsupportedError(f"{name}: only token ids and an attention mask are decoded")


def _prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Each row's ids without its padding."""
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    prompts = [row[keep].tolist() for row, keep in zip(input_ids, kept, strict=True)]
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        for row, keep in zip(position_ids.expand(len(kept), -1), kept, strict=True):
            if row[keep].tolist() != list(range(int(keep.sum()))):
                raise UnsupportedError("position_ids: want 0, 1, 2, .. over each row's tokens")
    if not all(prompts):
        raise ConfigError("attention_mask: got a row with no tokens, want at least one in each")
    return prompts
