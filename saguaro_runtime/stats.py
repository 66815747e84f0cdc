"""What an engine has done so far, from the counts of its scheduler and the spans of its lanes."""

from __future__ import annotations

from typing import Any

from .lanes import Lane
from .metrics import Counts, Served, Span, SpanLog, Timeline, overlap, pause
from .metrics.prometheus import prometheus_text
from .scheduler import Scheduler


class Stats:
    """The numbers of one engine. busy_s: time spent in rounds; memory: what branches take."""

    def __init__(self, scheduler: Scheduler, lane: Lane | None, timeline: Timeline) -> None:
        self.scheduler, self.lane, self.timeline = scheduler, lane, timeline
        self.log, self.busy_s = SpanLog(), 0.0
        self.memory: dict[str, Any] = {}
        self._graphs = scheduler.built.graphs

    def collect(self, *, wait: bool = True) -> list[Span]:
        """Take the spans of all lanes since the last call; with wait=False, those available."""
        spans = self.timeline.drain() + (self.lane.spans(wait=wait) if self.lane else [])
        self.log.extend(spans)
        return spans

    def reset(self) -> None:
        """Forget counts and times so far; running requests keep theirs."""
        self.collect()
        self.log, self.busy_s = SpanLog(), 0.0
        self.scheduler.counts, self.scheduler.served = Counts(), Served()

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        self.collect()
        counts, mean_ms = self.scheduler.counts, self.log.mean_ms
        between = pause(self.log.spans)
        times = {
            "tokens_per_s": counts.tokens / self.busy_s if self.busy_s else 0.0,
            "seconds": self.busy_s,
            "overlap": overlap(self.log.spans, "look_ahead", "verify"),
            "t_verify_ms": mean_ms("verify"),
            "t_draft_step_ms": mean_ms("tree_step") or mean_ms("draft_step"),
            "t_redraft_step_ms": mean_ms("draft_step"),
            "t_look_ahead_ms": mean_ms("look_ahead"),
            "t_sample_ms": mean_ms("sample"),
            "t_promote_ms": mean_ms("promote"),
            "t_overrun_ms": 1e3 * between.overrun,
            "t_host_ms": 1e3 * between.host,
            "prefill_s": self.log.seconds("target", "prefill"),
            "verifications": self.log.count("target", "verify"),
        }
        state = {
            "ended": dict(self.scheduler.served.reasons),
            "speculation": "off" if self.lane is None else self.lane.status,
            "draft_faults": [] if self.lane is None else list(self.lane.faults),
            "policy": self.scheduler.policy.report(),
            "memory": self.memory,
            "cuda_graphs": {name: graphs.report() for name, graphs in self._graphs.items()},
        }
        return counts.summary() | times | self.scheduler.load() | state

    def prometheus(self) -> str:
        """In Prometheus' text format."""
        self.collect()
        lane, load = self.lane, self.scheduler.load()
        on = lane is not None and lane.status == "on"
        gauges: dict[str, tuple[str, float]] = {
            "running": ("Requests that decode.", load["running"]),
            "waiting": ("Requests that wait for a row or for slots.", load["waiting"]),
            "slots": ("Key-value slots of all requests.", load["slots"]),
            "slots_used": ("Those given to requests.", load["slots_used"]),
            "speculation": ("1 where a draft is at work.", on),
            "draft_faults": ("Failures of the draft so far.", len(lane.faults) if lane else 0),
            "cuda_graphs": (
                "Forwards captured.",
                sum(graphs.captured for graphs in self._graphs.values()),
            ),
            "busy_seconds": ("Time spent in rounds.", self.busy_s),
        }
        return prometheus_text(self.scheduler.counts, self.scheduler.served, self.log, gauges)
