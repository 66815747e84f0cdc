"""Runs of cases: `python -m bench NAME`, `all` and `--list`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
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
from .registry import CASES, Case, Shape, select
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


def kernels(options: argparse.Namespace, *, beside_peers: bool = False) -> int:
    """Measure the kernel cases that `options` name, print them and write the files asked for."""
    chosen = select(options.name)
    if not chosen:
        print(f"no case {options.name!r}; python -m bench --list shows them", file=sys.stderr)
        return 2
    if options.machine not in report.BANDWIDTHS:
        print(f"--machine: want one of {', '.join(report.BANDWIDTHS)}", file=sys.stderr)
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
    shapes: list[Shape] = [parse_shape(text) for text in options.shapes or ()]
    shapes = shapes or list(case.shapes[: case.quick] if options.quick else case.shapes)
    dtype = getattr(torch, options.dtype) if options.dtype else case.dtype
    known = measure.with_compiled(case) if roof else dict(case.providers)
    names = options.providers.split(",") if options.providers else list(known)
    names = [name for name in names if name in known]
    results = []
    for shape in shapes:
        print(f"{case.name} {shape}", file=sys.stderr, flush=True)
        if roof:
            results += measure.measure_times(case, shape, dtype, names, roof)
        else:
            results += measure.measure_traffic(case, shape, dtype, options.machine, names)
    return results


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
    rest = [its for its in arguments if its != "--no-gate"]
    asks = len(rest) == len(arguments) and not {"-h", "--help"} & set(rest)
    if case.gate and asks and measure.has_tests():
        red = measure.gates([case.gate])
        if red:
            print(f"RED {case.name}: not measured, {red[case.gate]}")
            return 1
    return case.main(rest)


def everything(options: argparse.Namespace) -> int:
    """All kernel cases, then every system case in a process of its own, then what came of it."""
    begin = time.monotonic()
    print(textwrap.dedent(_KERNELS).strip(), flush=True)
    outcomes = [("kernel cases", kernels(options), time.monotonic() - begin)]
    for case in SYSTEM.values():
        arguments = case.quick if options.quick else case.full
        if arguments is None or (case.repository and not measure.has_tests()):
            continue
        print(f"\n== {case.name}: {case.summary}", flush=True)
        start = time.monotonic()
        rest = [*arguments, *(["--no-gate"] if options.no_gate else [])]
        outcomes.append((case.name, _process(case.name, rest), time.monotonic() - start))
    print("\n== what came of it")
    verdicts = {0: "ok", 1: "FAILED", 2: "wrong usage"}
    rows = [(name, verdicts.get(code, f"exit {code}"), s / 60) for name, code, s in outcomes]
    rows.append(("all", verdicts[int(any(code for _, code, _ in outcomes))],
                 (time.monotonic() - begin) / 60))  # fmt: skip
    print(report.table(("what", "outcome", "minutes"), rows))
    return int(any(code for _, code, _ in outcomes))


_KERNELS = """
    == kernel cases: what one call of each op moves and waits for, beside torch and other projects
    launches      kernels started               syncs         times the host has to wait
    MB bound      the least that any implementation has to move
    ratio         bytes moved over that least   within bound  ours is held to a limit; NO fails
"""


def _process(name: str, arguments: Sequence[str]) -> int:
    """A system case without the interpreter that kernel cases run in."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", str(__package__), name, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def listing() -> str:
    """The table of --list."""
    known = measure.has_tests()
    rows = [
        (c.name, c.summary, ", ".join([*c.providers, "torch.compile (GPU)"]))
        + ((c.gate,) if known else ())
        for c in CASES.values()
    ]
    whole = [c for c in SYSTEM.values() if known or not c.repository]
    rows += [(c.name, c.summary, "-", *([c.gate or "-"] if known else [])) for c in whole]
    lines = [report.table(("case", "what", "providers", *(["gated by"] if known else [])), rows)]
    lines.append('"all" is every case; a name like "verify" is every case that begins with it.')
    if absent := outside.missing():
        lines += ["Providers that are not installed here, and what they would run:"]
        lines += [f"  {line}" for line in absent]
    return "\n".join(lines)


def _compare(results: Sequence[Any], options: argparse.Namespace) -> str:
    """Ours now beside ours at --base: the ratio of times, or of bytes without a GPU."""
    arguments = [options.name, *(["--quick"] if options.quick else [])]
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
            rows.append((now.case, now.shape, "p50 us", old.p50_us, now.p50_us,
                         now.p50_us / old.p50_us))  # fmt: skip
        elif now.ratio and old.ratio:
            rows.append((now.case, now.shape, "bytes / bound", old.ratio, now.ratio,
                         now.ratio / old.ratio))  # fmt: skip
    headers = ("case", "shape", "what", options.base, "now", "now / base")
    return report.table(headers, rows) if rows else f"{options.base}: nothing to compare with"
