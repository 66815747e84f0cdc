"""Forwards of fixed shapes as CUDA graphs: one launch each instead of hundreds.

    bucket    rows rounded up to a power of two or the engine's bound; tokens per row
    warm-up   one graph for every bucket, all of a side in one pool of memory and on its stream
    call      copy the inputs to where the graph reads them, replay, hand out what it wrote

Rows, lengths and the tree's step are read on the device, and page tables by row. A batch is padded
to its bucket with the model's spare row, whose keys go to a page that no request holds and whose
outputs are cut off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from saguaro_kernels.errors import UnsupportedError

from . import transfer
from .config import EngineConfig
from .models.protocol import Model
from .transfer import Seat


class Graphs:
    """A `Model` in front of another, whose forwards it replays after `warm_up` has captured them.

    What was not captured runs eagerly: prompts, other shapes, and every forward of a model that
    cannot be captured. Logits are valid until the next forward.

    Args:
        seat: whose stream the graphs are captured and replayed on.
        role: the model's name in messages.
        rows: the largest batch.
        widths: tokens per row of `extend` that are captured.
        trees: (draft_len, branches) of `decode_tree` that are captured, all steps in one graph.
    """

    def __init__(
        self,
        model: Model,
        seat: Seat,
        role: str,
        *,
        rows: int,
        widths: Iterable[int],
        trees: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.model, self.seat, self.role, self.rows = model, seat, role, rows
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.device, self.dtype = model.device, model.dtype
        self.vocab_ids: torch.Tensor | None = getattr(model, "vocab_ids", None)
        self.allocate, self.release = model.allocate, model.release
        self.prefill, self.promote = model.prefill, model.promote
        batches = {min(1 << bits, rows) for bits in range(rows.bit_length() + 1)}
        shapes: list[tuple[int, int | None]] = [(width, None) for width in set(widths)]
        shapes += [(branches, draft_len) for draft_len, branches in set(trees)]
        self._buckets = [(batch, *shape) for batch in batches for shape in shapes]
        longest = max((draft_len for draft_len, _ in trees), default=0)
        self._steps = torch.arange(longest + 1, dtype=torch.int32, device=self.device)
        self._graphs: dict[tuple[int, int, int | None], _Graph] = {}
        self._why: str | None = None
        self._replayed = self._eager = 0

    def warm_up(self) -> None:
        """Capture every bucket, in the seat. If the model cannot be captured, warn, and run it
        eagerly."""
        name = type(getattr(self.model, "model", self.model)).__name__
        try:
            pool = transfer.backend.graph_pool()
            # The largest first: the others then reuse its temporary memory.
            for bucket in sorted(self._buckets, key=lambda bucket: -bucket[0] * bucket[1]):
                self._graphs[bucket] = self._capture(*bucket, pool)
        except Exception as error:
            self._graphs.clear()
            self._why = f"{name}: {error}".partition("\n")[0]
            warnings.warn(f"no CUDA graphs for the {self.role}, {self._why}", stacklevel=2)

    def extend(
        self, rows: torch.Tensor, tokens: torch.Tensor, trunk_len: torch.Tensor
    ) -> torch.Tensor:
        graph = self._find(len(rows), tokens.shape[1], None)
        return (graph or self.model.extend)(rows, tokens, trunk_len)

    def decode_tree(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        trunk_len: torch.Tensor,
        depth: torch.Tensor,
        draft_len: int,
        step: int,
    ) -> torch.Tensor:
        graph = self._find(len(rows), tokens.shape[1], draft_len)
        if graph is None:
            return self.model.decode_tree(rows, tokens, trunk_len, depth, draft_len, step)
        return graph(rows, tokens, trunk_len, depth, self._steps[step : step + 1])

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def report(self) -> dict[str, Any]:
        """Counts of graphs, of forwards replayed and of forwards run eagerly; if there are no
        graphs, why."""
        counts = {"replayed": self._replayed, "eager": self._eager}
        return {"captured": self.captured, **counts, "why": self._why}

    def _find(self, count: int, width: int, draft_len: int | None) -> _Graph | None:
        batch = min(1 << (count - 1).bit_length(), self.rows)
        graph = self._graphs.get((batch, width, draft_len))
        self._replayed += graph is not None
        self._eager += graph is None
        return graph

    def _capture(self, batch: int, width: int, draft_len: int | None, pool: Any) -> _Graph:
        spare: int | None = getattr(self.model, "spare_row", None)
        if spare is None:
            raise UnsupportedError("it has no spare row to fill a batch up with")
        idle = [((batch,), spare, torch.int64), ((batch, width), 0, torch.int64)]
        idle += [((batch,), 0, torch.int32)]
        forward: Callable[..., torch.Tensor] = self.model.extend
        if draft_len is not None:
            idle += [((batch, width), -1, torch.int32), ((1,), 0, torch.int32)]

            def forward(rows: Any, tokens: Any, trunk_len: Any, depth: Any, step: Any) -> Any:
                return self.model.decode_tree(rows, tokens, trunk_len, depth, draft_len, step)

        inputs = [
            torch.full(shape, value, dtype=dtype, device=self.device)
            for shape, value, dtype in idle
        ]
        return _Graph(forward, inputs, [value for _, value, _ in idle], pool, self.seat)


def target_graphs(model: Model, seat: Seat, config: EngineConfig) -> Graphs:
    """Verifications of a whole chain and of none; where the policy chooses k, of any."""
    chosen = config.policy == "auto" and not config.reproducible
    widths = {1, *range(2 if chosen else config.draft_len + 1, config.draft_len + 2)}
    return Graphs(model, seat, "target", rows=config.max_batch, widths=widths)


def draft_graphs(model: Model, seat: Seat, config: EngineConfig) -> Graphs:
    """Single tokens, whole chains, and steps of the tree as it is configured."""
    trees = [(config.k, config.fan_out)] if config.fan_out else []
    widths = {1, config.k + 1}
    return Graphs(model, seat, "draft", rows=config.max_batch, widths=widths, trees=trees)


class _Graph:
    """A captured forward, where it reads and where it writes.

    inputs: the forward's arguments, batch first. idle: the value of each in padding rows.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        idle: list[int],
        pool: Any,
        seat: Seat,
    ) -> None:
        self.inputs, self.idle, self._used = inputs, idle, 0
        # Run it once before: compilation and first allocations must not be captured. A forward
        # that makes the host wait fails here, as a failed capture leaves the stream unusable.
        with transfer.backend.never_waiting():
            forward(*inputs)
        self._graph, self.output = transfer.backend.capture(
            lambda: forward(*inputs), pool, seat.stream
        )

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        count = len(values[0])
        for buffer, value, idle in zip(self.inputs, values, self.idle, strict=True):
            buffer[:count].copy_(value)
            if count < self._used:
                buffer[count:].fill_(idle)
        self._used = count
        transfer.backend.replay(self._graph)
        output: torch.Tensor = self.output[:count]
        return output
