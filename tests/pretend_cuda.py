"""GPUs that are not there: CPU tensors that say they lie on cuda:0 and cuda:1, and a record of who
touched which memory on which stream.

Everything is computed at once and on the CPU. What a GPU would do later, and in an order of its
own, is proved: every stream and the host has a vector clock, events carry clocks from one to
another, and each access of a storage must come after the last write of it, and each write after all
reads. An order that holds only by luck is a race here, however the delays fall. It can be acted out
as well: `delayed` keeps what runs inside, to be run again in random orders that the clocks allow.

A captured graph is its operations, run again over the same memory on replay. While one is captured
nothing may wait, and memory made then must not be kept by anybody; what a capture computed is
spoiled, as a real one computes nothing. A replay finds out whether memory it reads was given back.

    with pretend_cuda.Machine(monkeypatch, devices=2) as machine:
        model = machine.place(model, "cuda:0")
        ...
    machine.races, machine.waits

A tensor made without `device=` is the host's; an operation on tensors of two devices raises, as
does a copy to memory that is not pinned without waiting. `waits`: what made the host wait, by name.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pretend_log import Call, Entry, Graph, Log, holders
from pretend_log import key as _key
from pretend_log import leaves as _inputs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro_runtime import transfer

CPU = torch.device("cpu")
HOST = "host"
Clock = dict[str, int]

_READS_VALUE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


def _histc(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of integers, which a GPU takes and the CPU does not."""
    return torch.ops.aten.histc(tensor.double(), *args, **kwargs).to(tensor.dtype)


_INSTEAD = {torch.ops.aten.histc.default: _histc}


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)


class Memory:
    """A storage: where it lies, who wrote it last and who has read it since, as (actor, tick)."""

    def __init__(self, tensor: torch.Tensor, device: torch.device, pinned: bool) -> None:
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.device, self.pinned = device, pinned
        self.home = ""
        self.wrote: tuple[str, int] | None = None
        self.read: dict[str, int] = {}


class Stream:
    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name = device, name


class Event:
    def __init__(self, timed: bool) -> None:
        self.clock: Clock | None = None
        self.timed = timed
        self.at = 0


