"""A scripted draft with a part of the target's ids."""

from __future__ import annotations

from typing import Any

import torch

from saguaro_runtime.models.scripted import ScriptedModel


class PartModel(ScriptedModel):
    """Reads all tokens of `law` [V * V, V], and has logits for `ids` [D] alone."""

    def __init__(self, law: torch.Tensor, ids: list[int], **options: Any) -> None:
        super().__init__(law[:, ids], **options)
        self.vocab_ids = torch.tensor(ids)
        self._read = law.shape[1]

    def _after(self, rows: torch.Tensor, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.logits[before * self._read + last]
