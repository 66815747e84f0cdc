"""Saguaro's C: what acceptance pays for hits. `python -m bench downweight`

The draft's F likeliest ids are sampled C times as often and renormalised (arXiv 2603.03251,
Definition 14): fewer drafts are kept, and the token that replaces a refused one is more often among
the prepared outcomes. Counted, not timed: an engine on a pair of scripted models at T = 1 with the
token rule, ranking outcomes by probability, as the paper does, and with the noise that will be
drawn, which finds the token without a cost in acceptance.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import files, report
from .scripted_pairs import sampled_laws
from .scripted_race import Delays, run

FACTORS = (1.0, 0.9, 0.75, 0.6, 0.45, 0.3)
RANKINGS = ("probability", "noise")
K, BRANCHES, BATCH = 4, 15, 16


@dataclass(frozen=True)
class Row:
    """One C under one ranking: shares of the drafts that were judged, and of rounds."""

    ranking: str
    factor: float
    acceptance: float
    hit_rate: float
    tokens_per_round: float
    rounds: int


def count(factor: float, ranking: str, rounds: int) -> Row:
    """`rounds` rounds of 16 requests."""
    ran = run(
        sampled_laws(), Delays(0.0, 0.0, 0.0), rounds, temperature=1.0, batch=BATCH,
        lane="inline", method="ssd", k=K, branches=BRANCHES, rule="token", allocation="uniform",
        ranking=ranking, downweight=factor, reproducible=True,
    )  # fmt: skip
    stats = ran.stats
    return Row(ranking, factor, acceptance(stats["accepted_lengths"], K), stats["hit_rate"],
               stats["tokens_per_round"], stats["rounds"])  # fmt: skip


def acceptance(lengths: dict[int, int], k: int) -> float:
    """Of the drafts that were judged, the share that was kept: all before a refusal, not after."""
    kept = sum(length * times for length, times in lengths.items())
    refused = sum(times for length, times in lengths.items() if length < k)
    return kept / max(kept + refused, 1)


def measure(rounds: int, factors: Sequence[float]) -> Iterator[Row]:
    """Every C under both rankings."""
    for ranking in RANKINGS:
        for factor in factors:
            yield count(factor, ranking, rounds)


def render(rows: Sequence[Row]) -> str:
    """The table."""
    headers = ("ranking", "C", "rounds", "acceptance", "hit rate", "tokens/round")
    lines = [
        (r.ranking, r.factor, r.rounds, r.acceptance, r.hit_rate, r.tokens_per_round) for r in rows
    ]
    verdict = (
        "less is accepted and more hits" if pays(rows) else "FAILED: want less accepted, more hits"
    )
    return (
        f"{report.table(headers, lines)}\n"
        "Counted over these rounds: drafts kept of those judged; outcomes that were prepared.\n"
        f"Ranked by probability, at the least C beside C = 1: {verdict}"
    )


def pays(rows: Sequence[Row]) -> bool:
    """The least C costs acceptance and finds more outcomes, ranked by probability."""
    blind = [row for row in rows if row.ranking == "probability"]
    least, most = min(blind, key=_factor), max(blind, key=_factor)
    return least.acceptance < most.acceptance and least.hit_rate > most.hit_rate


def main(arguments: Sequence[str]) -> int:
    """Print the table; 0, or 1 if a C < 1 neither costs acceptance nor finds more outcomes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench downweight", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="C = 1 and .45 only, fewer rounds")
    parser.add_argument("--rounds", type=int, default=80, help="of 16 requests (%(default)s)")
    parser.add_argument("--json", type=files.output, metavar="FILE")
    options = parser.parse_args(arguments)
    factors = (1.0, 0.45) if options.quick else FACTORS
    rows = list(measure(options.rounds // (4 if options.quick else 1), factors))
    print(render(rows))
    if options.json:
        settings: dict[str, Any] = {"k": K, "branches": BRANCHES, "rule": "token", "T": 1.0}
        data = {"machine": report.machine(), "settings": settings,
                "rows": [asdict(row) for row in rows]}  # fmt: skip
        files.write_json(options.json, data)
    return int(not pays(rows))


def _factor(row: Row) -> float:
    return row.factor
