"""From a prompt and its parameters to a request that can be served, or an error before any work."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from saguaro_kernels.errors import ConfigError

from .build import Built
from .config import EngineConfig
from .params import SamplingParams
from .processors import LogitsEditor
from .requests import Prompt, Request, TextStream


def new_request(
    prompt: Prompt, params: SamplingParams, built: Built, config: EngineConfig, uids: Iterator[int]
) -> Request:
    """The request for a prompt.

    Raises:
        ConfigError: an empty prompt, ids outside the vocabulary, text without a tokenizer, more
            tokens than the model or `max_tokens` hold, or parameters that leave no token.
    """
    tokenizer, vocab = built.tokenizer, built.model.vocab_size
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params: got {params!r}, want SamplingParams")
    if (isinstance(prompt, str) or params.stop) and tokenizer is None:
        raise ConfigError("prompt: text or stop strings need Engine(..., tokenizer=...)")
    ids = prompt_ids(prompt, tokenizer)
    if not ids:
        raise ConfigError("prompt: got no tokens, want at least one")
    for name, token_ids in (("prompt", ids), ("allowed_token_ids", params.allowed_token_ids or ())):
        if not all(0 <= id < vocab for id in token_ids):
            raise ConfigError(f"{name}: token ids must lie in 0..{vocab - 1}")
    if len(ids) >= built.max_length:
        raise ConfigError(f"prompt: {len(ids)} tokens, the model holds {built.max_length}")
    stop_ids = frozenset(params.stop_token_ids)
    stop_ids |= frozenset() if params.ignore_eos else built.stop_ids
    if (
        params.min_new_tokens
        and params.allowed_token_ids
        and stop_ids >= {*params.allowed_token_ids}
    ):
        raise ConfigError(
            f"allowed_token_ids: all of {list(params.allowed_token_ids)[:8]} end the text, and "
            f"min_new_tokens={params.min_new_tokens} forbids that; allow another one"
        )
    request = Request(
        uid=next(uids),
        prompt=ids,
        params=params,
        stop_ids=stop_ids,
        limit=min(params.max_new_tokens, built.max_length - len(ids)),
        editor=LogitsEditor(params, ids, stop_ids, vocab),
        stream=TextStream(tokenizer, params.stop) if tokenizer is not None else None,
    )
    slots = slots_of(request, config)
    if slots > config.max_tokens:
        raise ConfigError(
            f"prompt: {len(ids)} tokens and {request.limit} new ones need {slots} key-value slots, "
            f"max_tokens={config.max_tokens}; raise it, or ask for fewer"
        )
    return request


def slots_of(request: Request, config: EngineConfig) -> int:
    """Key-value slots a request may fill: its text, and a chain behind it."""
    return len(request.prompt) + request.limit + config.draft_len + 1


def several(prompts: Any) -> list[Any]:
    """One prompt or several of them, as a list.

    Raises:
        ConfigError: neither, as a tokenizer's whole output is.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts: got {type(prompts).__name__}, want text, token ids, or a list of these"
        )
    found = list(prompts)
    # A number, a tensor's too; an array's texts are texts.
    id_first = found and not isinstance(found[0], str) and not getattr(found[0], "ndim", 0)
    return [found] if id_first and hasattr(found[0], "__index__") else found


def prompt_ids(prompt: Prompt, tokenizer: Any, **options: Any) -> list[int]:
    """The ids of a prompt; `options` go to the tokenizer.

    Raises:
        ConfigError: it is neither ids nor a text that can be written in UTF-8.
    """
    try:
        if isinstance(prompt, str):
            prompt.encode()  # halves of characters: tokenizers fail at them in ways of their own
            return list(tokenizer(prompt, **options).input_ids)
        return [operator.index(id) for id in prompt]
    except Exception as error:
        raise ConfigError(
            f"prompt: got {prompt!r:.60}, want text or token ids ({error})"
        ) from error


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The ids of a conversation by the tokenizer's chat template, up to the answer's beginning.

    Raises:
        ConfigError: the template, a program of the model's authors, refuses it.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise ConfigError(
            f"messages: the chat template refuses them ({type(error).__name__}: {error})"
        ) from error
    return prompt_ids(text, tokenizer, add_special_tokens=False)
