"""The steady round: buffers stay where they are, rows of logits are not copied, memory is flat."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import scripts
import torch

from saguaro_kernels._call import IMPLEMENTATIONS
from saguaro_runtime import Engine, SamplingParams

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
        if tensor.numel() >= V and "_turn" not in path
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
