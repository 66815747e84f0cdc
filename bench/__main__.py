"""`python -m bench`: measure ops and the system beside their peers.

python -m bench --list
python -m bench verify.token              launches, bytes against the bound, syncs (times on a GPU)
python -m bench all --quick --json out.json
python -m bench saguaro_sample --shapes 'R=4,V=32000,T=1.0,F=8' --dtype float16
python -m bench verify.block --base main~3
python -m bench compile                   registers, spills and load widths for four targets
python -m bench traffic                   verification beside the peers' published traffic
python -m bench paper                     the paper's rates beside the planner's
python -m bench readme [--check]          the README's tables, from bench/results
python -m bench equality                  every method's text against the target's own
python -m bench end_to_end [--quick]      tokens per second of every method on the demo's pair
python -m bench gpu                       check every kernel on a GPU, and time it
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The options of a measurement."""
    result = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    result.add_argument("name", nargs="?", help="a case, a group (verify), or all")
    result.add_argument("--list", action="store_true", help="the cases, what gates them, who runs")
    result.add_argument("--shapes", action="append", metavar="B=1,K=7,...",
                        help="instead of the case's own; may be given again")  # fmt: skip
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    result.add_argument("--providers", help="comma-separated; default: all")
    result.add_argument("--quick", action="store_true", help="the first shapes of each case")
    result.add_argument("--no-gate", action="store_true", help="do not run the gating tests")
    result.add_argument("--machine", default="H100 SXM",
                        help="whose bandwidth a prediction uses (%(default)s)")  # fmt: skip
    result.add_argument("--base", metavar="REF", help="compare with this commit")
    result.add_argument("--csv", type=Path, metavar="FILE")
    result.add_argument("--json", type=Path, metavar="FILE")
    result.add_argument("--plot", type=Path, metavar="FILE.png")
    return result


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


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 measured; 1 a gate is red, a provider failed or a bound is missed; 2 usage."""
    command = arguments[0] if arguments else ""
    if command == "compile":
        from . import compile as compile_command

        return compile_command.main(arguments[1:])
    if command == "paper":
        from saguaro_runtime.planner.published import render

        print(render())
        return 0
    if command == "readme":
        from . import readme

        return readme.main(arguments[1:])
    if command == "end_to_end":
        from . import end_to_end

        return end_to_end.main(arguments[1:])
    if command == "equality":
        from . import equality

        return equality.main(arguments[1:])
    if command == "gpu":
        from . import gpu

        return gpu.main(arguments[1:])
    options = parser().parse_args(["verify", "--no-gate", "--providers", "ours", *arguments[1:]]
                                  if command == "traffic" else arguments)  # fmt: skip
    # Kernels run in the interpreter where there is no GPU, and triton reads this when imported.
    if "TRITON_INTERPRET" not in os.environ and not _has_gpu():
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
        os.execve(sys.executable, [sys.executable, "-m", __package__, *arguments], environment)
    return run(options, beside_peers=command == "traffic")


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def run(options: argparse.Namespace, *, beside_peers: bool = False) -> int:
    """Measure what `options` name and print it."""
    import torch

    from . import cases, interpreter, measure, report, timing  # noqa: F401  cases registers them
    from .registry import SYSTEM, select

    if options.list or not options.name:
        print(_list())
        return 0
    if options.name in SYSTEM:
        return SYSTEM[options.name](options)
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
    results, red = [], {}
    gated = not options.no_gate and (measure.ROOT / "tests").is_dir()
    for case in chosen:
        if gated and (reason := measure.gate(case.gate)):
            red[case.name] = reason
            continue
        shapes = [parse_shape(text) for text in options.shapes or ()]
        shapes = shapes or list(case.shapes[: case.quick] if options.quick else case.shapes)
        dtype = getattr(torch, options.dtype) if options.dtype else case.dtype
        known = measure.with_compiled(case) if on_gpu else dict(case.providers)
        names = options.providers.split(",") if options.providers else list(known)
        names = [name for name in names if name in known]
        for shape in shapes:
            print(f"{case.name} {shape}", file=sys.stderr, flush=True)
            if on_gpu:
                results += measure.measure_times(case, shape, dtype, names, roof)
            else:
                results += measure.measure_traffic(case, shape, dtype, options.machine, names)
    if on_gpu:
        print(report.time_table(results, roof, floor))
    elif beside_peers:
        print(report.peer_table(results))
    else:
        print(report.traffic_table(results, options.machine))
    if options.base:
        print(_compare(results, options))
    for name, reason in red.items():
        print(f"RED {name}: not measured, {reason}")
    if not gated and not beside_peers:
        print("Gating tests were not run: these figures are of kernels nobody has checked here.")
    for write, path in (
        (report.write_csv, options.csv),
        (report.write_json, options.json),
        (report.plot, options.plot),
    ):
        if path and results:
            write(path, results)
    bad = [r for r in results if r.meets_bound is False or "failed" in r.note]
    return int(bool(red or bad))


def _list() -> str:
    from .registry import CASES, SYSTEM
    from .report import table

    rows = [(c.name, c.summary, c.gate, ", ".join(c.providers)) for c in CASES.values()]
    rows += [(name, (main.__doc__ or "").split("\n")[0], "-", "-") for name, main in SYSTEM.items()]
    return table(("case", "what", "gated by", "providers"), rows)


def _compare(results: Sequence[Any], options: argparse.Namespace) -> str:
    """Ours now beside ours at --base: the ratio of times, or of bytes without a GPU."""
    from . import measure, report

    arguments = [options.name, *(["--quick"] if options.quick else [])]
    for shape in options.shapes or ():
        arguments += ["--shapes", shape]
    if options.dtype:
        arguments += ["--dtype", options.dtype]
    found = measure.against(options.base, arguments)
    before = {(r.case, r.provider, r.shape): r for r in found}
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
