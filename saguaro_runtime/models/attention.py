"""Our attention behind transformers' AttentionInterface: new keys go to our pages, and all that a
forward attends with is `tree_attention`, or flash-attn for chains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from saguaro_kernels._launch import Impl, resolve_impl
from saguaro_kernels.errors import UnsupportedError
from saguaro_kernels.tree_attention import AttentionPlan, attention_plan, tree_attention

from .flash import attend
from .kv import PagedKV


class Probe:
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


class Forward:
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
    saguaro: Forward | Probe | None = None,
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


_LOCK = threading.Lock()
_switched: dict[int, tuple[int, str]] = {}
"""By the id of a config: forwards in progress, and the attention it had before the first."""


@contextlib.contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to our attention while it runs forwards, of several engines and threads at
    once, so that its owner finds it unchanged."""
    config = model.config.get_text_config()
    with _LOCK:
        forwards, before = _switched.get(id(config), (0, config._attn_implementation))
        _switched[id(config)] = forwards + 1, before
        config._attn_implementation = "saguaro"
    try:
        yield
    finally:
        with _LOCK:
            forwards, before = _switched.pop(id(config))
            if forwards > 1:
                _switched[id(config)] = forwards - 1, before
            else:
                config._attn_implementation = before
