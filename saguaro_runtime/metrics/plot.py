"""A picture of a timeline: lanes over time, work by colour, rounds by hit and miss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from saguaro_kernels.errors import ConfigError, UnsupportedError

from .timeline import Span, trace_events

_COLOURS = {
    "hit": "#2e9e4f", "miss": "#d1495b", "late": "#7a1f2b", "first": "#bbbbbb", "asked": "#8fb8de",
    "verify": "#edae49", "look_ahead": "#d5e3ee", "prefill": "#9a7fd1", "draft_step": "#003d5b",
    "promote": "#00798c", "feed_last": "#4f9da6", "target_forward": "#f6d9a0",
    "tree_step": "#30638e", "predict": "#66a182", "sample": "#79a3c4",
}  # fmt: skip
"""By name of span; what is part of something else comes after it, and is drawn over it."""
_HEIGHTS = {"target_forward": 0.5, "tree_step": 0.5, "predict": 0.5, "sample": 0.25}


def plot_timeline(spans: Iterable[Span], path: str | Path, *, seconds: float | None = None) -> None:
    """Write a PNG (or what the suffix says) of the last `seconds`; default: of all spans.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    _require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = sorted(spans)
    end = max((span.end for span in shown), default=0.0)
    start = min((span.start for span in shown), default=0.0)
    if seconds is not None:
        start = max(start, end - seconds)
        shown = [span for span in shown if span.end > start]
    lanes = sorted({span.lane for span in shown}, key=lambda lane: (lane.startswith("row "), lane))
    figure = Figure(figsize=(14, 1.2 + 0.6 * max(len(lanes), 1)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for height, lane in enumerate(lanes):
        for name in dict.fromkeys([*_COLOURS, *(span.name for span in shown)]):
            axes.broken_barh(
                [(span.start - start, span.end - span.start) for span in shown
                 if (span.lane, span.name) == (lane, name)],
                (height - 0.4, _HEIGHTS.get(name, 0.8)),
                facecolors=_COLOURS.get(name, "#999999"), edgecolors="white", linewidth=0.3,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, max(end - start, 1e-9))
    axes.set_xlabel("seconds")
    names = [name for name in _COLOURS if any(span.name == name for span in shown)]
    axes.legend(
        handles=[Patch(color=_COLOURS[name], label=name) for name in names],
        loc="upper center", bbox_to_anchor=(0.5, -0.35), ncol=8, fontsize="small", frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150, bbox_inches="tight")


def check_pictures(*, timeline: str | None, plot: str | None) -> None:
    """Raise before any work if these files could not be written after it.

    Raises:
        ConfigError: their folder does not exist, they are folders, or their suffix names no
            picture. UnsupportedError: matplotlib is not installed.
    """
    for name, path in (("timeline", timeline), ("plot", plot)):
        if path and not Path(path).parent.is_dir():
            raise ConfigError(f"{name}: there is no folder {str(Path(path).parent)!r}")
        if path and Path(path).is_dir():
            raise ConfigError(f"{name}: {path!r} is a folder, want a file")
    if plot:
        _require_matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if (suffix := Path(plot).suffix[1:].lower()) and suffix not in kinds:
            raise ConfigError(f"plot: got {plot!r}, want a suffix of {', '.join(sorted(kinds))}")


def write_pictures(spans: Iterable[Span], *, timeline: str | None, plot: str | None) -> None:
    """`timeline`: JSON for chrome://tracing or Perfetto; `plot`: a picture."""
    spans = list(spans)
    if timeline:
        Path(timeline).write_text(trace_events(spans))
    if plot:
        plot_timeline(spans, plot)


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            'plot: matplotlib is missing; run: pip install "saguaro-ssd[bench]"'
        ) from error
