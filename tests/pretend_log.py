"""What ran on GPUs that are not there, kept so that it can run once more over the same memory: a
graph's replay, and the same work under other delays.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Clock = dict[str, int]
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
"""A function, its arguments, and what it returned."""


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def holders(tensor: torch.Tensor) -> int:
    """How many tensors there are on this one's memory."""
    return torch._C._storage_Use_Count(key(tensor)) - 1  # Python's own view of it


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for its in value for tensor in leaves(its)]


def mapped(func: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same with `func` of each tensor."""
    if isinstance(value, torch.Tensor):
        return func(value)
    if isinstance(value, dict):
        return {name: mapped(func, its) for name, its in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(func, its) for its in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


class Step(NamedTuple):
    """An operation that can run again."""

    name: str
    again: Callable[[], None]
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]


class Entry(NamedTuple):
    actor: str
    clock: Clock
    step: Step


class Log:
    """Operations in the order they were queued, with aliases of all their tensors.

    held: aliases by memory. fresh: memory made by these operations. Other memory that they read or
    write is kept as it was, if `keep`.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.entries: list[Entry] = []
        self.held: Counter[int] = Counter()
        self.fresh: dict[int, torch.Tensor] = {}
        self.outside: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Before an operation: remember what memory holds that has not been seen yet."""
        for its in tensors if self.keep else ():
            if key(its) not in self._before and key(its) not in self.fresh:
                whole = torch.empty(0, dtype=torch.uint8).set_(its.untyped_storage())
                self._before[key(its)] = whole, whole.clone()

    def step(self, name: str, call: Call, reads: list[Any], writes: list[Any]) -> Step:
        """What an operation did, after it."""
        inputs = {key(its) for its in leaves(call[1:3])}
        func, args, kwargs, made = mapped(self._alias, call)
        for its in leaves(made):
            if key(its) not in inputs:
                self.fresh[key(its)] = its
        for its in leaves((args, kwargs)):
            if key(its) not in self.fresh:
                self.outside[key(its)] = its

        def again() -> None:
            for old, new in zip(leaves(made), leaves(func(*args, **kwargs)), strict=True):
                if key(old) not in inputs:
                    old.copy_(new)

        return Step(name, again, *mapped(self._alias, (reads, writes)))

    def read(self, name: str, tensor: torch.Tensor) -> Step:
        """The host takes a value: another one, later, is an error."""
        mine, value = self._alias(tensor), tensor.clone()

        def again() -> None:
            same = torch.equal(mine.nan_to_num(), value.nan_to_num())
            assert same, f"{name}: the host finds another value"

        return Step(name, again, [mine], [])

    def run_again(self, chance: random.Random) -> int:
        """Everything once more from the beginning, in a random one of the orders that the clocks
        allow: streams are held up by turns. Returns how often the order left the recorded one."""
        for whole, value in self._before.values():
            whole.copy_(value)
        for its in self.fresh.values():
            torch.empty(0, dtype=torch.uint8).set_(its.untyped_storage()).fill_(0xEE)
        queues: dict[str, deque[tuple[int, Entry]]] = {}
        for number, entry in enumerate(self.entries):
            queues.setdefault(entry.actor, deque()).append((number, entry))
        moved = expected = 0
        while any(queues.values()):
            if not expected % 64:
                speed = {actor: chance.choice((0.001, 0.1, 1.0)) for actor in queues}
            ready = [actor for actor in queues if self._may_run(actor, queues)]
            actor = chance.choices(ready, [speed[its] for its in ready])[0]
            number, entry = queues[actor].popleft()
            moved += number != expected
            expected += 1
            entry.step.again()
        return moved

    @staticmethod
    def _may_run(actor: str, queues: dict[str, deque[tuple[int, Entry]]]) -> bool:
        if not queues[actor]:
            return False
        clock = queues[actor][0][1].clock
        return all(
            not queue or other == actor or queue[0][1].clock[other] > clock.get(other, 0)
            for other, queue in queues.items()
        )

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self.held[key(tensor)] += 1
        return tensor.detach()


class Graph:
    """The operations of a capture. Like a real one it knows addresses and keeps nothing alive but
    what it made itself."""

    def __init__(self, log: Log, stream: Any, pool: object) -> None:
        self.steps = [entry.step for entry in log.entries]
        self.held, self.fresh, self.outside = log.held, log.fresh, log.outside
        self.stream, self.pool = stream, pool
