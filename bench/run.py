"""Runs of cases: `python -m bench NAME`, `all` and `--list`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import (  # noqa: F401  cases registers them
    cases,
    interpreter,
    measure,
    outside,
    report,
    timing,
)
from .registry import CASES, Case, Shape, select, shape_id
from .systems import SYSTEM, System


def parse_shape(text: str) -> dict[str, Any]:
    """B=1,T=0.7,rule=token -> {"B": 1, "T": 0.7, "rule": "token"}."""

    def value(part: str) -> Any:
        for kind in (int, float):
            try:
                return kind(part)
            except ValueError:
                continue
        return part

    pairs = [part.partition("=") for part in text.split(",")]
    return {key.strip(): value(part) for key, _, part in pairs}


def shape_of(case: Case, text: str) -> dict[str, Any]:
    """The shape that --shapes gives; what it leaves out is as in the first of the case.

    Raises:
        ValueError: the case has no such dimension, or it takes no such value.
    """
    first = case.shapes[0]
    known = {key for shape in case.shapes for key in shape}
    known |= {"top_k", "top_p"} if "T" in first else set()
    given = parse_shape(text)
    for key, value in given.items():
        if key not in known:
            example = ",".join(f"{k}={v}" for k, v in first.items())
            raise ValueError(f"--shapes {text}: {case.name} has no {key!r}; want {example}")
        usual = first.get(key)
        if (isinstance(usual, str) != isinstance(value, str) and usual is not None) or (
            isinstance(usual, int) and (not isinstance(value, int) or value < 1)
        ):
            raise ValueError(f"--shapes {text}: {key}={value}, want one like {key}={usual}")
    return {**first, **given}


def wrong(options: argparse.Namespace, chosen: Sequence[Case]) -> str:
    """Why these options cannot be followed; "" where they can. Asked before anything runs."""
    if not chosen:
        return f"no case {options.name!r}; python -m bench --list shows them"
    if options.machine not in report.BANDWIDTHS:
        return f"--machine: want one of {', '.join(report.BANDWIDTHS)}"
    known = dict.fromkeys(name for case in chosen for name in (*case.providers, "torch.compile"))
    unknown = [name for name in (options.providers or "").split(",") if name and name not in known]
    if unknown:
        return f"--providers: no {', '.join(unknown)} here; want some of {', '.join(known)}"
    try:
        for case in chosen:
            for text in options.shapes or ():
                shape_of(case, text)
    except ValueError as error:
        return str(error)
    if options.base and not measure.is_commit(options.base):
        return f"--base {options.base}: no commit of that name here"
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return ""


def kernels(options: argparse.Namespace, *, beside_peers: bool = False) -> int:
    """Measure the kernel cases that `options` name, print them and write the files asked for."""
    chosen = select(options.name)
    if reason := wrong(options, chosen):
        print(reason, file=sys.stderr)
        return 2
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
    roof, floor = (timing.measured_roof(), timing.launch_floor_us()) if on_gpu else (0.0, 0.0)
    if not on_gpu:
        interpreter.install()
    gated = not options.no_gate and measure.has_tests()
    red = measure.gates([case.gate for case in chosen]) if gated else {}
    results = []
    for case in chosen:
        if case.gate not in red:
            results += _measure(case, options, roof if on_gpu else None)
    if on_gpu:
        print(report.time_table(results, roof, floor))
    else:
        print(report.traffic_table(results, options.machine))
    if beside_peers:
        print(f"\n{report.peer_table(results)}")
    failed = False
    if results and not on_gpu and not beside_peers and not options.quick and not options.no_gate:
        failed = _binaries([case for case in chosen if case.gate not in red])
    if options.base:
        print(_compare(results, options))
    for result in filter(_bad, results):
        print(f"FAILED {result.case} {result.shape}: {result.provider}: {result.note}")
    for case in chosen:
        if case.gate in red:
            print(f"RED {case.name}: not measured, {red[case.gate]}")
    if not gated and not beside_peers:
        print("Gating tests were not run: these figures are of kernels nobody has checked here.")
    for write, path in (
        (report.write_csv, options.csv),
        (report.write_json, options.json),
        (report.plot, options.plot),
    ):
        if path and results:
            write(path, results)
    return int(bool(red) or failed or any(_bad(result) for result in results))


def _measure(case: Case, options: argparse.Namespace, roof: float | None) -> list[report.Result]:
    shapes: list[Shape] = [shape_of(case, text) for text in options.shapes or ()]
    shapes = shapes or list(case.shapes[: case.quick] if options.quick else case.shapes)
    dtype = getattr(torch, options.dtype) if options.dtype else case.dtype
    known = measure.with_compiled(case) if roof else dict(case.providers)
    names = options.providers.split(",") if options.providers else list(known)
    names = [name for name in names if name in known]
    results = []
    for shape in shapes:
        start = _clock()
        if roof:
            results += measure.measure_times(case, shape, dtype, names, roof)
        else:
            results += measure.measure_traffic(case, shape, dtype, options.machine, names)
        seconds, cpu = _since(start)
        where = f"{case.name} {shape_id(shape)}"
        print(f"{where}: {seconds:.1f} s, {cpu:.1f} s of CPU", file=sys.stderr, flush=True)
    return results


def _clock() -> tuple[float, float]:
    """Seconds on the wall, and of CPU: of this process and of those that it waited for."""
    its = os.times()
    return time.monotonic(), its.user + its.system + its.children_user + its.children_system


def _since(start: tuple[float, float]) -> tuple[float, float]:
    now = _clock()
    return now[0] - start[0], now[1] - start[1]


def _binaries(measured: Sequence[Case]) -> bool:
    """Print the registers and spills of the cases' kernels; True if one fails to compile."""
    pattern = "|".join(case.binaries for case in measured if case.binaries)
    if not pattern:
        return False
    print(
        "\nTheir binaries for sm_90 (python -m bench compile has all, for four targets):",
        flush=True,
    )
    return _process("compile", [pattern, "--targets", "sm_90", "--jobs", "1"]) != 0


