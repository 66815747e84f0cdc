"""From what a user has (a path, a loaded model, a Model) to what the engine runs."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from saguaro_kernels.cache import fit_cache_size
from saguaro_kernels.errors import ConfigError

from .chains import vocab_map_of
from .config import EngineConfig
from .devices import check_loaded, check_pair, device_of_model, places
from .graphs import Graphs, draft_graphs, target_graphs
from .lanes import InlineLane, Lane, ProcessLane, StreamLane, StreamTimeline
from .metrics import Timeline
from .models import Model, as_model
from .models.flash import check_machine, page_size
from .ngram import NGRAM, NgramDrafter
from .speculator import Speculator
from .transfer import CPU, Seat


@dataclass
class Built:
    """A target ready to run.

    Attributes:
        source: the transformers model it wraps, or the user's Model itself.
        lane: name of the lane that its draft will run in.
        seat, timeline: where the target runs, and the spans of its work.
        graphs: CUDA graphs by model, "target" and "draft"; empty where nothing is captured.
    """

    model: Model
    source: Any
    tokenizer: Any
    stop_ids: frozenset[int]
    max_length: int
    lane: str
    seat: Seat = field(default_factory=lambda: Seat(CPU))
    timeline: Timeline = field(default_factory=lambda: Timeline("target"))
    graphs: dict[str, Graphs] = field(default_factory=dict)


def build_target(target: Any, config: EngineConfig, tokenizer: Any = None) -> Built:
    """Load and wrap the target; its tokenizer too where only a path is given."""
    by_path = isinstance(target, str | Path)
    _check_kind("target", target)
    device = places(config).target if by_path else device_of_model("target", target)
    check_loaded("device", config.device, device)
    if config.attention == "flash":
        check_machine(device)
    if by_path:
        from .models.gguf import folder_of
        from .models.loading import load_model, load_tokenizer

        path = folder_of(str(target))
        target = load_model(path, device=device)
        tokenizer = tokenizer or load_tokenizer(path)
    tokens = config.max_tokens + config.max_batch * page_size(config.attention)
    lane, graphs = lane_on(device, config), {}
    on_stream = device.type == "cuda" and lane == "stream"
    seat = Seat(device, own_stream=on_stream)
    with seat.working():  # what is made here is used, and freed, in the seat's order
        model = as_model(
            target,
            rows=config.max_batch,
            tokens=tokens,
            impl=config.impl,
            attention=config.attention,
        )
        timeline = timeline_on(device, "target")
        if on_stream and config.cuda_graphs:
            model = graphs["target"] = target_graphs(model, seat, config)
    stop_ids = stop_ids_of(target, tokenizer)
    return Built(model, target, tokenizer, stop_ids, model.max_length, lane, seat, timeline, graphs)


def fit_memory(
    draft: Any, target: Built, config: EngineConfig
) -> tuple[EngineConfig, dict[str, Any]]:
    """The configuration with as many branches as `memory_limit` holds, and what they take.

    Raises:
        ConfigError: it does not hold one.
    """
    if not config.fan_out:
        return config, {}
    vocab_size, dtype = target.model.vocab_size, getattr(draft, "dtype", target.model.dtype)
    if not isinstance(dtype, torch.dtype):
        dtype = target.model.dtype
    size = fit_cache_size(
        config.max_batch,
        config.branches,
        config.memory_limit,
        draft_len=config.k,
        vocab=vocab_size,
        logit_bytes=dtype.itemsize,
    )
    memory = {
        "branches": size.branches,
        "branches_asked": config.branches,
        "bytes": size.row_bytes + size.table_bytes,
        "limit": config.memory_limit,
    }
    return dataclasses.replace(config, branches=size.branches), memory


def settle_method(draft: Any, config: EngineConfig) -> EngineConfig:
    """The configuration with "ssd" replaced by "sd" for n-grams: they take no time to propose, so
    there is nothing to gain by drafting ahead."""
    if config.method == "ssd" and isinstance(draft, str) and draft == NGRAM:
        return dataclasses.replace(config, method="sd")
    return config


def build_lane(draft: Any, target: Built, config: EngineConfig) -> Lane | None:
    """Load the draft and put it where the configuration says; None for plain decoding.

    Raises:
        ConfigError: no draft, or one with another vocabulary.
    """
    if config.method == "ar":
        return None
    if draft is None:
        raise ConfigError(f"draft: got None, want a model for method={config.method!r}, or 'ar'")
    if isinstance(draft, str) and draft == NGRAM:
        with target.seat.working():
            drafter = NgramDrafter(
                rows=config.max_batch,
                draft_len=config.draft_len,
                impl=config.impl,
                device=target.model.device,
            )
        return InlineLane(drafter)
    if isinstance(draft, str | Path):
        from .models.gguf import folder_of
        from .models.loading import check_same_tokenizer, load_draft

        path = folder_of(str(draft))
        check_same_tokenizer(path, target.tokenizer)
        draft = load_draft(path, target.source, device=places(config, target.model.device).draft)
    _check_kind("draft", draft)
    device = device_of_model("draft", draft)
    check_loaded("draft_device", config.draft_device, device)
    check_pair(device, target.model.device, target.lane)
    draft_vocab, ids = _vocabulary(draft)
    if ids is not None and int(ids[-1]) >= target.model.vocab_size:
        raise ConfigError(
            f"draft: its vocabulary has id {int(ids[-1])}, the target has {target.model.vocab_size}"
        )
    if target.lane != "process":
        return _lane_here(draft, device, target, config)
    lane = ProcessLane(
        draft,
        vocab_size=min(draft_vocab, target.model.vocab_size),
        dtype=draft.dtype,
        rows=config.max_batch,
        tokens=_draft_slots(config),
        threads=config.draft_threads,
        timeout_s=config.draft_timeout_s,
        restarts=config.draft_restarts,
        speculator=_speculator_options(target, config),
    )
    if ids is not None:
        lane.chain.vocab_map = vocab_map_of(ids, target.model.vocab_size)
    lane.wait_ready()
    return lane


def _lane_here(draft: Any, device: torch.device, target: Built, config: EngineConfig) -> Lane:
    """A lane whose draft this process runs: inline, or on a CUDA stream of its own."""
    on_stream = target.lane == "stream"
    seat = Seat(device, own_stream=on_stream)
    with seat.working():
        model = as_model(
            draft,
            rows=config.max_batch,
            tokens=_draft_slots(config),
            impl=config.impl,
            attention=config.attention,
        )
        if on_stream and config.cuda_graphs:
            model = target.graphs["draft"] = draft_graphs(model, seat, config)
        speculator = Speculator(
            model,
            rows=config.max_batch,
            timeline=timeline_on(device, "draft"),
            **_speculator_options(target, config),
        )
    if not on_stream:
        return InlineLane(speculator)
    lane = StreamLane(speculator, seat, target.seat)
    lane.warm_up()
    return lane


def _speculator_options(target: Built, config: EngineConfig) -> dict[str, Any]:
    return {
        "draft_len": config.draft_len,
        "branches": config.fan_out,
        "rule": config.rule,
        "allocation": config.allocation,
        "impl": config.impl,
        "target_vocab": target.model.vocab_size,
    }


def _draft_slots(config: EngineConfig) -> int:
    """Key-value slots of a draft: the texts, and per row a chain, all branches and a part page."""
    scratch = (config.draft_len + 1) * (config.fan_out + 1)
    return config.max_tokens + config.max_batch * (page_size(config.attention) + scratch)


def choose_lane(config: EngineConfig) -> str:
    """The lane of a draft on the CPU; "auto" is a process where there is a core for it."""
    if config.lane != "auto":
        return config.lane
    return "process" if (os.cpu_count() or 1) > 1 else "inline"


_threads_before: weakref.WeakKeyDictionary[Callable[[], None], int] = weakref.WeakKeyDictionary()
"""CPU threads before each open engine that changed them, oldest first."""


def share_cores(config: EngineConfig, lane: Lane | None) -> Callable[[], None]:
    """Set this process's CPU threads; returns the call that sets them back."""

    def restore() -> None:
        engines = list(_threads_before)
        if restore not in engines:
            return
        later, before = engines[engines.index(restore) + 1 :], _threads_before.pop(restore)
        if later:  # the next engine was made since, and sets back what this one found
            _threads_before[later[0]] = before
        else:
            torch.set_num_threads(before)

    threads = config.threads
    if threads is None and isinstance(lane, ProcessLane):
        threads = max(1, (os.cpu_count() or 1) - config.draft_threads)
    if threads is not None:
        _threads_before[restore] = torch.get_num_threads()
        torch.set_num_threads(threads)
    return restore


