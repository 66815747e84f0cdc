"""Triton's interpreter without what it repeats: the same results in half the time.

A device function called from a kernel searches triton.language for what has to be replaced by
numpy, although the launch has replaced it already; a launch lists the same modules anew; and the
numpy type of every tile is looked up in a table built for that look-up.

And a kernel's source is read where it is defined, not at its first launch: a file that was edited
in between gave another function's lines, and a KeyError or a wrong kernel.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Make interpreted kernels of this process faster; more than once does nothing more."""
    if getattr(interpreter, "_patch_lang", None) is _patch_lang:
        return
    interpreter._patch_lang = _patch_lang
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    interpreter.GridExecutor.__call__ = _launch
    interpreter.InterpretedFunction.__init__ = _define


_original_patch_lang = interpreter._patch_lang
_original_np_dtype = interpreter._get_np_dtype
_original_launch = interpreter.GridExecutor.__call__
_original_define = interpreter.InterpretedFunction.__init__
_replaced: set[int] = set()
"""The modules, by id, that the launch under way has replaced the functions of."""
_np_dtypes: dict[str, Any] = {}


def _define(self: Any, fn: Any, **options: Any) -> None:
    _original_define(self, fn, **options)
    self.rewrite()


def _launch(self: Any, *arguments: Any, **options: Any) -> None:
    _replaced.clear()  # what a launch has replaced it puts back at its end
    _original_launch(self, *arguments, **options)


def _patch_lang(fn: Any) -> Any:
    modules = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core}
    if modules and modules <= _replaced:
        return interpreter._LangPatchScope()
    _replaced.update(modules)
    return _original_patch_lang(fn)


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, f) for name, f in inspect.getmembers(package) if tl.core.is_builtin(f)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def _get_np_dtype(kind: Any) -> Any:
    scalar = kind.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _original_np_dtype(scalar)
    return _np_dtypes[scalar.name]
