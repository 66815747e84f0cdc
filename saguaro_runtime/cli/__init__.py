"""The command `saguaro`. Each subcommand is one line of COMMANDS; its module is imported when used.

Exit codes: 0 done, 1 failed (the reason on stderr), 2 wrong usage, 130 Ctrl-C, 143 terminated.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from ..config import EngineConfig

# Nothing here imports torch: saguaro_kernels is imported where an error is raised or recognised.


class Command(NamedTuple):
    """`module` has EXAMPLES, `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("saguaro_runtime.demo.cli", "compare AR, SD and SSD on a small real pair"),
    "generate": Command("saguaro_runtime.cli.generate", "generate with any two models"),
    "chat": Command("saguaro_runtime.cli.chat", "talk to a model in the terminal"),
    "serve": Command("saguaro_runtime.serve.cli", "an OpenAI-compatible HTTP server"),
    "distill": Command("saguaro_runtime.distill.cli", "train a draft for a model that has none"),
    "plan": Command("saguaro_runtime.planner.cli", "which K, branches and fallback, and how fast"),
    "doctor": Command("saguaro_runtime.cli.doctor", "what this machine has and what would be used"),
    "completion": Command("saguaro_runtime.cli.completion", "completion of all this in a shell"),
}
# bench is installed under a name of its own; in a checkout it is the folder of that name.
BENCH = ("saguaro_bench", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `saguaro` with these arguments (default: the command line's); return the exit code.

    Raises:
        SystemExit: wrong usage, --help and --version, as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Like Ctrl-C, a SIGTERM must unwind the stack, so that engines end their processes.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        if argv[:1] == ["bench"]:
            return _bench(argv[1:])
        args = command_parser(argv[:1]).parse_args(argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\nsaguaro: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone (| head). Python flushes stdout once more at exit: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from saguaro_kernels.errors import SaguaroError

        # A file that is not there, cannot be written or is no text is not for a traceback either.
        if not isinstance(error, SaguaroError | OSError | UnicodeError):
            raise
        print(f"saguaro: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def version() -> str:
    """The installed version, or "unknown" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("saguaro-ssd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def command_parser(names: Container[str]) -> argparse.ArgumentParser:
    """Of the whole command line, with the options of the commands in `names`.

    Only those are imported: `saguaro --help` needs no torch.
    """
    parser = argparse.ArgumentParser(
        prog="saguaro",
        description="Speculative speculative decoding: the target's own text, sooner.",
        epilog="saguaro COMMAND --help explains a command and gives examples.",
    )
    parser.add_argument("--version", action="version", version=f"saguaro {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in names:
            loaded = importlib.import_module(module)
            command.epilog = f"examples:\n{loaded.EXAMPLES}"
            command.set_defaults(run=loaded.run)
            loaded.add_arguments(command)
    commands.add_parser("bench", help="benchmarks of kernels and runtime", add_help=False)
    return parser


def _bench(argv: Sequence[str]) -> int:
    for name in BENCH:
        if importlib.util.find_spec(name):
            sys.argv = [f"saguaro {name}", *argv]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            return 0
    from saguaro_kernels.errors import ConfigError

    raise ConfigError('bench: not installed; run: pip install "saguaro-ssd[bench]"')


def check_model(option: str, name: str) -> str:
    """`name` itself if it may be a model; a hub's name is not asked for here.

    Raises:
        ConfigError: it is written as a path and nothing that could be loaded is there.
    """
    path = Path(name).expanduser()
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if path.is_dir():
        missing = "" if (path / "config.json").is_file() else "has no config.json"
    elif path.exists():
        missing = "" if path.suffix == ".gguf" else "is a file"
    else:
        missing = "does not exist" if is_path else ""
    if missing:
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(
            f"{option} {name}: {missing}; want a folder of a transformers model, or a .gguf file"
        )
    return str(path) if path.exists() else name


# Options that several commands share.


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which models, and whether the draft is used."""
    parser.add_argument(
        "--target", required=True, metavar="PATH", help="folder, .gguf file or hub name"
    )
    parser.add_argument("--draft", metavar="PATH", help="same vocabulary; or ngram: no model")
    parser.add_argument("--method", choices=("ar", "sd", "ssd"), default="ssd")
    add_device_options(parser)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Where the models go."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cpu (default), cuda, cuda:1, or auto: a GPU for each model, as far as there are any",
    )
    parser.add_argument(
        "--draft-device", metavar="NAME", help="default: as --device; another GPU if that is auto"
    )


def check_models(args: argparse.Namespace) -> None:
    """Raise ConfigError where a model is missing; afterwards both are names that can be loaded."""
    if args.draft is None and args.method != "ar":
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(
            f"--method {args.method}: needs --draft PATH, or --draft ngram; plain decoding is "
            "--method ar"
        )
    args.target = check_model("--target", args.target)
    if args.draft is not None:
        args.draft = check_model("--draft", args.draft)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """What the text is: SamplingParams."""
    group = parser.add_argument_group("text")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument("--seed", type=int, default=0)


def engine_config(args: argparse.Namespace, **options: Any) -> EngineConfig:
    """The configuration that the options of models and engine ask for; `options` go before."""
    from ..config import EngineConfig

    names = ("method", "rule", "ranking", "k", "branches", "device", "draft_device", "attention")
    return EngineConfig(**{name: getattr(args, name) for name in names} | options)


def add_engine_options(parser: argparse.ArgumentParser, *, k: int, branches: int) -> None:
    """How it is decoded: EngineConfig."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--rule", choices=("token", "block", "hsd", "coupled"), default="block")
    group.add_argument(
        "--ranking", choices=("auto", "probability", "noise", "coupled"), default="auto"
    )
    group.add_argument("--k", type=int, default=k, help=f"tokens drafted per round ({k})")
    group.add_argument(
        "--branches", type=int, default=branches, help=f"outcomes prepared per round ({branches})"
    )
    group.add_argument(
        "--attention",
        choices=("tree", "flash"),
        default="tree",
        help="of prompts and verification; flash: flash-attn, on GPUs; extra [flash]",
    )