class Machine:
    """Stands in for `transfer.backend` and watches every operation while it is entered."""

    def __init__(self, monkeypatch: Any, *, devices: int = 1, peers: bool = True) -> None:
        self.devices, self.peers = devices, peers
        self.memories: dict[int, Memory] = {}
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.races: list[str] = []
        self.waits: Counter[str] = Counter()
        self.dropped: set[int] = set()
        """Numbers of the waits for events, of streams and of the host, to leave out."""
        self.event_waits = self.now = 0
        self.operations: Counter[str] = Counter()
        self.log: Log | None = None
        self.capturing: Stream | None = None
        self.may_wait = True
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.captures = self.replays = 0
        self._streams = {index: Stream(torch.device("cuda", index), f"default {index}")
                         for index in range(devices)}  # fmt: skip
        self._count = 0
        self._stack = contextlib.ExitStack()
        monkeypatch.setattr(transfer, "backend", self)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    # What the tests ask.

    def __enter__(self) -> Machine:
        self._stack.enter_context(_Devices(self))
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def place(self, model: torch.nn.Module, device: str) -> torch.nn.Module:
        """The model with its weights on `device`."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._remember(tensor, torch.device(device))
        return model

    @contextlib.contextmanager
    def delayed(self) -> Iterator[Log]:
        """Keep what runs inside, for `Log.run_again`."""
        self.log = Log(keep=True)
        try:
            yield self.log
        finally:
            self.log = None

    # What `transfer` asks of CUDA.

    def stream(self, device: torch.device) -> Stream:
        self._count += 1
        stream = Stream(device, f"stream {self._count} on {device}")
        self.clocks[stream.name] = dict(self.clocks[HOST])
        for name, clock in self.clocks.items():  # after all that was queued so far
            if name != stream.name:
                _join(self.clocks[stream.name], clock)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self._streams[stream.device.index]
        self._streams[stream.device.index] = stream
        try:
            yield
        finally:
            self._streams[stream.device.index] = before

    def current_stream(self, device: torch.device) -> Stream:
        return self._streams[device.index]

    def event(self, *, timed: bool = False) -> Event:
        return Event(timed)

    def record(self, event: Event, stream: Stream) -> None:
        self.refuse("an event")
        event.clock, event.at = dict(self.tick(stream.name)), self.now

    def wait(self, stream: Stream, event: Event) -> None:
        self.refuse("an event")
        self.event_waits += 1
        if self.event_waits not in self.dropped and event.clock is not None:
            _join(self.clocks.setdefault(stream.name, {}), event.clock)

    def synchronize(self, event: Event) -> None:
        self.host_waits("event")
        assert event.clock is not None, "waits for an event that nobody records"
        self.event_waits += 1
        if self.event_waits in self.dropped:
            return
        _join(self.clocks[HOST], event.clock)

    def passed(self, event: Event) -> bool:
        """Only what the host has waited for is known to have passed."""
        return event.clock is not None and all(
            self.clocks[HOST].get(name, 0) >= tick for name, tick in event.clock.items()
        )

    def elapsed_ms(self, start: Event, end: Event) -> float:
        assert start.timed and end.timed
        return (end.at - start.at) * 1e-3

    def pinned(self, size: int) -> torch.Tensor:
        self.refuse("memory of the host")
        tensor = torch.empty(size, dtype=torch.uint8)
        self._remember(tensor, CPU, pinned=True)
        tensor.fill_(0xEE)
        return tensor

    def upload(self, pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert self.memory(pinned).pinned
        there = self.empty(pinned, device)
        self.copy(there, pinned)
        return there

    def empty(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        with _Off(self):
            made = torch.empty(like.shape, dtype=like.dtype)
        self._remember(made, device)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queued on the stream of the device that is read, or else written."""
        of, to = self.memory(source), self.memory(target)
        for memory in (of, to):
            assert memory.device.type == "cuda" or memory.pinned, "copy waits: it is not pinned"
            if memory.device.type == "cpu":
                self.refuse("memory of the host")
        device = of.device if of.device.type == "cuda" else to.device
        if of.device != to.device and of.device.type == to.device.type == "cuda":
            assert self.peers, "a copy between devices that are no peers"
        with _Off(self):
            if self.log:
                self.log.see([source, target])
            target.copy_(source)
        call = (torch.Tensor.copy_, (target, source), {}, target)
        self.did(self.current_stream(device).name, "copy", [source], [target], call)

    def are_peers(self, first: torch.device, second: torch.device) -> bool:
        return first == second or self.peers

    @contextlib.contextmanager
    def never_waiting(self) -> Iterator[None]:
        self.may_wait = False
        try:
            yield
        finally:
            self.may_wait = True

    def graph_pool(self) -> object:
        return object()

    def capture(
        self, work: Callable[[], torch.Tensor], pool: object, stream: Stream
    ) -> tuple[Graph, torch.Tensor]:
        assert self.current_stream(stream.device) is stream, "captured on another stream"
        self.captures += 1
        before, self.log, self.capturing = self.log, Log(keep=False), stream
        try:
            made = work()
            graph = Graph(self.log, stream, pool)
        finally:
            self.log, self.capturing = before, None
        for collected in (False, True):
            given = Counter({_key(made): 1 + (made._base is not None)})
            kept = [its for key, its in graph.fresh.items()
                    if holders(its) > graph.held[key] + given[key]]  # fmt: skip
            if not kept:
                break
            if collected:
                raise RuntimeError("memory made while a stream is captured is kept by somebody")
            gc.collect()
        with _Off(self):
            for its in graph.fresh.values():
                if its.is_floating_point():
                    its.fill_(torch.nan)
        self.graphs.add(graph)
        return graph, made

    def replay(self, graph: Graph) -> None:
        self.refuse("a replay")
        self.replays += 1
        stream = self.current_stream(graph.stream.device)
        assert stream is graph.stream, "replayed on another stream"
        for key, its in graph.outside.items():
            if holders(its) <= sum(other.held[key] for other in self.graphs):
                raise RuntimeError("a graph reads memory that was given back since its capture")
        for step in graph.steps:
            with _Off(self):
                if self.log:
                    self.log.see([*step.reads, *step.writes])
                step.again()
            clock = self.touch(stream.name, step.reads, step.writes, f"a graph's {step.name}")
            if self.log:
                self.log.entries.append(Entry(stream.name, dict(clock), step))

    # The record.

    def memory(self, tensor: torch.Tensor) -> Memory:
        return self.memories.get(_key(tensor)) or self._remember(tensor, CPU)

    def _remember(
        self, tensor: torch.Tensor, device: torch.device, *, pinned: bool = False
    ) -> Memory:
        memory = Memory(tensor, device, pinned)
        self.memories[_key(tensor)] = memory
        return memory

    def tick(self, actor: str) -> Clock:
        """The next moment of an actor. What the host queues comes after what it has waited for."""
        self.now += 1
        clock = self.clocks.setdefault(actor, {})
        if actor != HOST:
            _join(clock, self.clocks[HOST])
        clock[actor] = clock.get(actor, 0) + 1
        return clock

    def refuse(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"{what} while a stream is captured")

    def host_waits(self, name: str) -> None:
        self.waits[name] += 1
        if not self.may_wait:
            raise RuntimeError(f"{name} makes the host wait")
        self.refuse(f"{name} makes the host wait")

    def did(
        self,
        actor: str,
        name: str,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
        call: Call,
    ) -> None:
        """An operation of `actor` has been computed."""
        clock = self.touch(actor, read, written, name)
        if self.capturing and actor not in (HOST, self.capturing.name):
            self.refuse("another stream's work")
        # What the host does while a stream is captured is no part of the graph.
        if self.log and not (self.capturing and actor == HOST):
            with _Off(self):
                step = self.log.step(name, call, read, written)
            self.log.entries.append(Entry(actor, dict(clock), step))

    def touch(
        self, actor: str, read: list[torch.Tensor], written: list[torch.Tensor], name: str
    ) -> Clock:
        """An operation of `actor`: its reads and writes must be ordered after those of others."""
        clock = self.tick(actor)

        def check(kind: str, moment: tuple[str, int] | None, memory: Memory) -> None:
            if moment and clock.get(moment[0], 0) < moment[1]:
                self.races.append(f"{name} on {actor} {kind} {moment[0]} ({memory.device})")

        for tensor in read:
            memory = self.memory(tensor)
            check("reads what is being written by", memory.wrote, memory)
            memory.read[actor] = clock[actor]
        for tensor in written:
            memory = self.memory(tensor)
            memory.home = memory.home or actor
            check("writes what is being written by", memory.wrote, memory)
            for moment in memory.read.items():
                check("writes what is being read by", moment, memory)
            memory.wrote, memory.read = (actor, clock[actor]), {}
        return clock

    def read_by_host(self, tensor: torch.Tensor, name: str) -> None:
        memory = self.memory(tensor)
        if memory.device.type == "cuda":
            self.host_waits(name)
            self.wait_for(memory.device)
        clock = self.touch(HOST, [tensor], [], name)
        if self.log and not self.capturing:
            with _Off(self):
                self.log.see([tensor])
                step = self.log.read(name, tensor)
            self.log.entries.append(Entry(HOST, dict(clock), step))

    def wait_for(self, device: torch.device) -> None:
        """The host waits for the device's current stream, which is queued on for it."""
        _join(self.clocks[HOST], self.tick(self.current_stream(device).name))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, parameters = func._schema.name.split("::")[1], func._schema.arguments
        tensors = _inputs((args, kwargs))
        devices = {
            self.memory(its).device
            for its in tensors
            if its.dim() or self.memory(its).device.type == "cuda"
        }
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors on {sorted(map(str, devices))}, want one device")
        device = devices.pop() if devices else CPU
        actor = self.current_stream(device).name if device.type == "cuda" else HOST
        boolean = name in ("index", "index_put", "index_put_") and any(
            its.dtype in (torch.bool, torch.uint8) for its in _inputs(args[1])
        )
        if device.type == "cuda" and (boolean or name.startswith(_READS_VALUE)):
            self.host_waits(name + (" by mask" if boolean else ""))
            self.wait_for(device)
        if name == "_grouped_mm" and device.type == "cuda" and args[0].dtype != torch.bfloat16:
            self.host_waits(f"{name} of {args[0].dtype}")  # torch has a kernel for bfloat16 alone
            self.wait_for(device)
        func = _INSTEAD.get(func, func)
        self.operations[name] += 1
        before = {_key(its) for its in tensors}
        with _Off(self):
            if self.log:
                self.log.see(tensors)
            result = func(*args, **kwargs)
        written: list[torch.Tensor] = []
        for argument, value in zip(parameters, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _inputs(value)
        for argument in parameters:
            if argument.name in kwargs and argument.alias_info and argument.alias_info.is_write:
                written += _inputs(kwargs[argument.name])
        fresh = [its for its in _inputs(result) if _key(its) not in before]
        for its in fresh:
            self._remember(its, device)
        views = not fresh and not written
        if not views:
            self.did(actor, name, tensors, written + fresh, (func, args, kwargs, result))
        return result

    def sweep(self) -> None:
        """Memory that was freed goes to its home stream again: all others must be done with it."""
        for key, memory in list(self.memories.items()):
            if memory.weak.expired():
                home = self.clocks.get(memory.home, {})
                moments = [*memory.read.items(), *([memory.wrote] if memory.wrote else [])]
                for actor, at in moments:
                    if memory.device.type == "cuda" and home.get(actor, 0) < at:
                        self.races.append(f"memory of {memory.home} freed while {actor} uses it")
                del self.memories[key]


class _Devices(TorchFunctionMode):
    """`device=` and `.device` as if there were GPUs."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        machine, kwargs = self.machine, dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and isinstance(args[0], torch.Tensor):
            of = getattr(func, "__self__", None)
            if of is torch.Tensor.device:
                return machine.memory(args[0]).device
            if of is torch.Tensor.is_cuda:
                return machine.memory(args[0]).device.type == "cuda"
            return func(*args, **kwargs)
        if name in ("tolist", "numpy", "item", "__int__", "__bool__", "__float__", "__index__"):
            machine.read_by_host(args[0], name)
            return func(*args, **kwargs)
        if name == "one_hot":  # torch's own makes memory on the CPU and reads it there
            numbers = torch.arange(kwargs.get("num_classes", args[-1]))
            machine._remember(numbers, machine.memory(args[0]).device)
            return (args[0][..., None] == numbers).long()
        if name in ("to", "cpu", "cuda", "pin_memory", "type"):
            return self._to(func, name, args, kwargs)
        device = kwargs.pop("device", None)
        if device is not None:
            device = torch.device(device)
            like = next((its for its in args if isinstance(its, torch.Tensor)), None)
            if like is not None and machine.memory(like).device == device:
                device = None
        if device is None or device.type != "cuda":
            if device is not None:
                kwargs["device"] = device
            return func(*args, **kwargs)
        if name == "tensor":
            machine.host_waits("tensor(device=cuda)")
        with _Off(machine):
            made = func(*args, **kwargs)
        machine._remember(made, device)
        actor = machine.current_stream(device).name
        machine.did(actor, name, [], [made], (func, args, kwargs, made))
        return made

    def _to(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        machine, (tensor, *rest) = self.machine, args
        wanted = [its for its in (*rest, kwargs.get("device")) if isinstance(its, torch.device)]
        wanted += [torch.device(its) for its in rest if isinstance(its, str)]
        if name == "cpu":
            wanted = [CPU]
        here = machine.memory(tensor).device
        if not wanted or wanted[0] == here:
            rest = [its for its in rest if not isinstance(its, torch.device | str)]
            kwargs.pop("device", None)
            if name == "cpu" or (wanted and not rest and not kwargs):
                return tensor
            return func(tensor, *rest, **kwargs)
        machine.host_waits(f"{name}({wanted[0].type})")  # from or to memory that is not pinned
        there = machine.empty(tensor, wanted[0])
        if here.type == "cuda":
            machine.wait_for(here)
        with _Off(machine):
            if machine.log:
                machine.log.see([tensor, there])
            there.copy_(tensor)
        actor = wanted[0] if wanted[0].type == "cuda" else here
        call = (torch.Tensor.copy_, (there, tensor), {}, there)
        machine.did(machine.current_stream(actor).name, name, [tensor], [there], call)
        machine.wait_for(actor)
        return there


class _Watch(TorchDispatchMode):
    """Each operation: on which device and stream it runs, what it reads and writes."""

    off = 0

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        machine = self.machine
        if func.namespace == "saguaro":  # the kernels' part is taken by their reference
            args = tuple("reference" if its == "triton" else its for its in args)
        if _Watch.off:
            return func(*args, **kwargs)
        return machine.run(func, args, kwargs)


class _Off:
    """The watch looks away: the machine itself computes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __enter__(self) -> None:
        _Watch.off += 1

    def __exit__(self, *_: object) -> None:
        _Watch.off -= 1
