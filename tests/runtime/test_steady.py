"""The steady round: buffers stay where they are, drafting ahead allocates nothing and the rest
little, rows of logits are not copied, memory is flat."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripts
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saguaro_kernels._call import IMPLEMENTATIONS
from saguaro_runtime import Engine, SamplingParams
from saguaro_runtime.drafting import Drafter
from saguaro_runtime.models.scripted import ScriptedModel

V = 5
P = scripts.random_law(V, seed=1)
Q = scripts.random_law(V, seed=2, near=P)


def _tensors(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that live as long as the engine does, by where they hang."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, torch.Tensor):
        yield path, owner
    elif isinstance(owner, dict):
        for key, value in owner.items():
            yield from _tensors(value, f"{path}[{key}]", seen)
    elif type(owner).__module__.startswith(("saguaro_runtime", "saguaro_kernels")):
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            yield from _tensors(value, f"{path}.{name}", seen)


def _buffers(engine: Engine) -> dict[str, int]:
    return {
        path: tensor.data_ptr()
        for path, tensor in _tensors(engine, "engine", set())
        if tensor.numel() >= V and "_turn" not in path and "_views" not in path
    }


@pytest.mark.parametrize("fallback", ["batched_retry", "partial_accept"])
def test_buffers_stay_where_they_are(fallback: str) -> None:
    """Through a hundred rounds of hits and misses, and a request that leaves and one that joins."""
    with scripts.engine(
        scripts.model(P), scripts.model(Q), k=3, branches=4, max_batch=3, reproducible=False,
        fallback=fallback,
    ) as engine:  # fmt: skip
        requests = [engine.add([1, 2], scripts.sampled(seed, 400)) for seed in range(3)]
        for _ in range(10):
            engine.step()
        before = _buffers(engine)
        for step in range(100):
            engine.step()
            if step == 50:
                engine.cancel(requests[1])
                engine.add([1, 2], scripts.sampled(9, 400))
        assert _buffers(engine) == before
        stats = engine.stats()
    names = " ".join(before)
    for part in ("chain.logits", "chain.tokens", "branches.store.logits", "model.tokens"):
        assert part in names, names
    assert stats["hits"] > 100 and stats["misses"] > 20


def test_launches_are_called_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred rounds of hits: each op with the same numbers, names and options, and tensors of
    the same shapes, which is what a captured graph repeats."""
    launched: list[Any] = []

    def plain(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument.dtype, tuple(argument.shape), argument.stride()
        return argument

    def recorded(name: str, run: Any) -> Any:
        def launch(*arguments: Any) -> None:
            launched.append((name, *map(plain, arguments)))
            run(*arguments)

        return launch

    for name, run in IMPLEMENTATIONS.items():
        monkeypatch.setitem(IMPLEMENTATIONS, name, recorded(name, run))
    target, draft = (scripts.model(P, slots=800) for _ in range(2))
    with scripts.engine(target, draft, k=3, branches=24, max_batch=3) as engine:
        for seed in range(3):
            engine.add([1, 2], scripts.sampled(seed, 480, temperature=float(seed > 0)))
        rounds = []
        for _ in range(110):
            launched.clear()
            engine.step()
            rounds.append(tuple(launched))
        stats = engine.stats()
    del rounds[:10]
    assert stats["misses"] == 0 and stats["running"] == 3  # all outcomes were prepared
    assert len({name for name, *_ in rounds[0]}) == 5 and len(rounds[0]) == 4 + 3  # draws
    assert len(set(rounds)) == 1


WIDE, TEXT = 4096, 700
"""Ids and tokens of a text: what is as large as a row of either stands out."""
SMALL = 1024
"""Bytes."""


class _Allocations(TorchDispatchMode):
    """New storages of each part of a round: (file, bytes). What a model or the interpreter of the
    kernels makes is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.made = "rest", {"rest": [], "next_chain": [], "look_ahead": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "saguaro":  # what an op of ours does counts
            with self:
                key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                return func.redispatch(key, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        before, new = self._storages((args, kwargs)), self._storages(result)
        for storage in new.keys() - before.keys():
            files, frame = [], sys._getframe(1)
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            if not any("/models/" in name or "/triton/" in name for name in files):
                where = next(name for name in files if "/torch/" not in name)
                self.made[self.part].append(("/".join(Path(where).parts[-3:]), new[storage]))
        return result

    @staticmethod
    def _storages(tree: Any) -> dict[int, int]:
        found = [its for its in tree_leaves(tree) if isinstance(its, torch.Tensor)]
        return {its.untyped_storage()._cdata: its.untyped_storage().nbytes() for its in found}

    def within(self, owner: Any, part: str) -> None:
        """Count what `owner`'s method of that name makes apart."""
        method = getattr(owner, part)

        def call(*args: Any) -> Any:
            self.part = part
            try:
                return method(*args)
            finally:
                self.part = "rest"

        setattr(owner, part, call)


class _Wide(ScriptedModel):
    """A vocabulary too large for a table of all pairs."""

    def __init__(self) -> None:
        super().__init__(P, slots=2 * TEXT)
        self.vocab_size = WIDE
        self.wide = 4 * torch.randn(16, WIDE, generator=torch.Generator().manual_seed(0))

    def _after(self, rows: torch.Tensor, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.wide[(before + 3 * last) % 16]


def _made_in_a_round_of_hits(impl: str, allocation: str) -> dict[str, list[tuple[str, int]]]:
    options = {"k": 2, "branches": 3, "max_batch": 2, "impl": impl, "allocation": allocation}
    with scripts.engine(_Wide(), _Wide(), **options) as engine:
        for seed, more in ((1, {}), (2, {"top_k": 50, "top_p": 0.9})):
            engine.add([1, 2], scripts.sampled(seed, TEXT, **more))
        for _ in range(2):
            engine.step()
        speculator, hits = engine.lane.speculator, engine.stats()["hits"]
        while True:
            made = _Allocations()
            with pytest.MonkeyPatch.context() as patch:
                for part in ("next_chain", "look_ahead"):
                    patch.setattr(speculator, part, getattr(speculator, part))
                    made.within(speculator, part)
                with made:
                    engine.step()
            hits, before = engine.stats()["hits"], hits
            if hits == before + 2:
                return made.made


@pytest.mark.parametrize("allocation", ["best", "uniform"])
def test_drafting_ahead_allocates_nothing_and_the_rest_little(allocation: str) -> None:
    """Of what the models do not make. No part makes anything as large as a row of the vocabulary,
    or as a text or its keys."""
    made = _made_in_a_round_of_hits("triton", allocation)
    assert made["look_ahead"] == []
    assert 0 < len(made["next_chain"]) <= 60 and 0 < len(made["rest"]) <= 40
    large = [its for part in made.values() for its in part if its[1] >= SMALL]
    assert not large, large


def test_the_runtime_allocates_the_same_around_references() -> None:
    """The references in torch make what they need; what is around them does not."""
    made = _made_in_a_round_of_hits("reference", "best")
    assert made["look_ahead"] and all("saguaro_kernels/" in name for name, _ in made["look_ahead"])
    for part in made.values():
        assert not [its for its in part if "saguaro_runtime" in its[0] and its[1] >= SMALL]


def test_one_allocation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a number and a row of logits made while drafting ahead."""
    feed = Drafter.feed_last

    def wasteful(self: Drafter, turn: Any) -> None:
        feed(self, turn)
        self.chain.logits[turn.rows[:1] + 0, 0].add_(0.0)

    monkeypatch.setattr(Drafter, "feed_last", wasteful)
    made = _made_in_a_round_of_hits("reference", "best")["look_ahead"]
    mine = [size for name, size in made if name == "tests/runtime/test_steady.py"]
    assert mine == [8, 4 * WIDE] and min(4 * WIDE, 8 * TEXT) > SMALL


def test_the_target_reads_drafted_rows_where_the_draft_wrote_them() -> None:
    """Whichever rows are running: no row of the vocabulary's size is copied for a verification."""
    with scripts.engine(scripts.model(P), scripts.model(Q), max_batch=4) as engine:
        requests = [engine.add([1, 2], scripts.sampled(seed, 200)) for seed in range(4)]
        verify, shown = engine.verifier.verify, []

        def record(turn: Any, draft: Any, *rest: Any) -> Any:
            shown.append((turn.rows.tolist(), draft.logits))
            return verify(turn, draft, *rest)

        engine.verifier.verify = record
        for step in range(12):
            engine.step()
            if step == 5:
                engine.cancel(requests[0])
                engine.cancel(requests[2])
        store = engine.lane.chain.logits
    assert [rows for rows, _ in shown][::11] == [[0, 1, 2, 3], [1, 3]]
    for _, logits in shown[1:]:
        assert logits.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()


def test_memory_is_flat() -> None:
    """What is alive after 60 rounds is alive after 180, and no more."""

    def alive() -> int:
        gc.collect()
        storages = {
            its.untyped_storage().data_ptr(): its.untyped_storage().nbytes()
            for its in gc.get_objects()
            if type(its) is torch.Tensor
        }
        return sum(storages.values())

    with scripts.engine(
        scripts.model(P), scripts.model(Q), k=2, branches=3, max_batch=2, max_tokens=256
    ) as engine:
        sizes = []
        for step in range(181):
            if step % 60 == 0:
                sizes.append(alive())
            while engine.scheduler.load()["running"] + engine.scheduler.load()["waiting"] < 3:
                engine.add([1, 2], SamplingParams(24, temperature=float(step % 2), seed=step))
            engine.step()
        assert engine.stats()["ended"]["length"] > 25
    assert max(sizes[1:]) - min(sizes[1:]) <= 4096, sizes
