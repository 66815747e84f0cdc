"""From a prompt and its parameters to a request that can be served, or an error before any work."""

from __future__ import annotations

from collections.abc import Iterator

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
        ConfigError: an empty prompt, ids outside the vocabulary, text without a tokenizer, or more
            tokens than the model or `max_tokens` hold.
    """
    tokenizer, vocab = built.tokenizer, built.model.vocab_size
    if (isinstance(prompt, str) or params.stop) and tokenizer is None:
        raise ConfigError("prompt: text or stop strings need Engine(..., tokenizer=...)")
    ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else [int(id) for id in prompt]
    if not ids:
        raise ConfigError("prompt: got no tokens, want at least one")
    for name, token_ids in (("prompt", ids), ("allowed_token_ids", params.allowed_token_ids or ())):
        if not all(0 <= id < vocab for id in token_ids):
            raise ConfigError(f"{name}: token ids must lie in 0..{vocab - 1}")
    if len(ids) >= built.max_length:
        raise ConfigError(f"prompt: {len(ids)} tokens, the model holds {built.max_length}")
    stop_ids = frozenset(params.stop_token_ids)
    stop_ids |= frozenset() if params.ignore_eos else built.stop_ids
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
