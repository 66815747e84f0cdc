"""`saguaro completion`: what a shell needs to complete `saguaro`, written by shtab."""

from __future__ import annotations

import argparse

EXAMPLES = """\
  saguaro completion bash > ~/.local/share/bash-completion/completions/saguaro
  saguaro completion zsh > ~/.zfunc/_saguaro      a folder of your $fpath
"""

FILES = ("DIR", "FILE", "FILE.png", "JSON", "PATH", "PNG")
"""Metavars after which files are offered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh, or another that shtab knows")


def run(args: argparse.Namespace) -> int:
    from saguaro_kernels.errors import ConfigError

    from . import COMMANDS, command_parser

    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            'completion: shtab is not installed; run: pip install "saguaro-ssd[completion]"'
        ) from error
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(
            f"completion {args.shell}: want one of {', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    parser = command_parser(COMMANDS)
    _offer_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Mark the options that take files in shtab's way."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _offer_files(subparser, files)
        elif action.metavar in FILES:
            action.complete = files  # type: ignore[attr-defined]
