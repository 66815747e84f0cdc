"""What the engine needs of a model. Lengths are arguments, so cutting a row back costs nothing."""

from __future__ import annotations

from typing import Protocol

import torch


class Model(Protocol):
    """A causal language model over rows: row r is one request's key-value state.

    A row's slots 0..trunk_len-1 hold the keys of its committed tokens. Nothing is ever truncated:
    the caller names `trunk_len`, and slots from there on are written over.

    Attributes:
        vocab_size: width of the logits.
        max_length: most positions the model can hold; positions are 0..max_length-1.
        device, dtype: where logits lie and what they are.
        vocab_ids: of a draft with fewer ids than its target, and only there: [vocab_size] int64,
            ascending, the target's ids that the logits' columns stand for. It reads all of them.
        spare_row: of a model on a GPU whose forwards may be captured as CUDA graphs, and only
            there: a row that is never allocated, whose keys are never used. `extend` and
            `decode_tree` then read no value on the host, and `step` may also be an int32 tensor of
            one element.
    """

    vocab_size: int
    max_length: int
    device: torch.device
    dtype: torch.dtype

    def allocate(self, row: int, slots: int) -> None:
        """Reserve `slots` key-value slots for `row`; ConfigError if they are not free."""

    def release(self, row: int) -> None:
        """Give the slots of `row` back."""

    def prefill(self, row: int, tokens: torch.Tensor, start: int = 0) -> None:
        """Fill slots start..start+N-1 of `row` with `tokens` [N] int64, after what the slots before
        hold; no logits."""

    def extend(
        self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor
    ) -> torch.Tensor:
        """Feed tokens [B, Q] int64 at slots and positions trunk_len [B] + 0..Q-1, causally.

        Returns [B, Q, V] logits; row i predicts position trunk_len + i + 1. Columns that a row does
        not need may hold any legal id: what they write lies beyond the row's length.
        """

    def decode_tree(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        draft_len: int,
        step: int,
    ) -> torch.Tensor:
        """Step `step` of M branches per row: tokens, depth [B, M] -> [B, M, V] logits.

        Branch i stands after `depth` chain tokens and sees the keys before trunk_len + depth + 1
        and its own of steps 0..step. depth = -1 is an unused branch.
        """

    def promote(
        self,
        rows: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        branch: torch.Tensor,
        draft_len: int,
        branches: int,
    ) -> None:
        """Move the keys of branch [B] (-1: none) to the slots of the chain that it becomes."""
