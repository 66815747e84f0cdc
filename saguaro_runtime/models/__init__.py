"""Models the engine can run."""

from __future__ import annotations

from typing import Any

from saguaro_kernels import Impl

from ..config import Attention
from .flash import page_size
from .protocol import Model


def as_model(
    model: Any, *, rows: int, tokens: int, impl: Impl, attention: Attention = "tree"
) -> Model:
    """`model` itself if it is a `Model`, else the adapter around a transformers model.

    rows: most requests at once; tokens: key-value slots of all of them together; attention: of the
    adapter's chains.
    """
    if all(hasattr(model, name) for name in ("extend", "decode_tree", "promote", "prefill")):
        return model  # type: ignore[no-any-return]
    from .transformers import TransformersModel

    size = page_size(attention)
    return TransformersModel(
        model, rows=rows, tokens=tokens, page_size=size, impl=impl, attention=attention
    )


__all__ = ["Model", "as_model"]
