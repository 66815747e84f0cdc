"""`saguaro plan`: the best K, branches and fallback for a pair, from measurements or from sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from saguaro_kernels.errors import ConfigError

from ..config import check_number
from ..metrics.plot import check_pictures
from .published import render as render_published
from .roofline import BYTES, MACHINES, MODELS, Machine, ModelShape, forward_seconds
from .search import Deployment, Plan, evaluate, interpolate, plan
from .simulation import simulate
from .theory import MissLaw, crossover_batch, expected_tokens

EXAMPLES = """\
  saguaro plan --verify-ms 18.3 --step-ms 3.0 --acceptance 0.85
  saguaro plan --verify-ms 18.3 --step-ms 21=3.02,84=4.14,336=6.26 --batch 8 --plot plan.png
  saguaro plan --target llama-3.1-70b --draft llama-3.2-1b --machine h100 --tp 4
  saguaro plan --target 70e9:80:8:128 --draft 1.2e9:16:8:64    parameters:layers:kv_heads:head_dim
  saguaro plan --published          the published rates, the planner's, and every input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `saguaro plan`."""
    measured = parser.add_argument_group("measured times")
    measured.add_argument("--verify-ms", type=float, help="one target forward over K + 1 tokens")
    measured.add_argument("--step-ms", help="one drafter forward: MS, or ROWS=MS,ROWS=MS,...")
    sizes = parser.add_argument_group("or predicted from sizes (roofline)")
    sizes.add_argument("--target", help=f"{', '.join(MODELS)} or PARAMETERS:LAYERS:KV:HEAD_DIM")
    sizes.add_argument("--draft", help="likewise")
    sizes.add_argument("--machine", choices=sorted(MACHINES), default="h100")
    sizes.add_argument("--bandwidth", type=float, metavar="GB/S", help="of memory, of one device")
    sizes.add_argument("--tflops", type=float, help="dense, of one device")
    sizes.add_argument("--link-us", type=float, help="one way between target and drafter")
    sizes.add_argument("--tp", type=int, default=1, help="devices of the target (1)")
    sizes.add_argument("--dtype", choices=sorted(BYTES), default="bf16", help="of weights (bf16)")
    sizes.add_argument("--context", type=int, default=1024, help="tokens in the KV cache (1024)")
    pair = parser.add_argument_group("the pair")
    pair.add_argument("--acceptance", type=float, default=0.8, help="per drafted token (0.8)")
    pair.add_argument(
        "--miss",
        default="0.25:0.5",
        metavar="SCALE:EXPONENT",
        help="F candidates miss the extra token with SCALE * F^-EXPONENT (0.25:0.5)",
    )
    use = parser.add_argument_group("the deployment")
    use.add_argument("--batch", type=int, default=1)
    use.add_argument("--drafters", type=int, default=1, help="drafter devices (1)")
    use.add_argument(
        "--handoff-ms",
        type=float,
        help="one way between the devices (0 of measured times, else the machine's link)",
    )
    use.add_argument("--max-k", type=int, default=12)
    use.add_argument("--max-branches", type=int, default=64)
    parser.add_argument("--plot", metavar="FILE.png", help="speed against K, branches and batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--published", action="store_true", help="reproduce the published rates")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0."""
    if args.published:
        print(render_published())
        return 0
    check_pictures(timeline=None, plot=args.plot)
    for name, most in (("max_k", 64), ("max_branches", 1024), ("tp", 10**4), ("context", 10**9)):
        check_number(f"--{name.replace('_', '-')}", getattr(args, name), 1, most, whole=True)
    if args.handoff_ms is not None:
        check_number("--handoff-ms", args.handoff_ms, 0, 1e6)
    deployment = _deployment(args)
    best = plan(deployment, ks=_ks(args), branches=_branches(args))
    if args.json:
        print(json.dumps(asdict(best), indent=2))
    else:
        print(_render(deployment, best))
    if args.plot:
        _plot(deployment, best, args, Path(args.plot))
    return 0


def _ks(args: argparse.Namespace) -> tuple[int, ...]:
    return tuple(range(1, args.max_k + 1))


def _branches(args: argparse.Namespace) -> tuple[int, ...]:
    steps = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
    return tuple(m for m in steps if m <= args.max_branches) or (1,)


def _deployment(args: argparse.Namespace) -> Deployment:
    try:
        scale, exponent = (float(part) for part in args.miss.split(":"))
    except ValueError:
        raise ConfigError(f"--miss: got {args.miss!r}, want SCALE:EXPONENT") from None
    check_number("--miss SCALE", scale, 0, 1e6)
    check_number("--miss EXPONENT", exponent, 0, 100)
    if (args.verify_ms is None) != (args.step_ms is None) or (args.target is None) != (
        args.draft is None
    ):
        raise ConfigError("want --verify-ms and --step-ms together, or --target and --draft")
    handoff, verify_rows = (args.handoff_ms or 0.0) / 1e3, None
    if args.verify_ms is not None:
        verify, step = args.verify_ms / 1e3, _measured_steps(args.step_ms)
    elif args.target is not None:
        target, draft = (_shape(name, BYTES[args.dtype]) for name in (args.target, args.draft))
        machine = _machine(args)
        handoff = machine.link if args.handoff_ms is None else handoff
        # The rows of a request share its trunk: its keys are read once.

        def verify_rows(rows: int) -> float:
            return forward_seconds(
                target, machine, rows, context=args.context, trunks=args.batch, tp=args.tp
            )

        verify = verify_rows(args.batch)

        def step(rows: int) -> float:
            return forward_seconds(draft, machine, rows, context=args.context, trunks=args.batch)
    else:
        raise ConfigError("want --verify-ms and --step-ms, or --target and --draft; see --help")
    return Deployment(
        acceptance=args.acceptance,
        miss=MissLaw(scale, exponent),
        verify_seconds=verify,
        step_seconds=step,
        batch=args.batch,
        drafters=args.drafters,
        target_devices=args.tp,
        handoff_seconds=handoff,
        verify_rows=verify_rows,
    )


def _machine(args: argparse.Namespace) -> Machine:
    """The machine that was named, with the numbers that were given in place of its own."""
    given = {
        "bandwidth": args.bandwidth and args.bandwidth * 1e9,
        "flops": args.tflops and args.tflops * 1e12,
        "link": None if args.link_us is None else args.link_us / 1e6,
    }
    machine = replace(MACHINES[args.machine], **{k: v for k, v in given.items() if v is not None})
    if min(machine.bandwidth, machine.flops) <= 0 or machine.link < 0:
        raise ConfigError(
            f"--bandwidth, --tflops, --link-us: got {args.bandwidth}, {args.tflops}, "
            f"{args.link_us}, want > 0, > 0 and >= 0"
        )
    return machine


def _shape(name: str, bytes_per_weight: float) -> ModelShape:
    if name in MODELS:
        return replace(MODELS[name], bytes_per_weight=bytes_per_weight)
    try:
        parameters, layers, kv_heads, head_dim = (float(part) for part in name.split(":"))
    except ValueError:
        raise ConfigError(
            f"model: got {name!r}, want {', '.join(MODELS)} or PARAMETERS:LAYERS:KV:HEAD_DIM"
        ) from None
    return ModelShape(parameters, int(layers), int(kv_heads), int(head_dim), bytes_per_weight)


def _measured_steps(text: str) -> Callable[[int], float]:
    """MS for any rows, or a table by rows."""
    try:
        if "=" not in text:
            return interpolate({1: float(text) / 1e3})
        pairs = (pair.split("=") for pair in text.split(","))
        return interpolate({int(rows): float(ms) / 1e3 for rows, ms in pairs})
    except ValueError:
        raise ConfigError(f"--step-ms: got {text!r}, want MS or ROWS=MS,ROWS=MS,...") from None


def _render(deployment: Deployment, best: Plan) -> str:
    d, unit = deployment, deployment.verify_seconds
    redraft = best.redraft_tokens * d.step_seconds(d.batch) / unit
    played = simulate(
        4000,
        acceptance=d.acceptance,
        k=best.k,
        hit_rate=best.hit_rate,
        draft_round=best.draft_round,
        redraft=redraft,
        k_miss=best.redraft_tokens,
        hit_rate_after_fast=1.0 - d.miss(best.branches),
        batch=d.batch,
        fallback="wait" if best.redraft_tokens else "fast",
        handoff=d.handoff_seconds / unit,
    )
    rows = -(-d.batch * best.branches // d.drafters)
    full = best.k * d.step_seconds(d.batch) / unit
    tokens = expected_tokens(d.acceptance, best.k)
    crossover = crossover_batch(best.hit_rate, 1.0 - d.miss(best.branches), full, tokens, tokens)
    if best.speed_vs_ar <= 1.0:
        verdict = "plain decoding is faster than any of these"
    elif best.speed_vs_sd <= 1.0:
        verdict = f"standard SD with K = {best.sd_k} is faster than any of these"
    else:
        verdict = "SSD"
    fans = " ".join(str(f) for f in best.fan_out)
    return "\n".join(
        [
            f"T_V {unit * 1e3:.2f} ms, drafter step {d.step_seconds(d.batch) * 1e3:.2f} ms, "
            f"T_tree {d.step_seconds(rows) * 1e3:.2f} ms at {rows} rows, hand-off "
            f"{d.handoff_seconds * 1e3:.2g} ms, acceptance {d.acceptance:g}, batch {d.batch}",
            f"use            {verdict}",
            f"K, branches    {best.k}, {best.branches} per request (by accepted length: {fans})",
            f"fallback       {best.fallback} (K = 0 beats a redraft from batch {crossover:.1f})",
            f"hit rate       {best.hit_rate:.3f}",
            f"draft round    {best.draft_round:.2f} T_V",
            f"against AR     {best.speed_vs_ar:.2f} x (simulated {played.speed_vs_ar:.2f} x), "
            f"{best.tokens_per_second:.1f} tokens/s",
            f"against SD     {best.speed_vs_sd:.2f} x (SD with K = {best.sd_k}: "
            f"{best.sd_speed_vs_ar:.2f} x AR)",
            f"per device     {best.per_device_vs_sd:.2f} x SD "
            f"({d.target_devices} target + {d.drafters} drafter)",
        ]
    )


def _plot(deployment: Deployment, best: Plan, args: argparse.Namespace, path: Path) -> None:
    """Speed against AR over K, over branches and over batch, the plan marked: a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = (1, 2, 4, 8, 16, 32)
    ks, branches = _ks(args), _branches(args)

    def speed(k: int, count: int) -> float:
        return max(evaluate(deployment, k, count, j)[0] for j in range(k + 1))

    by_batch = [plan(replace(deployment, batch=b), ks=ks, branches=branches) for b in batches]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    axes[0].plot(ks, [speed(k, best.branches) for k in ks], marker="o")
    axes[0].set(xlabel="K", ylabel="speed against AR", title=f"{best.branches} branches")
    axes[0].axvline(best.k, color="grey", linewidth=0.8)
    axes[1].plot(branches, [speed(best.k, m) for m in branches], marker="o")
    axes[1].set(xlabel="branches per request", title=f"K = {best.k}")
    axes[1].axvline(best.branches, color="grey", linewidth=0.8)
    axes[2].plot(batches, [p.speed_vs_ar for p in by_batch], marker="o", label="SSD")
    axes[2].plot(batches, [p.sd_speed_vs_ar for p in by_batch], marker="o", label="SD")
    axes[2].set(xlabel="batch", title="best K and branches")
    axes[2].legend()
    for axis, ticks in ((axes[1], branches), (axes[2], batches)):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        axis.minorticks_off()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
