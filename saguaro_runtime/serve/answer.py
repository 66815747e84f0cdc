"""What an answer of the server looks like: the frames of the OpenAI protocol."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from ..processors import Logprobs


class Answer:
    """Formats one response: of a completion or a chat, as a whole or as a stream."""

    def __init__(self, kind: Literal["completion", "chat"], model: str, tokenizer: Any) -> None:
        self.kind, self.tokenizer = kind, tokenizer
        prefix, name = (
            ("chatcmpl", "chat.completion") if kind == "chat" else ("cmpl", "text_completion")
        )
        self.frame = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return self.frame | {"choices": choices, "usage": usage}

    def choice(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        logprobs: dict[str, Any] | None,
        *,
        delta: bool = False,
        first: bool = False,
    ) -> dict[str, Any]:
        """One answer, or with `delta` a piece of it."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        if self.kind == "completion":
            return choice | {"text": text}
        role = {"role": "assistant"} if first or not delta else {}
        return choice | {"delta" if delta else "message": role | {"content": text}}

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """An event of a stream."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self.frame | {"object": name, "choices": choices, "usage": usage}

    def logprobs(
        self, token_ids: Sequence[int], values: Sequence[Logprobs], offset: int = 0
    ) -> dict[str, Any]:
        """Log-probabilities of tokens, in the shape of the kind of response."""
        names = [self._token(id) for id in token_ids]
        if self.kind == "chat":
            entries = zip(names, values, strict=True)
            return {
                "content": [
                    _entry(name, one.token)
                    | {"top_logprobs": [_entry(self._token(i), p) for i, p in one.top.items()]}
                    for name, one in entries
                ]
            }
        offsets, at = [], offset
        for name in names:
            offsets.append(at)
            at += len(name)
        return {
            "tokens": names,
            "token_logprobs": [one.token for one in values],
            "top_logprobs": [{self._token(i): p for i, p in one.top.items()} for one in values],
            "text_offset": offsets,
        }

    def _token(self, id: int) -> str:
        return str(self.tokenizer.decode([id]))


def error(message: str, status: int, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
