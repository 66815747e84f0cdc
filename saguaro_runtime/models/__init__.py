"""Models the engine can run."""

from __future__ import annotations

from typing import Any

from saguaro_kernels._launch import Impl

from .protocol import Model


def as_model(model: Any, *, rows: int, tokens: int, impl: Impl) -> Model:
    """`model` itself if it is a `Model`, else the adapter around a transformers model.

    rows: most requests at once; tokens: key-value slots of all of them together.
    """
    if all(hasattr(model, name) for name in ("extend", "decode_tree", "promote", "prefill")):
        return model  # type: ignore[no-any-return]
    from .transformers import TransformersModel

    return TransformersModel(model, rows=rows, tokens=tokens, impl=impl)


__all__ = ["Model", "as_model"]
