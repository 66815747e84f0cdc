"""Putting a function of ours where one of another engine is, if it can be called the same way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from saguaro_kernels.errors import UnsupportedError


def replace(module: ModuleType, name: str, ours: Callable[..., Any]) -> None:
    """Replace `module.name` by `ours`.

    Raises:
        UnsupportedError: theirs has an argument that ours does not know at that place. A version
            that passes it would otherwise fail, or be misunderstood, amid a request.
    """
    try:
        theirs = list(inspect.signature(getattr(module, name)).parameters)
    except ValueError:  # compiled: it does not say
        theirs = []
    known = list(inspect.signature(ours).parameters)
    for place, argument in enumerate(theirs):
        if argument not in known or known.index(argument) != place:
            raise UnsupportedError(
                f"{module.__name__}.{name}: argument {argument!r} at place {place} is not known; "
                f"this version has another interface, want ({', '.join(known)})"
            )
    setattr(module, name, ours)
