"""How a public function runs its op: through torch's dispatcher where anybody listens.

The dispatcher costs .2 us per tensor, 8 us for `verify`. In plain eager code nobody takes the call
from it: no compiler, mode, transform, tracer or profiler, no tensor subclass and no meta tensor.
There the implementation is called at once, and the op's name and schema serve those who do listen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

IMPLEMENTATIONS: dict[str, Callable[..., None]] = {}
"""Op name -> its implementation; filled where the ops are registered."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str})

# Each is true while such a listener is active. torch has no public names for them; if one is
# missing, every call goes through the dispatcher.
try:
    _LISTENERS: tuple[Callable[[], Any], ...] = (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch._C._autograd._profiler_enabled,
    )
except AttributeError:
    _LISTENERS = (lambda: True,)


def _anybody_listens(arguments: tuple[Any, ...]) -> bool:
    for listener in _LISTENERS:
        if listener():
            return True
    return arguments[0].is_meta or not _PLAIN.issuperset(map(type, arguments))


def call(name: str, *arguments: Any) -> None:
    """Run op `name`; its arguments as in its schema, all of them and in their order."""
    if torch.compiler.is_compiling() or _anybody_listens(arguments):
        getattr(torch.ops.saguaro, name)(*arguments)
    else:
        IMPLEMENTATIONS[name](*arguments)
