"""Every Python block of README and docs runs, every command line parses, every example works."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import saguaro_runtime
from saguaro_kernels import _launch
from saguaro_runtime import build, cli

ROOT = Path(saguaro_runtime.__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")),
]
FOLDERS = ("llama-8b", "llama-1b")
"""What the pages call a target and a draft."""


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """(line, text) of a page's fenced blocks of a language."""
    text = (ROOT / page).read_text()
    return [
        (text[: match.start()].count("\n") + 2, match[1])
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def models() -> tuple[Any, Any]:
    """A target and a draft of 44 positions: texts end there, whatever a page asks for."""
    target = tiny_models.llama(length=44)
    return target, tiny_models.llama(1, near=target, length=44)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a target and a draft that are tiny, and a tokenizer in each."""
    path = tmp_path_factory.mktemp("models")
    for name, model in zip(FOLDERS, models(), strict=True):
        tiny_models.save(path / name, model)
    return path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In that directory; kernels by their references and no second process: both are tested
    elsewhere."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(build, "choose_lane", lambda config: "inline")
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one namespace, as a reader would run them."""
    target, draft = models()
    names: dict[str, Any] = {
        name: getattr(saguaro_runtime, name) for name in saguaro_runtime.__all__
    }
    names |= {
        "torch": torch,
        "target": target,
        "draft": draft,
        "tokenizer": tiny_models.tokenizer(),
    }
    for line, text in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + text, page, "exec"), names)


def test_pages_have_blocks() -> None:
    assert {page for page in PAGES if blocks(page, "python")} >= {"README.md", "docs/embedding.md"}


def test_verify_is_embedded_in_under_30_lines() -> None:
    _, text = blocks("docs/embedding.md", "python")[0]
    assert "verify(" in text and len(text.splitlines()) < 30


def commands() -> list[tuple[str, str]]:
    """(where, line) of every `saguaro ...` in a shell block and in the commands' own examples."""
    found = [(page, line) for page in PAGES for _, text in blocks(page, "bash")
             for line in text.splitlines()]  # fmt: skip
    for name, command in cli.COMMANDS.items():
        module = __import__(command.module, fromlist=["EXAMPLES"])
        found += [(name, line) for line in module.EXAMPLES.splitlines()]
    lines = ((where, re.split(r" {3,}|\s#| && ", line.strip())) for where, line in found)
    return [
        (where, part) for where, parts in lines for part in parts if part.startswith("saguaro ")
    ]


@pytest.mark.parametrize(("where", "line"), commands())
def test_command_lines_are_valid(where: str, line: str) -> None:
    arguments = shlex.split(re.split(r"[|>]", line)[0])[1:]
    if arguments[0] != "bench":
        cli.command_parser(arguments[:1]).parse_args(arguments)


def run_example(name: str, *arguments: str) -> dict[str, Any]:
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("embed_in_your_engine.py", (), "target's own"),
        ("custom_model.py", (), "tokens per round"),
        ("generate.py", FOLDERS, ""),
        ("mixed_batch.py", FOLDERS, "tokens per round"),
        ("read_metrics.py", FOLDERS, "hit rate"),
        ("two_gpus.py", (*FOLDERS, "cpu", "cpu"), "overlap"),
    ],
)
def test_examples_run(
    name: str, arguments: tuple[str, ...], words: str, here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_example(name, *arguments)
    printed = capsys.readouterr().out
    assert words in printed and printed.strip()


def test_the_embedding_example_uses_the_kernels_alone() -> None:
    text = (ROOT / "examples" / "embed_in_your_engine.py").read_text()
    assert len(text.splitlines()) <= 150
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {"torch", "saguaro_kernels"}


def test_events_are_streamed(here: Path) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "stream_events.py"))
    with saguaro_runtime.Engine(*(f"./{name}" for name in FOLDERS)) as engine:
        server = names["HTTPServer"](("127.0.0.1", 0), names["handler"](engine))
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/?prompt=once"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            events = response.read().decode().split("\n\n")
        thread.join()
        server.server_close()
    assert events[-2] == 'data: {"done": true}' and events[0].startswith('data: {"text": ')


def test_every_example_is_run_here() -> None:
    tested = Path(__file__).read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in tested, path
