"""A model with a table for its distribution and set times: for exact tests and for planning.

It keeps tokens where a transformer keeps keys, and reads the two tokens before each position back
from the slots a real model would see. A token stored in a wrong slot therefore changes its logits.
"""

from __future__ import annotations

import time

import torch


class ScriptedModel:
    """Next token given the last two: `law` [V * V, V], row a * V + b after (.., a, b). See `Model`.

    Args:
        law: probabilities; zero is a token that cannot come.
        rows, slots: requests at once, and slots of each.
        extend_s, tree_s: seconds a call takes: extend(.., Q columns) takes extend_s + Q * column_s.
        prefill_s: seconds a prompt token takes.
    """

    def __init__(
        self,
        law: torch.Tensor,
        *,
        rows: int = 8,
        slots: int = 512,
        max_length: int = 1 << 20,
        extend_s: float = 0.0,
        column_s: float = 0.0,
        tree_s: float = 0.0,
        prefill_s: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.vocab_size = law.shape[1]
        self.max_length = max_length
        self.device, self.dtype = torch.device("cpu"), dtype
        self.logits = law.to(torch.float64).log().to(dtype)
        self.tokens = torch.zeros(rows, slots, dtype=torch.int64)
        self.extend_s, self.column_s, self.tree_s = extend_s, column_s, tree_s
        self.prefill_s = prefill_s
        self.held: set[int] = set()

    def allocate(self, row: int, slots: int) -> None:
        if row in self.held or slots > self.tokens.shape[1]:
            raise ValueError(f"row {row}: held twice, or {slots} slots are too many")
        self.held.add(row)

    def release(self, row: int) -> None:
        self.held.remove(row)

    def prefill(self, row: int, tokens: torch.Tensor, start: int = 0) -> None:
        _wait(self.prefill_s * len(tokens))
        self.tokens[row, start : start + len(tokens)] = tokens

    def extend(
        self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor
    ) -> torch.Tensor:
        _wait(self.extend_s + self.column_s * tokens.shape[1])
        slots = trunk_len[:, None].to(torch.int64) + torch.arange(tokens.shape[1])
        self.tokens[rows[:, None], slots] = tokens
        return self._after(rows, self.tokens[rows[:, None], (slots - 1).clamp(min=0)], tokens)

    def decode_tree(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        draft_len: int,
        step: int,
    ) -> torch.Tensor:
        _wait(self.tree_s)
        trunk = trunk_len[:, None].to(torch.int64)
        branches = tokens.shape[1]
        own = trunk + draft_len + 1 + step * branches + torch.arange(branches)
        self.tokens[rows[:, None], own] = tokens
        before = own - branches if step else trunk + depth.clamp(min=0)
        return self._after(rows, self.tokens[rows[:, None], before], tokens)

    def promote(
        self,
        rows: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        branch: torch.Tensor,
        draft_len: int,
        branches: int,
    ) -> None:
        hit = branch >= 0
        steps = torch.arange(draft_len + 1)
        trunk = trunk_len[hit, None].to(torch.int64)
        source = trunk + draft_len + 1 + steps * branches + branch[hit, None]
        target = trunk + depth[hit, None] + 1 + steps
        self.tokens[rows[hit, None], target] = self.tokens[rows[hit, None], source]

    def _after(self, rows: torch.Tensor, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.logits[before * self.vocab_size + last]


def _wait(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
