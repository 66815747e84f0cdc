"""Traffic meter: launches, requested bytes, atomics and host syncs, counted without a GPU.

    with Meter() as meter:
        op(...)
    meter.launches, meter.bytes_read, meter.bytes_written, meter.atomics, meter.syncs
    meter.kernels["_verify_kernel"], meter.wide_writes(vocab=128256)

Triton kernels run in the interpreter (TRITON_INTERPRET=1) and are counted exactly: every unmasked
lane of a load, store or atomic is its element's size (an atomic lane is one read and one write).
These are requested bytes, not DRAM bytes: re-reads that a cache would serve count again.

Torch ops are counted by a dispatch mode, as a lower bound that favours them: one launch per op,
each distinct input view read once (a stride-0 dimension costs nothing), each output written once,
gathers read and scatters write only what they touch, views and allocations are free. What a
reference does in numpy is not seen.

A sync is whatever makes the host wait when the tensors are on a GPU: `.item()` and its relatives,
data-dependent shapes (nonzero, masked select, unique, boolean indexing), `equal`, and copies to the
host (`.cpu()`, `.tolist()`, `.numpy()`, `.to("cpu")`). On CPU tensors these are counted as if the
tensors were on a GPU. `torch.tensor([...])` is an upload, counted apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WRITE_ONLY = {"fill_", "zero_", "copy_", "normal_", "uniform_", "exponential_", "random_"}
_GATHERS = {"gather", "index", "index_select", "take", "embedding"}
_SCATTERS = {"scatter_", "scatter_add_", "index_put_", "index_copy_", "index_add_"}
_SYNCS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}
_HOST_METHODS = {"cpu", "tolist", "numpy", "__array__"}
_MASKS = (torch.bool, torch.uint8)


@dataclass
class Event:
    """One launch, or the sum of several of the same name."""

    name: str
    kind: str
    """"triton" or "torch"."""
    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    elements_written: int = 0
    atomics: int = 0
    syncs: int = 0

    def __add__(self, other: Event) -> Event:
        """Sum of two events; the name and kind are this one's."""
        return Event(
            self.name,
            self.kind,
            self.launches + other.launches,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.elements_written + other.elements_written,
            self.atomics + other.atomics,
            self.syncs + other.syncs,
        )


