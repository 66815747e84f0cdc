"""A cache folder of converted models: one process writes at a time, and only complete folders."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from saguaro_kernels.errors import ConfigError


def default_cache() -> Path:
    """The folder that holds the converted models: $XDG_CACHE_HOME/saguaro, or ~/.cache/saguaro."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saguaro"


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Hold the cache's lock; the operating system releases it if the process dies.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(
            f"cache folder {cache}: {error.strerror}; set XDG_CACHE_HOME to a folder you can write"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes to {cache}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache.glob("tmp-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have `make` fill a temporary folder, then rename it: `folder` is never seen incomplete.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if folder.is_dir():
        return
    try:
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder.parent) as work:
            built = Path(work) / "model"
            built.mkdir()
            make(built)
            built.rename(folder)
    except OSError as error:
        raise ConfigError(f"writing {folder}: {error.strerror or error}") from error


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
