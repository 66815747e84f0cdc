"""`python -m bench`: measure ops and the system beside their peers.

python -m bench --list
python -m bench verify.token              launches, bytes against the bound, syncs (times on a GPU)
python -m bench all --quick --json out.json
python -m bench saguaro_sample --shapes 'R=4,V=32000,T=1.0,F=8' --dtype float16
python -m bench verify.block --base main~3
python -m bench traffic                   the vocabulary kernels' traffic, and the peers' beside it

Whole runs, each with options of its own (--help):

compile     registers, spills and load widths for four targets
tune        the launch-config table: what is in use; tune OP times the alternatives on a GPU
paper       the paper's rates beside the planner's
scripted    the engine on models whose times and laws are known, beside what they predict
downweight  Saguaro's C: what acceptance pays for hits
equality    every method's text against the target's own
policy      "auto" beside every fixed k, branches and fallback of a sweep
hit_rates   how often the outcome was predicted on the demo's pair, by ranking and allocation
end_to_end  tokens per second of every method on the demo's pair
readme      the README's tables, from bench/results; --check: are they current?
plots       the plots, likewise
overhead    what a call costs on the host
soak        is anything lost when the draft process dies again and again?
gpu         check every kernel on a GPU, and time it

Exit code: 0; 1 a gate is red, a limit is missed or a run failed, and a line says which; 2 wrong
usage; 3 there is no GPU for what needs one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import files
from .systems import SYSTEM


def parser() -> argparse.ArgumentParser:
    """The options of a measurement."""
    result = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    result.add_argument("name", nargs="?", help="a case, a group (verify), or all")
    result.add_argument("--list", action="store_true", help="the cases, what gates them, who runs")
    result.add_argument("--shapes", action="append", metavar="B=1,K=7,...",
                        help="instead of the case's own; what is left out is as in its\n"
                             "first; may be given again")  # fmt: skip
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="of logits, keys and values; default: bfloat16")  # fmt: skip
    result.add_argument("--providers", metavar="NAME,...", help="default: all; see --list")
    result.add_argument("--quick", action="store_true", help="the first shapes of each case")
    result.add_argument("--no-gate", action="store_true", help="do not run the gating tests")
    result.add_argument("--machine", default="H100 SXM",
                        help="whose bandwidth a prediction uses (%(default)s)")  # fmt: skip
    result.add_argument("--base", metavar="REF", help="compare with this commit")
    result.add_argument("--csv", type=files.output, metavar="FILE", help="rows of the kernel cases")
    result.add_argument(
        "--json", type=files.output, metavar="FILE", help="the same and the machine"
    )
    result.add_argument("--plot", type=files.output, metavar="FILE.png", help="the same as bars")
    return result


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 measured; 1 a gate is red, a provider failed or a bound is missed; 2 usage."""
    name = arguments[0] if arguments else ""
    case = SYSTEM.get(name)
    # Kernels run in the interpreter where there is no GPU, and triton reads this when imported.
    interpreted = case is None or case.interpreted
    if interpreted and "TRITON_INTERPRET" not in os.environ and not _has_gpu():
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
        if not {"-h", "--help"} & set(arguments):
            os.execve(sys.executable, [sys.executable, "-m", __package__, *arguments], environment)
    if case is not None:
        from . import run

        return run.system(case, arguments[1:])
    ops = "verify,saguaro_sample,row_stats"
    peers = [ops, "--no-gate", "--providers", "ours"] if name == "traffic" else []
    options = parser().parse_args([*peers, *arguments[1:]] if peers else arguments)
    from . import run

    if arguments and not (options.list or options.name):
        parser().error("want a case, a group or all, or --list")
    if options.list or not options.name:
        print(run.listing())
        return 0
    if options.name == "all":
        return run.everything(options)
    return run.kernels(options, beside_peers=bool(peers))


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False  # there may be one, but hidden
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


if __name__ == "__main__":
    # A reader that goes away (| head) ends it without a word, as it ends any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