@dataclass
class Meter:
    """Counts what runs inside its `with` block; may be entered again, and then adds up."""

    events: list[Event] = field(default_factory=list)
    uploads: int = 0
    _in_kernel: bool = False
    _exit: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def launches(self) -> int:
        """Kernels started."""
        return sum(event.launches for event in self.events)

    @property
    def bytes_read(self) -> int:
        """Bytes requested by loads."""
        return sum(event.bytes_read for event in self.events)

    @property
    def bytes_written(self) -> int:
        """Bytes requested by stores."""
        return sum(event.bytes_written for event in self.events)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def atomics(self) -> int:
        """Unmasked lanes of atomic operations."""
        return sum(event.atomics for event in self.events)

    @property
    def syncs(self) -> int:
        """Times the host would wait for the device."""
        return sum(event.syncs for event in self.events)

    @property
    def kernels(self) -> dict[str, Event]:
        """Totals by kernel or op name, in the order of first use."""
        totals: dict[str, Event] = {}
        for event in self.events:
            totals[event.name] = totals.get(event.name, Event(event.name, event.kind)) + event
        return totals

    def wide_writes(self, vocab: int) -> list[Event]:
        """Launches that store `vocab` elements or more, so at least one vocabulary-sized row."""
        return [event for event in self.events if event.elements_written >= vocab]

    def __str__(self) -> str:
        header = f"{'kernel':40} {'launches':>8} {'read':>12} {'written':>12}"
        header += f" {'atomics':>8} {'syncs':>5}"
        total = sum(self.events, Event("total", ""))
        return "\n".join(
            [header]
            + [
                f"{event.name[:40]:40} {event.launches:8} {event.bytes_read:12} "
                f"{event.bytes_written:12} {event.atomics:8} {event.syncs:5}"
                for event in [*self.kernels.values(), total]
            ]
        )

    def __enter__(self) -> Meter:
        self._exit.enter_context(_metered_interpreter(self))
        self._exit.enter_context(_HostCopies(self))
        self._exit.enter_context(_TorchOps(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.pop_all().__exit__(*exception)


@contextlib.contextmanager
def _metered_interpreter(meter: Meter) -> Iterator[None]:
    """Wrap the interpreter's launch and the operations that all loads and stores go through."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw, run = builder.create_atomic_cas, builder.create_atomic_rmw, executor.__call__

    def size(pointer: Any) -> int:
        return max(1, pointer.get_element_ty().primitive_bitwidth // 8)

    def lanes(pointer: Any, mask: Any) -> int:
        return int(np.count_nonzero(np.broadcast_to(mask.data, pointer.data.shape)))

    def metered_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        meter.events[-1].bytes_read += lanes(ptrs, mask) * size(ptrs)
        return load(self, ptrs, mask, *rest, **options)

    def metered_store(
        self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any
    ) -> Any:
        count = lanes(ptrs, mask)
        meter.events[-1].bytes_written += count * size(ptrs)
        meter.events[-1].elements_written += count
        return store(self, ptrs, value, mask, *rest, **options)

    def count_atomics(ptr: Any, count: int) -> None:
        event = meter.events[-1]
        event.atomics += count
        event.bytes_read += count * size(ptr)
        event.bytes_written += count * size(ptr)

    def metered_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        count_atomics(ptr, ptr.data.size)
        return cas(self, ptr, *rest)

    def metered_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count_atomics(ptr, lanes(ptr, mask))
        return rmw(self, op, ptr, value, mask, *rest)

    def metered_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter.events.append(Event(self.fn.__name__, "triton", launches=1))
        # The interpreter's own copies of the arguments are not the program's.
        meter._in_kernel = True
        try:
            return run(self, *args, **kwargs)
        finally:
            meter._in_kernel = False

    with (
        mock.patch.object(builder, "create_masked_load", metered_load),
        mock.patch.object(builder, "create_masked_store", metered_store),
        mock.patch.object(builder, "create_atomic_cas", metered_cas),
        mock.patch.object(builder, "create_atomic_rmw", metered_rmw),
        mock.patch.object(executor, "__call__", metered_run),
    ):
        yield


class _HostCopies(TorchFunctionMode):
    """Counts copies to the host, which on CPU tensors never reach the dispatcher."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # `.to(other.device)` stays on the device; only the literal "cpu" is a copy to the host.
        to_host = name == "to" and "cpu" in [*args[1:], *(kwargs or {}).values()]
        if (name in _HOST_METHODS or to_host) and not self.meter._in_kernel:
            self.meter.events.append(Event(name, "torch", bytes_read=_touched(args[0]), syncs=1))
            # `.numpy()` and `.tolist()` of a metered CPU tensor must not be counted a second time.
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _TorchOps(TorchDispatchMode):
    """Counts the launches, bytes and syncs of aten ops, also of those inside registered ops."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.meter._in_kernel:
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            # A registered op launches nothing itself: look inside its kernel.
            with self:
                device = next((t.device.type for t in _tensors((args, kwargs))), "cpu")
                key = torch._C.DispatchKey.CUDA if device == "cuda" else torch._C.DispatchKey.CPU
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.split("::")[1]
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if name == "lift_fresh":
            self.meter.uploads += 1
        if name in _ALLOCATIONS or (not func._schema.is_mutable and _all_views(outputs, inputs)):
            return
        event = Event(name, "torch", launches=1, syncs=int(_is_sync(name, args, inputs, outputs)))
        if name in _SYNCS and not outputs:
            event.launches = 0  # a copy of one scalar, not a kernel
        written = _written(func, args, kwargs)
        only_written = name in _WRITE_ONLY or any(a.is_out for a in func._schema.arguments)
        reads = [t for t in inputs if not (only_written and any(t is w for w in written))]
        stores = written or outputs
        if name in _GATHERS and outputs:
            reads = [*reads[1:], outputs[0]]
        if name in _SCATTERS:
            reads = [t for t in reads if not any(t is w for w in written)]
            stores = [reads[-1]] if reads else stores
        event.bytes_read = sum(_touched(t) for t in _distinct(reads))
        event.bytes_written = sum(_touched(t) for t in _distinct(stores))
        event.elements_written = max((_touched(t) // t.element_size() for t in stores), default=0)
        self.meter.events.append(event)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _all_views(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    sources = {_storage(tensor) for tensor in inputs}
    return bool(outputs) and all(_storage(tensor) in sources for tensor in outputs)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of the view, an expanded (stride 0) dimension counted once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * int(np.prod([n if step or not n else 1 for n, step in sizes]))


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    views = {(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype): t for t in tensors}
    return list(views.values())


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that the schema says are written."""
    values = list(args) + [kwargs.get(a.name) for a in func._schema.arguments[len(args) :]]
    pairs = zip(func._schema.arguments, values, strict=False)
    return _tensors([v for a, v in pairs if a.alias_info and a.alias_info.is_write])


def _is_sync(name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    if name in _SYNCS:
        return True
    if name in ("index", "index_put_", "index_put"):
        # A masked store of one value needs no list of positions; any other boolean index does.
        masked = any(t.dtype in _MASKS for t in _tensors(args[1]))
        return masked and (name == "index" or args[2].numel() != 1)
    if name in ("_to_copy", "copy_"):
        return any(t.device.type != "cpu" for t in inputs) and outputs[0].device.type == "cpu"
    return False
