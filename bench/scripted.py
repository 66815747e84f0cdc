"""The engine on models whose times and laws are known: `python -m bench scripted`.

    paper    delays, K, fan-out, acceptance, hit rate as published: SSD over SD beside the paper's
    ranking  what it gains to rank outcomes with the noise that will be drawn (T = 1, one request)
    waiting  what it gains, with 8 requests, that a missed row goes on undrafted and nobody waits

Models sleep for the time that they stand for, in two processes, so that this measures the engine:
its order of work, its overlap and what it adds of its own. Beside each ratio stands what theory
makes of the same run's hit rates. Exit code: 1 if a ratio is not where it should be.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saguaro_runtime.planner import acceptance_for, fast_rate, published, ssd_vs_sd, theorem7

from . import files, report
from .scripted_pairs import greedy_laws, places_for, sampled_laws
from .scripted_race import TURN, WARM_UP, Ran, calibrated, race

WITHIN = 0.10
"""Of the paper's ratio, and of Theorem 7's."""
POINTS = 0.05
"""Gains of a policy against the predicted ones."""
NOISE_GAINS = {1.0: 0.16, 0.6: 0.04}
"""Gain of the noise ranking by temperature: means over simulated loops of many synthetic pairs, of
acceptances from .70 to .85 (at T = 1 the single pairs gain 7 to 33 %)."""
WAITING_COSTS = (0.10, 0.38)
"""What waiting for redrafts loses of what going on yields, batch 4 to 32, in the same loops."""
RANKED_ROUNDS = 120
"""Fewer are too few to tell hit rates apart."""
K, BRANCHES, STEP = 5, 16, 0.15
"""Of ranking and waiting; a step takes .15 T_V: K of them .75, and all K + 1 fit in T_V."""
BATCH = 8


@dataclass(frozen=True)
class Row:
    """One ratio: measured, predicted from the same run, and expected: as published, or as simulated
    over many pairs; and whether it is where it should be."""

    case: str
    ratio: str
    measured: float
    predicted: float
    expected: float | None
    hit_rates: tuple[float, ...]
    tokens_per_round: float
    ok: bool


def paper(pair: published.Published, verify_s: float, count: int) -> tuple[list[Row], list[Any]]:
    """SSD over SD, and over AR, in the pair's proportions; and the last rounds' spans."""
    unit, step = 1.0 / pair.ar, pair.draft_round_seconds / (pair.k + 1)
    tokens = pair.sd * (unit + pair.k * step)
    rounds = WARM_UP + count + -(-count // TURN)
    length = int((rounds + 2) * tokens) + 2 * pair.k
    places, _ = places_for(tokens, published.HIT_RATE, pair.k, length)
    laws = greedy_laws(places + ["agree"] * (900 - length))
    options: dict[str, Any] = {
        "k": pair.k, "branches": pair.fan_out * (pair.k + 1), "allocation": "uniform",
        "ranking": "probability", "rule": "token", "reproducible": True,
    }  # fmt: skip
    delays = calibrated(laws, verify_s, verify_s * step / unit, **options)
    methods = {name: {"method": name} for name in ("ar", "sd", "ssd")}
    ar, sd, ssd = race(laws, delays, count, methods, **options).values()
    after = ssd.stats["tokens_per_round_after"]
    gain = ssd_vs_sd(
        verify_seconds=ssd.stats["t_verify_ms"] / 1e3,
        draft_seconds=pair.k * sd.stats["t_redraft_step_ms"] / 1e3,
        tree_round_seconds=ssd.stats["t_look_ahead_ms"] / 1e3,
        redraft_seconds=pair.k * sd.stats["t_redraft_step_ms"] / 1e3,
        hit_rate=ssd.stats["hit_rate"],
        tokens_sd=sd.stats["tokens_per_round"],
        tokens_hit=after.get("hit", 1.0),
        tokens_miss=after.get("miss", 1.0),
    )
    sd_gain = sd.tokens_per_s / ar.tokens_per_s
    # The log's drafter round of the second pair is longer than the round that its published rate
    # leaves room for, so that no engine reaches that rate with these inputs: see published.py.
    reachable = pair.draft_round_seconds < tokens / pair.ssd

    def row(name: str, measured: float, predicted: float, wanted: float, held: bool) -> Row:
        ok = abs(measured / predicted - 1) <= WITHIN
        ok &= not held or abs(measured / wanted - 1) <= WITHIN
        rates = (ssd.stats["hit_rate"],)
        return Row(pair.name, name, measured, predicted, wanted, rates,
                   ssd.stats["tokens_per_round"], ok)  # fmt: skip

    measured = ssd.tokens_per_s / sd.tokens_per_s
    return [
        row("SSD / SD", measured, gain, pair.ssd / pair.sd, reachable),
        row("SSD / AR", measured * sd_gain, gain * sd_gain, pair.ssd / pair.ar, False),
    ], ssd.spans


def ranking(verify_s: float, count: int, temperature: float) -> Row:
    """The noise ranking over the ranking by probability, a miss being redrafted in full."""
    laws = sampled_laws()
    options: dict[str, Any] = {
        "k": K, "branches": BRANCHES, "rule": "block", "reproducible": True,
        "temperature": temperature,
    }  # fmt: skip
    delays = calibrated(laws, verify_s, STEP * verify_s, **options)
    rankings = {name: {"ranking": name} for name in ("probability", "noise")}
    blind, knowing = race(laws, delays, count, rankings, method="ssd", **options).values()

    def speed(ran: Ran) -> float:
        verify, ahead, redraft = _times(ran)
        tokens = ran.stats["tokens_per_round"]
        return theorem7(ran.stats["hit_rate"], tokens, tokens, ahead / verify, redraft / verify) / (
            verify
        )

    measured, predicted = knowing.tokens_per_s / blind.tokens_per_s, speed(knowing) / speed(blind)
    expected = 1.0 + NOISE_GAINS[temperature]
    rates = (blind.stats["hit_rate"], knowing.stats["hit_rate"])
    return Row("ranking", f"noise / probability, T = {temperature:g}", measured, predicted,
               expected, rates, knowing.stats["tokens_per_round"],
               max(abs(measured - predicted), abs(measured - expected)) <= POINTS)  # fmt: skip


def waiting(verify_s: float, count: int) -> Row:
    """8 requests: a missed row goes on undrafted, over all of them waiting for its redraft."""
    laws = sampled_laws()
    options: dict[str, Any] = {
        "k": K, "branches": BRANCHES, "rule": "block", "ranking": "noise", "temperature": 1.0,
        "batch": BATCH, "proposal": "none",
    }  # fmt: skip
    delays = calibrated(laws, verify_s, STEP * verify_s, **options)
    fallbacks = {name: {"fallback": name} for name in ("batched_retry", "partial_accept")}
    wait, fast = race(laws, delays, count, fallbacks, method="ssd", **options).values()
    p, p_fast = _hit_rates(fast)
    tokens_hit = fast.stats["tokens_per_round_after"]["hit"]
    verify, ahead, redraft = _times(wait)
    # A round lasts as long as the slower side; where any of the rows misses, all wait on top.
    wait_s = max(verify, ahead) + (1.0 - wait.stats["hit_rate"] ** BATCH) * redraft
    going_on = fast_rate(p, p_fast, tokens_hit, 1.0) / max(_times(fast)[:2])
    predicted = going_on / (wait.stats["tokens_per_round"] / wait_s)
    measured = fast.tokens_per_s / wait.tokens_per_s
    low, high = WAITING_COSTS
    ok = abs(measured - predicted) <= POINTS * predicted
    ok &= low - POINTS <= 1 - 1 / measured <= high + POINTS
    return Row("waiting", f"K = 0 on a miss / redraft, batch {BATCH}", measured, predicted, None,
               (wait.stats["hit_rate"], p, p_fast), fast.stats["tokens_per_round"], ok)  # fmt: skip


def _times(ran: Ran) -> tuple[float, float, float]:
    """Seconds of a verification, of drafting ahead, and of redrafting all K."""
    verify, ahead, step = (
        ran.stats[f"t_{name}_ms"] / 1e3 for name in ("verify", "look_ahead", "redraft_step")
    )
    return verify, ahead, K * step


def _hit_rates(ran: Ran) -> tuple[float, float]:
    """How often a round hits whose predecessor was drafted, and whose was not."""
    pairs = [its for rounds in ran.rounds for its in zip(rounds, rounds[1:], strict=False)]
    rates = []
    for drafted in (True, False):
        after = [now.source == "hit" for before, now in pairs if (before.drafted > 0) == drafted]
        rates.append(sum(after) / max(len(after), 1))
    return rates[0], rates[1]


def render(rows: Sequence[Row]) -> str:
    """The table, and what to hold it against."""
    headers = ("case", "ratio", "within", "measured", "predicted", "expected", "hit rates",
               "tokens/round")  # fmt: skip
    lines = [
        (row.case, row.ratio, row.ok, row.measured, row.predicted, row.expected)
        + (", ".join(f"{rate:.2f}" for rate in row.hit_rates), row.tokens_per_round)
        for row in rows
    ]
    notes = [
        "measured: here, on models that sleep as long as theirs take. ratio: of tokens/s.",
        "predicted: Theorem 7, and for waiting the two-state chain of misses, from the same run's "
        "times and hit rates.",
        "expected: the published ratio; for ranking, the mean of simulations over many pairs.",
        f"within: {WITHIN:.0%} of predicted, and SSD / SD of the paper's; policies "
        f"{100 * POINTS:.0f} points of both; waiting must cost {WAITING_COSTS[0]:.0%} to "
        f"{WAITING_COSTS[1]:.0%}, plus or minus these.",
    ]
    notes += [f"FAILED {row.case}, {row.ratio}: not within" for row in rows if not row.ok]
    for pair in published.PAIRS:
        if pair.draft_round_seconds >= _tokens(pair) / pair.ssd:
            notes.append(
                f"{pair.name}: the published rate leaves {1e3 * _tokens(pair) / pair.ssd:.1f} ms a "
                f"round, the drafter's alone takes {1e3 * pair.draft_round_seconds:.1f} ms in the "
                "authors' log; so it is held to the prediction only."
            )
    return "\n".join([report.table(headers, lines), *notes, "", stood_for()])


def stood_for() -> str:
    """What the pairs of the paper are made of, and where each figure comes from."""
    headers = ("pair", "T_V ms", "T_D ms", "K", "fan-out", "tokens/round", "acceptance", "hit rate")
    rows = [
        (its.name, f"{1e3 / its.ar:.2f}", f"{1e3 * its.draft_round_seconds / (its.k + 1):.2f}",
         its.k, its.fan_out, _tokens(its), acceptance_for(_tokens(its), its.k), published.HIT_RATE)
        for its in published.PAIRS
    ]  # fmt: skip
    notes = [
        f"T_V: one over the AR rate of {published.PAPER}. T_D: the drafter's round over K + 1.",
        f"The drafter's round, K and fan-out: {published.LOG}.",
        "tokens/round: the paper's SD rate times (T_V + K T_D). acceptance: what gives them.",
        "hit rate: 'up to 90 %' in the paper, taken as reached.",
    ]
    return "\n".join([report.table(headers, rows), *notes])


def _tokens(pair: published.Published) -> float:
    """Tokens per round, from the published SD rate."""
    step = pair.draft_round_seconds / (pair.k + 1)
    return pair.sd * (1.0 / pair.ar + pair.k * step)


def measure(verify_s: float, count: int, *, quick: bool = False) -> tuple[list[Row], list[Any]]:
    """All rows, and the spans of the first pair's rounds."""
    rows, spans = paper(published.PAIRS[0], verify_s, count)
    rows += paper(published.PAIRS[1], verify_s, count)[0]
    rows += [ranking(verify_s, RANKED_ROUNDS, T) for T in ((1.0,) if quick else NOISE_GAINS)]
    rows.append(waiting(verify_s, count))
    return rows, spans


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    result = argparse.ArgumentParser(
        prog="python -m bench scripted", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    result.add_argument("--quick", action="store_true", help="half the rounds: a minute")
    result.add_argument("--rounds", type=int, default=60, help="per run (%(default)s)")
    result.add_argument("--verify-ms", type=float, default=80.0, help="T_V (%(default)s)")
    result.add_argument("--json", type=files.output, metavar="FILE")
    return result


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    options = parser().parse_args(arguments)
    count = options.rounds // (2 if options.quick else 1)
    rows, spans = measure(options.verify_ms / 1e3, count, quick=options.quick)
    print(render(rows))
    if options.json:
        end = max(span.end for span in spans)
        shown = [span for span in spans if span.end > end - 10 * options.verify_ms / 1e3]
        start = min(span.start for span in shown)
        data = {
            "machine": report.machine(),
            "settings": {"rounds": count, "verify_ms": options.verify_ms, "k": K,
                         "branches": BRANCHES, "step": STEP, "batch": BATCH},
            "inputs": [list(its) for its in published.inputs()],
            "rows": [asdict(row) for row in rows],
            "timeline": [(s.lane, s.name, round(s.start - start, 5), round(s.end - start, 5))
                         for s in shown],
        }  # fmt: skip
        files.write_json(options.json, data)
    return int(not all(row.ok for row in rows))
