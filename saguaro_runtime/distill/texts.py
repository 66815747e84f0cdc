"""Texts of the target in chunks: how they are made, kept in files, and put into batches.

A chunk depends on the seed and its number alone, so one that was lost is made again, the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from saguaro_kernels.errors import ConfigError

from ..cli.generate import encode
from .prompts import Prompt, before_the_user, invent_prompts
from .sampling import complete
from .settings import written

TEMPERATURES = (0.0, 0.7, 1.0)
QUESTION_TOKENS = 40
_FORWARD = 8
"""Texts whose hidden states are computed at once."""


class Text(NamedTuple):
    """A prompt and its answer. hidden [L, H]: the target's last states, or None: to be computed.

    What is learned are the tokens from `start` on: all but the chat template's beginning.
    """

    prompt: Prompt
    ids: torch.Tensor
    start: int
    hidden: torch.Tensor | None


class Writer:
    """Has the target write chunks of texts.

    Args:
        prompts: (held out, trained on) of a file; None: the target makes them up.
        keep_hidden: also keep its hidden states, so that it need not be run again.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        *,
        prompts: tuple[list[Prompt], list[Prompt]] | None,
        seed: int,
        size: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        keep_hidden: bool,
    ) -> None:
        self.target, self.tokenizer, self.prompts, self.seed = target, tokenizer, prompts, seed
        self.size, self.max_new_tokens, self.stop_ids = size, max_new_tokens, stop_ids
        self.keep_hidden = keep_hidden
        before = before_the_user(tokenizer)
        self._before = tokenizer(before, add_special_tokens=False).input_ids if before else []
        positions = getattr(target.config, "max_position_embeddings", None) or 1 << 30
        self._room = room = positions - max_new_tokens
        for prompt in chain.from_iterable(prompts or ()):
            if not 0 < (length := len(self._encode(prompt))) <= room:
                raise ConfigError(
                    f"prompts: got one of {length} tokens ({prompt.text[:40]!r}..), want 1..{room}"
                )

    def chunk(self, number: int, tick: Callable[[], object]) -> list[Text]:
        """Chunk `number`; 0 is the held-out one."""
        numbers = range(number * self.size, (number + 1) * self.size)
        prompts = self._prompts(number, numbers, tick)
        # Those of files fit; an invented one may not fit a very short model: its end is kept.
        asked = [self._encode(prompt)[-self._room :] for prompt in prompts]
        answers = self._complete(
            asked,
            [TEMPERATURES[text_number % len(TEMPERATURES)] for text_number in numbers],
            [self._text_seed(text_number, 1) for text_number in numbers],
            self.max_new_tokens,
            tick,
        )
        texts = [
            Text(prompt, torch.tensor(ids + answer), self._start(prompt, ids), None)
            for prompt, ids, answer in zip(prompts, asked, answers, strict=True)
        ]
        return self._with_hidden(texts) if self.keep_hidden else texts

    def _prompts(self, number: int, numbers: range, tick: Callable[[], object]) -> list[Prompt]:
        if self.prompts is None:
            return invent_prompts(
                self.tokenizer,
                numbers,
                self.seed,
                lambda begun: self._complete(
                    begun,
                    [1.0] * len(begun),
                    [self._text_seed(text_number, 0) for text_number in numbers],
                    QUESTION_TOKENS,
                    tick,
                ),
            )
        held_out, trained_on = self.prompts
        if number == 0:
            return [held_out[text_number % len(held_out)] for text_number in numbers]
        return [trained_on[(text_number - self.size) % len(trained_on)] for text_number in numbers]

    def _complete(
        self,
        prompts: list[list[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_new_tokens: int,
        tick: Callable[[], object],
    ) -> list[list[int]]:
        return complete(
            self.target,
            prompts,
            temperatures=temperatures,
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids,
            tick=tick,
        )

    def _text_seed(self, number: int, use: int) -> int:
        return ((self.seed & 0x7FFFFFFF) << 32) + 2 * number + use

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode(self.tokenizer, prompt.text, chat=prompt.chat)

    def _start(self, prompt: Prompt, ids: list[int]) -> int:
        before = self._before if prompt.chat else []
        same = (a == b for a, b in zip(ids, before, strict=False))
        return max(1, next((i for i, equal in enumerate(same) if not equal), len(before)))

    def _with_hidden(self, texts: list[Text]) -> list[Text]:
        found = []
        for start in range(0, len(texts), _FORWARD):
            some = texts[start : start + _FORWARD]
            hidden = last_hidden(self.target, padded([text.ids for text in some]))
            found += [
                text._replace(hidden=states[: len(text.ids)].cpu())
                for text, states in zip(some, hidden, strict=True)
            ]
        return found


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, longest], zeros to the right: a causal model's earlier positions do not see them."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def last_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The states that the head turns into logits, [B, L, H]; no gradients."""
    with torch.no_grad():
        states: torch.Tensor = model.base_model(ids.to(model.device), use_cache=False)[0]
    return states


def frequent_ids(
    texts: Sequence[Text], count: int, vocab_size: int, always: Collection[int]
) -> torch.Tensor:
    """The `count` ids that the target writes most, ascending: [count] int64.

    The ids of `always` are among them, and of equally frequent ones the lowest: in vocabularies
    made by merging the frequent ones are low.
    """
    written = torch.cat([text.ids[text.start :] for text in texts])
    frequency = torch.bincount(written, minlength=vocab_size)
    frequency[sorted(always)] = len(written) + 1
    return frequency.sort(descending=True, stable=True).indices[:count].sort().values


def save_chunk(path: Path, texts: list[Text]) -> None:
    """Write a chunk."""
    tensors = {
        "ids": torch.cat([text.ids for text in texts]).int(),
        "length": torch.tensor([len(text.ids) for text in texts]),
        "start": torch.tensor([text.start for text in texts]),
    }
    if texts[0].hidden is not None:
        tensors["hidden"] = torch.cat([text.hidden for text in texts if text.hidden is not None])
    prompts = json.dumps([text.prompt.__dict__ for text in texts])
    with written(path) as part:
        save_file(tensors, part, metadata={"prompts": prompts})


def is_chunk(path: Path) -> bool:
    """Whether a chunk is there, and is not one that a power cut has left in part."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def load_chunk(path: Path) -> list[Text]:
    """Read a chunk; hidden states stay in the file until they are used."""
    with safe_open(path, "pt") as file:
        prompts = json.loads(file.metadata()["prompts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lengths = tensors["length"].tolist()
    ids = tensors["ids"].long().split(lengths)
    hidden = tensors["hidden"].split(lengths) if "hidden" in tensors else [None] * len(ids)
    fields = zip(prompts, ids, tensors["start"].tolist(), hidden, strict=True)
    return [Text(Prompt(**prompt), *rest) for prompt, *rest in fields]
