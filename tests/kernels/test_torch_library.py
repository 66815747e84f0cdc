"""Every registered op through torch.library's checks, torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_op import Op, cache_table, change, leaves, ops, tensors
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., Any]


def _calls() -> dict[str, Op]:
    """A call of each op whose arguments are all that it writes."""
    table = ops()
    cache = table["cache"]
    table["cache"] = Op(cache.call, cache.arguments | {"table": cache_table()})
    return table


CALLS = _calls()


class _Captured(TorchDispatchMode):
    """Keeps the registered ops that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "saguaro":
            self.ops[func._schema.name.removeprefix("saguaro::")] = (func, args)
        return func(*args, **(kwargs or {}))


class _Module(torch.nn.Module):
    """The call as a function of tensors, to tensors: all that a program can be exported of."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        tensor = {
            path: its for (path, _), its in zip(leaves(self.op.arguments), given, strict=True)
        }
        arguments = change(self.op.arguments, lambda path, _: tensor[path])
        return tensors(self.op.call(**arguments, impl="reference"))


def _fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    return change(arguments, lambda _, tensor: tensor.clone())


def _flat(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for _, tensor in leaves(arguments))


def _same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(torch.equal(its, other) for its, other in pairs)


def _ops_of(op: Op) -> dict[str, Any]:
    with _Captured() as captured:
        op.call(**_fresh(op.arguments), impl="reference")
    return captured.ops


def test_every_registered_op_is_called() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("saguaro::") for name in names if name.startswith("saguaro::")}
    assert set().union(*(_ops_of(op) for op in CALLS.values())) == ours


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """Schema, fake kernel, autograd registration and dispatch under dynamic shapes."""
    for op, arguments in _ops_of(CALLS[name]).values():
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_and_exports_whole(name: str) -> None:
    """One graph without breaks; results and what is written to arguments are the eager call's."""
    op = CALLS[name]
    eager, compiled, exported = (_fresh(op.arguments) for _ in range(3))
    wanted = tensors(op.call(**eager, impl="reference"))
    graph = torch.compile(op.call, fullgraph=True, backend="eager")
    assert _same(tensors(graph(**compiled, impl="reference")), wanted)
    program = torch.export.export(_Module(op), _flat(_fresh(op.arguments)))
    # Where gradients are switched off, what runs is a graph inside the graph.
    graphs = [its for its in program.graph_module.modules() if isinstance(its, GraphModule)]
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    targets = {str(node.target) for node in nodes}
    for its in _ops_of(op):
        assert any(f"saguaro.{its}." in target for target in targets), (its, targets)
    assert _same(program.module()(*_flat(exported)), wanted)
    for its in (compiled, exported):
        assert _same(_flat(its), _flat(eager))
