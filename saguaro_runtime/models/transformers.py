"""Any transformers decoder-only model as a `Model`: its forward, our KV cache, our attention.

The model runs unchanged, with `use_cache=False` and explicit positions. Its attention calls a
function registered with transformers' AttentionInterface, which writes the new keys and values to
our pages and attends with `tree_attention`. Verification, prefill, single tokens and trees are
that one op.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from saguaro_kernels import Impl
from saguaro_kernels.errors import UnsupportedError
from saguaro_kernels.promotion import promote_branch
from saguaro_kernels.tree import chain_layout, tree_layout

from ..config import Attention
from .attention import Forward, Probe, paged_attention
from .draft import DRAFT_VOCAB, head_of
from .flash import check_model
from .kv import PagedKV

_PREFILL_CHUNK = 512


class TransformersModel:
    """A loaded transformers model that keeps its keys in our pages. See `Model`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        tokens: int,
        page_size: int = 64,
        impl: Impl = "auto",
        attention: Attention = "tree",
    ) -> None:
        """`rows`: most requests at once; `tokens`: key-value slots of all of them together.
        attention: of chains, see `flash`.

        Raises:
            UnsupportedError: an encoder-decoder, no head, or a model whose code does not use
                transformers' attention interface in every layer.
        """
        config = model.config.get_text_config()
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__}: got an encoder-decoder, want a decoder"
            )
        self.model, self.impl = model.eval(), impl
        self.vocab_size: int = head_of(model).weight.shape[0]
        self.vocab_ids: torch.Tensor | None = getattr(model, DRAFT_VOCAB, None)
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.device, self.dtype = model.device, model.dtype
        layers, kv_heads, head_dim = self._probe(config.num_hidden_layers)
        self.attention = attention
        if attention == "flash":
            check_model(type(model).__name__, self.dtype, head_dim)
        self.kv = PagedKV(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rows=rows,
            tokens=tokens,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.spare_row = self.kv.spare_row

    def allocate(self, row: int, slots: int) -> None:
        self.kv.allocate(row, slots)

    def release(self, row: int) -> None:
        self.kv.release(row)

    def prefill(self, row: int, tokens: torch.Tensor, start: int = 0) -> None:
        rows = torch.full((1,), row, device=self.device)
        for at in range(0, len(tokens), _PREFILL_CHUNK):
            chunk = tokens[None, at : at + _PREFILL_CHUNK]
            trunk_len = torch.full((1,), start + at, dtype=torch.int32, device=self.device)
            self._extend(rows, chunk, trunk_len, logits_to_keep=1)

    def extend(
        self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor
    ) -> torch.Tensor:
        return self._extend(rows, tokens, trunk_len)

    def decode_tree(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        draft_len: int,
        step: int | torch.Tensor,
    ) -> torch.Tensor:
        table = self.kv.table(rows)
        layout = tree_layout(
            depth,
            tokens,
            trunk_len,
            draft_len=draft_len,
            page_table=table,
            page_size=self.kv.page_size,
            impl=self.impl,
        )
        physical, positions = (
            per_step[step] if isinstance(step, int) else per_step.index_select(0, step)[0]
            for per_step in (layout.physical, layout.positions)
        )
        forward = Forward(
            self.kv,
            table,
            physical,
            self.impl,
            trunk_len=trunk_len,
            depth=depth,
            draft_len=draft_len,
            step=step,
        )
        return self._run(forward, tokens, positions)

    def promote(
        self,
        rows: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        branch: torch.Tensor,
        draft_len: int,
        branches: int,
    ) -> None:
        promote_branch(
            self.kv.data,
            self.kv.table(rows),
            trunk_len=trunk_len,
            depth=depth,
            branch=branch,
            draft_len=draft_len,
            branches=branches,
            impl=self.impl,
        )

    def _extend(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        trunk_len: torch.Tensor,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        table = self.kv.table(rows)
        layout = chain_layout(
            tokens,
            torch.full_like(trunk_len, tokens.shape[1]),
            trunk_len,
            page_table=table,
            page_size=self.kv.page_size,
            impl=self.impl,
        )
        forward = Forward(
            self.kv,
            table,
            layout.physical[0],
            self.impl,
            trunk_len + tokens.shape[1] if self.attention == "flash" else None,
            trunk_len=trunk_len,
            depth=layout.depth,
            draft_len=0,
            step=-1,
        )
        return self._run(forward, tokens, layout.positions[0], logits_to_keep)

    def _run(
        self,
        forward: Forward | Probe,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        with torch.no_grad(), paged_attention(self.model):
            # Columns no row needs may stand past the last position; learned positions end there.
            logits: torch.Tensor = self.model(
                input_ids=tokens,
                position_ids=positions.clamp(max=self.max_length - 1),
                use_cache=False,
                logits_to_keep=logits_to_keep,
                saguaro=forward,
            ).logits
        return logits

    def _probe(self, layers: int) -> tuple[int, int, int]:
        probe = Probe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        name = type(self.model).__name__
        try:
            self._run(probe, zero, zero)
        except TypeError as error:
            raise UnsupportedError(
                f"{name}: its forward refuses our arguments ({error})"
            ) from error
        if sorted(probe.shapes) != list(range(layers)) or len(set(probe.shapes.values())) != 1:
            raise UnsupportedError(
                f"{name}: {len(probe.shapes)} of {layers} layers attend through transformers' "
                "attention interface with keys and values of one shape; all must"
            )
        return layers, *probe.shapes[0]
