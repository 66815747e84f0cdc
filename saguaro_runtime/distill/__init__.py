"""A draft for any target: some of its own layers, trained on its own text.

Names are imported when they are used: `saguaro distill --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import distill
    from .settings import Settings

__all__ = ["Settings", "distill"]


def __getattr__(name: str) -> Any:
    homes = {"Settings": "settings", "distill": "run"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
