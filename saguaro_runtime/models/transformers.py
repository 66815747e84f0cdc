"""Any transformers decoder-only model as a `Model`: its forward, our keys and our attention.

The model runs unchanged, with `use_cache=False` and explicit positions. Its attention calls a
function registered with transformers' AttentionInterface, which writes the new keys and values to
our pages and attends with `tree_attention`. Verification, prefill, single tokens and trees are
that one op.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from saguaro_kernels._launch import Impl, resolve_impl
from saguaro_kernels.errors import ConfigError, UnsupportedError
from saguaro_kernels.promotion import promote_branch
from saguaro_kernels.tree import chain_layout, tree_layout
from saguaro_kernels.tree_attention import AttentionPlan, attention_plan, tree_attention

from ..config import Attention
from .draft import DRAFT_VOCAB, own_weights, restrict_vocab
from .flash import attend, check_model
from .kv import PagedKV

SHARED_EMBEDDINGS = "saguaro_shared_embeddings"
"""Set in a draft's config.json when its embedding and head are the target's and not stored."""

_PREFILL_CHUNK = 512


class _Probe:
    """Stands in for a forward's attention once, to learn which layers call it and their shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        if key.shape == value.shape:
            self.shapes[layer] = (key.shape[1], key.shape[3])
        return query.transpose(1, 2)


class _Forward:
    """One forward's view of the key-value pages: where it writes and what each query sees."""

    def __init__(
        self,
        kv: PagedKV,
        table: torch.Tensor,
        physical: torch.Tensor,
        impl: Impl,
        lengths: torch.Tensor | None = None,
        **visible: Any,
    ) -> None:
        """`physical` [B, Q] int64: rows of the flattened pages that the new keys go to.

        lengths: [B] int32 of chains that flash-attn takes, new keys included."""
        self.lengths = lengths
        self.kv, self.table, self.impl, self.visible = kv, table, impl, visible
        self.physical = physical.flatten()
        self.planned = resolve_impl(impl, kv.data.device) == "reference"
        self.plans: dict[int | None, AttentionPlan] = {}

    def plan(self, window: int | None) -> AttentionPlan | None:
        """What the reference reads, made once per forward and window; the kernel needs no plan."""
        if self.planned and window not in self.plans:
            self.plans[window] = attention_plan(
                self.table,
                self.kv.page_size,
                window=window,
                dtype=self.kv.data.dtype,
                **self.visible,
            )
        return self.plans.get(window)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        **options: Any,
    ) -> torch.Tensor:
        keys, values = self.kv.data[layer]
        for pages, new in ((keys, key), (values, value)):
            pages.flatten(0, 1).index_copy_(0, self.physical, new.transpose(1, 2).flatten(0, 1))
        if self.lengths is not None:
            options["window"] = window
            chains = query.transpose(1, 2)
            return attend(chains, keys, values, self.table, self.lengths, **options)
        return tree_attention(
            query.transpose(1, 2),
            keys,
            values,
            self.table,
            impl=self.impl,
            window=window,
            plan=self.plan(window),
            **self.visible,
            **options,
        )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    saguaro: _Forward | _Probe | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if saguaro is None:
        raise UnsupportedError(
            f"{type(module).__name__} does not hand its keyword arguments to the attention function"
        )
    out = saguaro.attend(
        module.layer_idx,
        query,
        key,
        value,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None


AttentionInterface.register("saguaro", _attention)


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
            UnsupportedError: an encoder-decoder, or a model whose code does not use transformers'
                attention interface in every layer.
        """
        config = model.config.get_text_config()
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__}: got an encoder-decoder, want a decoder"
            )
        self.model, self.impl = model.eval(), impl
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
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
            its[step] if isinstance(step, int) else its.index_select(0, step)[0]
            for its in (layout.physical, layout.positions)
        )
        forward = _Forward(
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
        forward = _Forward(
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
        forward: _Forward | _Probe,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        with torch.no_grad(), _attention_implementation(self.model):
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
        probe = _Probe()
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


@contextlib.contextmanager
def _attention_implementation(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to our attention for one forward, so that its owner finds it unchanged."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = "saguaro"
    try:
        yield
    finally:
        config._attn_implementation = before


def load_model(
    path: str,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a transformers folder or hub name for inference, on the CPU unless told otherwise.

    Raises:
        ConfigError: there is nothing to load at `path`.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {path!r}: cannot be loaded ({error}); want a transformers folder or a hub name"
        ) from error
    return _placed(model, device)


def load_draft(
    path: str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a draft; where its folder says so, embedding and head are the target's own tensors.

    device: where it goes, by default the CPU, or beside the tensors it shares; on another device
    than the target's it has copies of them.
    """
    marker = Path(path) / "config.json"
    if not marker.is_file() or not json.loads(marker.read_text()).get(SHARED_EMBEDDINGS):
        return load_model(path, dtype, device)
    config = AutoConfig.from_pretrained(path)
    shared: Any = torch.nn.ModuleList(
        (target.get_input_embeddings(), target.get_output_embeddings())
    )
    if device not in (None, target.device):  # to move them would move the target's
        shared = copy.deepcopy(shared).to(device)
    embedding, head = shared
    wanted = (config.vocab_size, config.hidden_size)
    if tuple(embedding.weight.shape) != wanted:
        raise ConfigError(
            f"draft {path!r}: takes the target's embedding, want {list(wanted)}, "
            f"got {list(embedding.weight.shape)}; it belongs to another target"
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype or target.dtype)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        weights |= load_file(file)
    ids = weights.pop(DRAFT_VOCAB, None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if name in own_weights(model)]
    if missing or unexpected:
        raise ConfigError(
            f"draft {path!r}: missing weights {missing[:3]}, unexpected weights {unexpected[:3]}"
        )
    if ids is not None:
        restrict_vocab(model, ids)
    return _placed(model, device or target.device)


def _placed(model: Any, device: torch.device | None) -> PreTrainedModel:
    """The model on `device`, for inference."""
    its: PreTrainedModel = model.eval() if device is None else model.eval().to(device)
    return its


def check_same_tokenizer(draft_path: str, tokenizer: Any) -> None:
    """Raise ConfigError where the draft's folder has a tokenizer of another vocabulary."""
    if tokenizer is None or not any(Path(draft_path).glob("tokenizer*")):
        return
    theirs, ours = AutoTokenizer.from_pretrained(draft_path).get_vocab(), tokenizer.get_vocab()
    differing = [token for token, id in theirs.items() if ours.get(token, id) != id]
    if differing or not theirs.keys() & ours.keys():
        raise ConfigError(
            f"draft {draft_path!r}: its tokenizer is not the target's ({len(differing)} tokens "
            "have other ids); a draft must share the target's vocabulary"
        )
