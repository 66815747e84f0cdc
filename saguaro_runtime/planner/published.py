"""The published rates beside the planner's, with every input and where it comes from.

Published (arXiv 2603.03251; greedy, batch 1, tokens/s) is what is to be reproduced. Two kinds of
input are at hand: the table itself, and the log of a test run that the authors keep in their
repository (tanishqkumar/ssd, tests/reference_test_outputs.md, 2026-02-10), which has K, the
fan-out, the drafter's time per round and rates on other prompts. Nothing is fitted per model; what
neither source says is assumed once for both models and listed as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from .roofline import MACHINES, MODELS, forward_seconds
from .search import Deployment, interpolate, plan
from .theory import MissLaw, acceptance_for, ssd_vs_sd, theorem7

PAPER = "arXiv 2603.03251"
LOG = "tanishqkumar/ssd tests/reference_test_outputs.md"
HIT_RATE = 0.9
MISS_EXPONENT = 0.5
BATCH_GAIN = {1: 0.31, 8: 0.21, 16: 0.16, 32: 0.11}
"""SSD over SD, published, by batch: reproduced in direction only."""
DRAFT_ROUND_SECONDS = {1: 0.02112, 2: 0.02488, 4: 0.02896, 8: 0.03529, 16: 0.04384}
"""The authors' drafter round by batch (Llama, K = 6, fan-out 3: 21 rows per request, 7 steps)."""


@dataclass(frozen=True)
class Published:
    """One model pair: published rates, and the inputs from the log."""

    name: str
    target: str
    ar: float
    sd: float
    ssd: float
    k: int
    fan_out: int
    draft_round_seconds: float
    log_ssd: float


PAIRS = (
    Published("Llama-3.1-70B / 3.2-1B", "llama-3.1-70b", 54.7, 161.8, 255.8, 6, 3, 0.02112, 270.0),
    Published("Qwen3-32B / 0.6B", "qwen3-32b", 88.8, 136.8, 203.8, 4, 2, 0.01793, 195.0),
)


@dataclass(frozen=True)
class Row:
    """One published number beside the prediction, in tokens/s."""

    pair: str
    method: str
    published: float
    predicted: float
    inputs: str

    @property
    def error(self) -> float:
        """Relative difference of the prediction."""
        return self.predicted / self.published - 1.0


def _step(pair: Published) -> float:
    """One drafter forward: its round holds K + 1 of them."""
    return pair.draft_round_seconds / (pair.k + 1)


def reproduce() -> list[Row]:
    """AR by roofline; SD from the log's SSD rate; SSD from the published SD rate."""
    rows = []
    for pair in PAIRS:
        verify, draft = 1.0 / pair.ar, pair.k * _step(pair)
        roof = forward_seconds(MODELS[pair.target], MACHINES["h100"], 1, tp=4)
        rows.append(Row(pair.name, "AR", pair.ar, 1.0 / roof, "roofline, H100 x 4"))
        round_seconds = theorem7(
            HIT_RATE, 1.0, 1.0, pair.draft_round_seconds / verify, draft / verify
        )
        tokens_log = pair.log_ssd * verify / round_seconds
        sd = tokens_log / (verify + draft)
        rows.append(
            Row(pair.name, "SD", pair.sd, sd, "AR published; tokens per round from the log")
        )
        tokens = pair.sd * (verify + draft)
        gain = ssd_vs_sd(
            verify_seconds=verify,
            draft_seconds=draft,
            tree_round_seconds=pair.draft_round_seconds,
            redraft_seconds=draft,
            hit_rate=HIT_RATE,
            tokens_sd=tokens,
            tokens_hit=tokens,
            tokens_miss=tokens,
        )
        rows.append(Row(pair.name, "SSD", pair.ssd, pair.sd * gain, "AR, SD published; Theorem 7"))
    return rows


