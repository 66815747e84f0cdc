"""The rows of one generate() call while the engine decodes them: stops, streamer, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from saguaro_kernels.errors import SaguaroError

from ..engine import Engine
from ..requests import Request


class Record:
    """Keeps the target's logits of committed tokens where generate() was asked for them."""

    def __init__(self, engine: Engine, want: Any) -> None:
        self.logits_wanted = want is not None and bool(want.output_logits)
        self.scores_wanted = want is not None and bool(want.output_scores)
        self._verifier = engine.verifier
        self._rows, self._logits = torch.empty(0), torch.empty(0)
        self._model = engine.verifier.model
        if self.logits_wanted or self.scores_wanted:
            self._verifier.model = self  # type: ignore[assignment]

    def extend(
        self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor
    ) -> torch.Tensor:
        self._rows, self._logits = rows, self._model.extend(rows, tokens, trunk_len)
        return self._logits

    def take(self, request: Request, count: int) -> torch.Tensor | None:
        """The logits that decided the request's last `count` tokens: [count, V] float32."""
        if not (self.logits_wanted or self.scores_wanted):
            return None
        index = self._rows.tolist().index(request.row)
        return self._logits[index, :count].to(torch.float32, copy=True)  # a buffer of the model's

    def close(self) -> None:
        self._verifier.model = self._model

    def output(self, rows: Sequence[Row], processors: Sequence[Any]) -> dict[str, Any]:
        """generate()'s `logits` and `scores`: a tensor [B, V] per step; 0 where a row has ended."""
        out: dict[str, Any] = {}
        kept = [torch.cat(row.logits) if row.logits else torch.empty(0) for row in rows]
        if self.logits_wanted:
            out["logits"] = _by_step(kept)
        if self.scores_wanted:
            for index, (row, processor) in enumerate(zip(rows, processors, strict=True)):
                width = len(row.ids) - len(row.tokens)
                scores = [
                    processor(row.ids[None, : width + step], one[None].clone())
                    for step, one in enumerate(kept[index])
                ]
                kept[index] = torch.cat(scores) if scores else kept[index]
            out["scores"] = _by_step(kept)
        return out


class Row:
    """One row: its tokens so far, and whether one of its criteria or the engine has ended it."""

    def __init__(
        self, request: Request, prompt: torch.Tensor, criteria: Any, record: Record
    ) -> None:
        self.request, self.criteria, self.record = request, criteria, record
        self.ids = prompt
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.done = request.finish_reason is not None

    def advance(self) -> None:
        """Take the tokens of the last step, up to the one after which a criterion says stop."""
        if self.done:
            return
        new = self.request.token_ids[len(self.tokens) :]
        logits = self.record.take(self.request, len(new)) if new else None
        taken = 0
        for token in new:
            self.tokens.append(token)
            self.ids = torch.cat((self.ids, self.ids.new_tensor([token])))
            taken += 1
            if self.criteria and bool(self.criteria(self.ids[None], None).any()):
                self.done = True
                break
        if logits is not None:
            self.logits.append(logits[:taken])
        if self.request.finish_reason == "error":
            raise SaguaroError(f"after {len(self.ids)} tokens: {self.request.error}")
        self.done = self.done or self.request.finish_reason is not None


class Columns:
    """Feeds the streamer as generate() does: one token of every row at a time."""

    def __init__(self, streamer: Any, pad: int) -> None:
        self._streamer, self._pad, self._sent = streamer, pad, 0

    def start(self, input_ids: torch.Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def put(self, rows: Sequence[Row]) -> None:
        """Every further column that all rows have reached, or have ended before."""
        while (
            self._streamer is not None
            and any(len(row.tokens) > self._sent for row in rows)
            and all(row.done or len(row.tokens) > self._sent for row in rows)
        ):
            self._streamer.put(torch.tensor([self._at(row, self._sent) for row in rows]))
            self._sent += 1

    def end(self, input_ids: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """End the stream; prompts and new tokens, padded: [B, n]."""
        if self._streamer is not None:
            self._streamer.end()
        steps = range(max(len(row.tokens) for row in rows))
        new = [[self._at(row, step) for step in steps] for row in rows]
        return torch.cat((input_ids, input_ids.new_tensor(new).view(len(rows), -1)), dim=1)

    def _at(self, row: Row, step: int) -> int:
        return row.tokens[step] if step < len(row.tokens) else self._pad


def _by_step(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    steps = max(len(row) for row in rows)
    width = next((row.shape[1] for row in rows if row.ndim == 2), 0)
    out = torch.zeros(steps, len(rows), width)
    for index, row in enumerate(rows):
        out[: len(row), index] = row
    return tuple(out)
