"""The numbers of an engine in Prometheus' text format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from .counts import Counts, Histogram, Served
from .timeline import SpanLog

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus_text(
    counts: Counts, served: Served, log: SpanLog, gauges: Mapping[str, tuple[str, float]]
) -> str:
    """Counters from the engine's beginning or its last reset; `gauges`: name -> (help, value)."""
    page = _Page()
    page.add(
        "rounds_total", "Rounds of rows, by where their chain came from.",
        _by("source", counts.rounds_after),
    )  # fmt: skip
    page.add("tokens_total", "Tokens delivered.", [("", counts.tokens)])
    page.add("drafted_total", "Tokens drafted for a verification.", [("", counts.drafted)])
    page.add("accepted_total", "Drafted tokens that were kept.", [("", counts.accepted)])
    page.add(
        "hits_total", "Outcomes that were prepared, by accepted length.",
        _by("accepted", counts.hits_by_length),
    )  # fmt: skip
    page.add(
        "misses_total", "Outcomes that were not prepared, by accepted length.",
        _by("accepted", counts.misses_by_length),
    )  # fmt: skip
    lengths = Histogram(range(max(counts.accepted_lengths, default=0) + 1))
    for length, count in counts.accepted_lengths.items():
        lengths.add(length, count)
    page.add_histogram("accepted_length", "Drafts kept per round.", lengths)
    page.add("requests_total", "Requests that ended, by reason.", _by("reason", served.reasons))
    page.add("prompt_tokens_total", "Tokens of their prompts.", [("", served.prompt_tokens)])
    page.add_histogram(
        "first_token_seconds", "From adding a request to its first token.", served.first_token_s
    )
    page.add_histogram("request_seconds", "From adding a request to its end.", served.seconds)
    work = [(_labels(lane=lane, name=name), total) for (lane, name), total in log.totals.items()
            if not lane.startswith("row ")]  # fmt: skip
    page.add("work_total", "Pieces of work, by lane and name.",
             [(labels, count) for labels, (count, _) in work])  # fmt: skip
    page.add("work_seconds_total", "Time of this work.",
             [(labels, seconds) for labels, (_, seconds) in work])  # fmt: skip
    for name, (text, value) in gauges.items():
        page.add(name, text, [("", value)], kind="gauge")
    return page.text()


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(
        self, name: str, text: str, samples: Iterable[tuple[str, float]], kind: str = "counter"
    ) -> None:
        self._lines += [f"# HELP saguaro_{name} {text}", f"# TYPE saguaro_{name} {kind}"]
        self._lines += [f"saguaro_{name}{labels} {value:.12g}" for labels, value in samples]

    def add_histogram(self, name: str, text: str, histogram: Histogram) -> None:
        bounds = [f"{bound:g}" for bound in histogram.bounds] + ["+Inf"]
        upto = list(itertools.accumulate(histogram.counts))
        samples = [
            (f'_bucket{{le="{bound}"}}', count) for bound, count in zip(bounds, upto, strict=True)
        ]
        self.add(
            name, text, [*samples, ("_sum", histogram.total), ("_count", upto[-1])], "histogram"
        )

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _by(label: str, table: Mapping[Any, float]) -> list[tuple[str, float]]:
    return [(_labels(**{label: str(key)}), value) for key, value in sorted(table.items())]


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
