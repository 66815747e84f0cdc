"""Files named on a command line: what is wrong with one is said before anything is measured."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def output(name: str) -> Path:
    """A file to write; its folder is made."""
    path = Path(name)
    try:
        if path.is_dir():
            raise ArgumentTypeError(f"{name} is a folder; want a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(f"{name} is read-only")
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=_part(path).parent):
                pass
    except OSError as error:
        raise ArgumentTypeError(f"{name} cannot be written: {error}") from error
    return path


def existing(name: str) -> Path:
    """A file to read."""
    path = Path(name)
    if not path.is_file():
        raise ArgumentTypeError(f"{name}: no such file")
    return path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is `path` once the block ends; where it fails, `path` is as it was."""
    if path.exists() and not path.is_file():
        yield path  # a terminal or a pipe
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        yield part
        part.replace(path.resolve())
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """All of the file or nothing of it."""
    with whole(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _part(path: Path) -> Path:
    # Beside the file that a link leads to: only there it takes its place in one step.
    its = path.resolve()
    return its.with_name(f"{its.name}.{os.getpid()}.part")
