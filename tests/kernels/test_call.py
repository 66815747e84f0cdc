"""Who listens to an op gets it from the dispatcher; where nobody does it runs at once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro_kernels import ngram_propose
from saguaro_kernels._call import IMPLEMENTATIONS

HISTORY = torch.tensor([[1, 2, 3, 1, 2, 0]])
LENGTH = torch.tensor([5], dtype=torch.int32)


def propose(history=HISTORY, length=LENGTH):
    return ngram_propose(history, length, num_tokens=2, impl="reference")


@pytest.fixture
def ran(monkeypatch):
    """Was the implementation called at once? The dispatcher keeps what was registered."""
    calls = []
    for name, implementation in IMPLEMENTATIONS.items():

        def record(*arguments, name=name, implementation=implementation):
            calls.append(name)
            implementation(*arguments)

        monkeypatch.setitem(IMPLEMENTATIONS, name, record)
    return calls


class Listener(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "saguaro":
            self.heard.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_eager_code_calls_the_implementation_at_once(ran):
    tokens, count = propose()
    assert ran == ["ngram_propose"]
    assert tokens.tolist() == [[3, 1]] and count.tolist() == [2]


def test_every_registered_op_has_its_implementation():
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("saguaro::")}  # fmt: skip
    assert names == set(IMPLEMENTATIONS)


def test_a_dispatch_mode_hears_the_op(ran):
    with Listener() as listener:
        tokens, _ = propose()
    assert listener.heard == ["saguaro::ngram_propose"] and not ran
    assert tokens.tolist() == [[3, 1]]


def test_a_profile_names_the_op(ran):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        propose()
    assert "saguaro::ngram_propose" in {event.key for event in profile.key_averages()}
    assert not ran


def test_a_tracer_records_the_op(ran):
    traced = make_fx(lambda history: propose(history)[0] + 1)(HISTORY)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert "saguaro.ngram_propose.default" in targets and not ran
    assert traced(HISTORY).tolist() == [[4, 2]]


def test_export_records_the_op(ran):
    class Module(torch.nn.Module):
        def forward(self, history, length):
            return propose(history, length)[0]

    for strict in (False, True):
        program = torch.export.export(Module(), (HISTORY, LENGTH), strict=strict)
        assert "ngram_propose" in str(program.graph) and not ran
        assert program.module()(HISTORY, LENGTH).tolist() == [[3, 1]]
        ran.clear()


def test_a_subclass_goes_through_the_dispatcher(ran):
    tokens, _ = propose(HISTORY.as_subclass(Subclass))
    assert not ran
    assert tokens.tolist() == [[3, 1]]


def test_a_transform_is_refused_as_the_dispatcher_refuses_it(ran):
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.vmap(lambda history: propose(history[None], LENGTH)[0])(HISTORY.expand(3, -1))
    assert not ran
