"""Files named on a command line: what is wrong with one is said before anything is measured."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def output(name: str) -> Path:
    """A file to write; its folder is made."""
    path = Path(name)
    if path.is_dir():
        raise ArgumentTypeError(f"{name} is a folder; want a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{name}: no folder can be made for it ({error})") from error
    return path


def existing(name: str) -> Path:
    """A file to read."""
    path = Path(name)
    if not path.is_file():
        raise ArgumentTypeError(f"{name}: no such file")
    return path
