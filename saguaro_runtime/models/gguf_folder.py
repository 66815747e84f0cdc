"""A GGUF file as a folder that transformers reads: converted once, kept in the cache by content."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from saguaro_kernels.errors import ConfigError

from ..demo.model import _make_once, _only_one, _sha256, default_cache


def folder_of(path: str) -> str:
    """`path` itself, or the folder of the GGUF file that it names.

    Raises:
        ConfigError: there is no such file, or `gguf`, which reads it, is missing.
        UnsupportedError: it does not hold a Llama with a byte-level BPE tokenizer.
    """
    file = Path(path).expanduser()
    if file.suffix != ".gguf":
        return path
    if not file.is_file():
        raise ConfigError(f"model {path!r}: there is no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model {path!r}: the package 'gguf', which reads it, is missing; "
            'run: pip install "saguaro-ssd[demo]"'
        )
    from ..demo.convert import convert

    cache = default_cache()
    folder = cache / f"gguf-{_sha256(file)[:12]}"
    with _only_one(cache):
        _make_once(folder, lambda into: convert(file, into))
    return str(folder)
