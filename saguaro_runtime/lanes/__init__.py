"""Lanes: where the draft runs and how its work is ordered against the target's."""

from .base import Lane
from .inline import InlineLane
from .process import ProcessLane
from .stream import StreamLane, StreamTimeline

__all__ = ["InlineLane", "Lane", "ProcessLane", "StreamLane", "StreamTimeline"]