def timeline_on(device: torch.device, lane: str) -> Timeline:
    """A timeline by the clock of the device."""
    return Timeline(lane) if device.type == "cpu" else StreamTimeline(lane, device)


def lane_on(device: torch.device, config: EngineConfig) -> str:
    """The lane for a target on `device`."""
    if device.type == "cpu":
        return choose_lane(config)
    return "stream" if config.lane == "auto" else config.lane


def _check_kind(name: str, model: Any) -> None:
    """Raise ConfigError for what is neither a path nor a model."""
    if not isinstance(model, str | Path) and not hasattr(model, "device"):
        raise ConfigError(
            f"{name}: got {type(model).__name__}, want a folder, a loaded transformers model or a "
            "Model"
        )


def _vocabulary(draft: Any) -> tuple[int, torch.Tensor | None]:
    """How many ids a draft has logits for, and which, if they are not the target's first ones."""
    if not hasattr(draft, "get_output_embeddings"):
        return draft.vocab_size, getattr(draft, "vocab_ids", None)
    from .models.draft import DRAFT_VOCAB, head_of

    return head_of(draft).weight.shape[0], getattr(draft, DRAFT_VOCAB, None)


def stop_ids_of(target: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, else the config's, else the tokenizer's."""
    for owner in (
        getattr(target, "generation_config", None),
        getattr(target, "config", None),
        tokenizer,
    ):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
