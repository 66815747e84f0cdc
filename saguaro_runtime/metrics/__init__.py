"""What the rounds did, on which side, and how much of it overlapped."""

from .counts import Counts, Histogram, Served, Source, Times
from .timeline import (
    KEPT_SPANS,
    Pause,
    Span,
    SpanLog,
    Timeline,
    overlap,
    pause,
    trace_events,
)

__all__ = [
    "KEPT_SPANS",
    "Counts",
    "Histogram",
    "Pause",
    "Served",
    "Source",
    "Span",
    "SpanLog",
    "Timeline",
    "Times",
    "overlap",
    "pause",
    "trace_events",
]