def batch_trend() -> dict[int, float]:
    """Predicted gain of SSD over SD by batch, K = 6, the best of 2 .. 21 branches and fallback."""
    pair = PAIRS[0]
    tokens = pair.sd * (1.0 / pair.ar + pair.k * _step(pair))
    gains = {}
    for batch in BATCH_GAIN:
        deployment = Deployment(
            acceptance=acceptance_for(tokens, pair.k),
            miss=MissLaw((1.0 - HIT_RATE) * pair.fan_out**MISS_EXPONENT, MISS_EXPONENT),
            verify_seconds=1.0 / pair.ar,
            step_seconds=interpolate(
                {1: _step(pair)} | {21 * b: t / 7 for b, t in DRAFT_ROUND_SECONDS.items()}
            ),
            batch=batch,
            target_devices=4,
        )
        gains[batch] = plan(deployment, ks=(pair.k,), branches=(2, 4, 7, 14, 21)).speed_vs_sd - 1.0
    return gains


def inputs() -> list[tuple[str, str, str]]:
    """Every input: name, value, source ("assumed" where no source has it)."""
    rows = []
    for pair in PAIRS:
        rows += [
            (f"{pair.name}: AR, SD, SSD tok/s", f"{pair.ar}, {pair.sd}, {pair.ssd}", PAPER),
            (f"{pair.name}: K, fan-out", f"{pair.k}, {pair.fan_out}", LOG),
            (f"{pair.name}: drafter round", f"{pair.draft_round_seconds * 1e3:.2f} ms", LOG),
            (f"{pair.name}: SSD tok/s, other prompts", f"{pair.log_ssd:g}", LOG),
        ]
    machine = MACHINES["h100"]
    return rows + [
        ("T_V", "1 / AR rate", "follows from AR; a verification is taken to cost one decode step"),
        (
            "drafter step, SD too",
            "round / (K + 1)",
            "assumed: batch-1 and tree steps take the same",
        ),
        ("redraft on a miss", "K steps", f"{PAPER}: the neural backup at small batch"),
        ("hit rate", f"{HIT_RATE}", f"{PAPER}: 'up to 90 %'; taken as reached"),
        (
            "tokens per round, hit and miss",
            "equal",
            "assumed: both chains come from the same drafter",
        ),
        ("miss law exponent r", f"{MISS_EXPONENT}", "assumed (batch trend only)"),
        ("drafter round by batch", "21.1 .. 43.8 ms at 1 .. 16", LOG),
        ("T_V by batch", "flat", "assumed: memory-bound up to 32 x 7 rows (batch trend only)"),
        (
            "roofline",
            f"efficiency {machine.efficiency}, {machine.launch * 1e6:.0f} us per layer, "
            f"{machine.all_reduce * 1e6:.0f} us per all-reduce",
            "assumed, the same for both models (AR rows only)",
        ),
    ]


def render() -> str:
    """The tables of `saguaro plan --published`."""
    lines = [f"{'pair':24} {'method':6} {'published':>9} {'predicted':>9} {'error':>7}  from"]
    lines += [
        f"{row.pair:24} {row.method:6} {row.published:9.1f} {row.predicted:9.1f} "
        f"{row.error:+7.1%}  {row.inputs}"
        for row in reproduce()
    ]
    gains = batch_trend()
    lines += ["", f"{'SSD over SD by batch':24} " + " ".join(f"{b:>7}" for b in gains)]
    lines += [f"{'published':24} " + " ".join(f"{BATCH_GAIN[b]:+7.0%}" for b in gains)]
    lines += [f"{'predicted':24} " + " ".join(f"{g:+7.0%}" for g in gains.values())]
    lines += ["the trend alone is predicted: the miss law and a flat T_V are assumed"]
    lines += ["", "inputs"]
    wide, wider = (max(len(row[i]) for row in inputs()) for i in (0, 1))
    lines += [f"  {name:{wide}} {value:{wider}} {source}" for name, value, source in inputs()]
    return "\n".join(lines)