def _bad(result: report.Result) -> bool:
    """Ours misses its bound, or a provider that is not another project's failed."""
    failed = "failed" in result.note and not outside.is_outside(result.provider)
    return result.meets_bound is False or failed


def system(case: System, arguments: Sequence[str]) -> int:
    """Run one system case after its gate; --no-gate leaves the gate out."""
    rest = [argument for argument in arguments if argument != "--no-gate"]
    if case.gate:
        case.check(rest)
    if case.gate and len(rest) == len(arguments) and measure.has_tests():
        red = measure.gates([case.gate])
        if red:
            print(f"RED {case.name}: not measured, {red[case.gate]}")
            return 1
    return case.main(rest)


def everything(options: argparse.Namespace) -> int:
    """All kernel cases, then every system case in a process of its own, then what came of it."""
    begin = _clock()
    print("== kernel cases: what one call of each op moves and waits for, beside torch and others",
          flush=True)  # fmt: skip
    outcomes = [("kernel cases", kernels(options), *_since(begin))]
    if outcomes[0][1] == 2:
        return 2
    for case in SYSTEM.values():
        arguments = case.quick if options.quick else case.full
        if arguments is None or (case.repository and not measure.has_tests()):
            continue
        line = " ".join(["python -m bench", case.name, *arguments])
        print(f"\n== {line}: {case.summary}", flush=True)
        start = _clock()
        rest = [*arguments, *(["--no-gate"] if options.no_gate else [])]
        outcomes.append((case.name, _process(case.name, rest), *_since(start)))
    print("\n== what came of it")
    verdicts = {0: "ok", 1: "FAILED", 2: "wrong usage"}
    failed = int(any(code for _, code, *_ in outcomes))
    outcomes.append(("all", failed, *_since(begin)))
    rows = [
        (name, verdicts.get(code, f"exit {code}"), f"{seconds:.0f}", f"{cpu:.0f}")
        for name, code, seconds, cpu in outcomes
    ]
    print(report.table(("what", "outcome", "seconds", "CPU seconds"), rows))
    if red := [name for name, code, *_ in outcomes[:-1] if code]:
        print(f"Failed: {', '.join(red)}; why is under its heading (RED, FAILED or NO).")
    return failed


def _process(name: str, arguments: Sequence[str]) -> int:
    """A system case without the interpreter that kernel cases run in."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", str(__package__), name, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def listing() -> str:
    """The table of --list."""
    known = measure.has_tests()
    whole = [c for c in SYSTEM.values() if known or not c.repository]
    lines = []
    for title, listed in (
        ("Kernel cases: what one call of an op moves and waits for; on a GPU, its time", CASES),
        ("Whole runs (--help has the options of each)", {c.name: c for c in whole}),
    ):
        rows = [(c.name, c.summary, *([c.gate or "-"] if known else [])) for c in listed.values()]
        headers = ("name", "what", *(["gated by"] if known else []))
        lines += [title, report.table(headers, rows), ""]
    lines += [
        '"all" is every one; a name like "verify" is every kernel case that begins with it.',
        "A kernel case runs ours, the kernels, beside torch, their reference in plain torch; on a",
        "GPU also torch.compile of that. A red gate: not measured, and exit code 1.",
    ]
    others = [(c.name, provider) for c in CASES.values() for provider in c.providers]
    lines += [f"  {case}: {its}, too" for case, its in others if outside.is_outside(its)]
    if absent := outside.missing():
        lines += ["Other projects that it would run where installed:"]
        lines += [f"  {line}" for line in absent]
    return "\n".join(lines)


def _compare(results: Sequence[Any], options: argparse.Namespace) -> str:
    """Ours now beside ours at --base: times and their spread, or bytes without a GPU."""
    arguments = [options.name, *(["--quick"] if options.quick else []), "--providers", "ours"]
    for shape in options.shapes or ():
        arguments += ["--shapes", shape]
    if options.dtype:
        arguments += ["--dtype", options.dtype]
    before = {
        (r.case, r.provider, r.shape): r for r in measure.against(options.base, arguments)
    }  # fmt: skip
    rows = []
    for now in results:
        old = before.get((now.case, now.provider, now.shape))
        if old is None or now.provider != "ours":
            continue
        if now.p50_us and old.p50_us:
            spread = (now.p80_us or 0.0) - (now.p20_us or 0.0)
            rows.append((now.case, now.shape, "p50 us", old.p50_us, now.p50_us,
                         now.p50_us / old.p50_us, abs(now.p50_us - old.p50_us) <= spread)
                        )  # fmt: skip
        elif now.ratio and old.ratio:
            rows.append((now.case, now.shape, "bytes / bound", old.ratio, now.ratio,
                         now.ratio / old.ratio, now.ratio == old.ratio))  # fmt: skip
    if not rows:
        return f"{options.base} has nothing to compare with"
    headers = ("case", "shape", "what", options.base, "now", "now / base", "within spread")
    note = "within spread: of times, p80 - p20 of now; counted bytes have none and must be equal."
    return f"{report.table(headers, rows)}\n{note}"
