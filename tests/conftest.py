"""What every test run needs before the first import, and the fixtures shared by all folders."""

from __future__ import annotations

import glob
import os

# Read by triton, OpenMP and transformers when they are imported, so set above every import.
# On every machine the kernels run in triton's interpreter, on CPU tensors, and GPUs are hidden: the
# suite is about the CPU, and GPUs that are there would mix with those that tests pretend.
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ["TRITON_INTERPRET"] == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

SHM = Path("/dev/shm")


def pytest_configure() -> None:
    if os.environ["TRITON_INTERPRET"] == "1":
        from bench import interpreter

        interpreter.install()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests put their tensors: "cpu", and "cuda" with TRITON_INTERPRET=0 on a GPU."""
    import torch

    interpreted = os.environ["TRITON_INTERPRET"] == "1"
    return "cuda" if torch.cuda.is_available() and not interpreted else "cpu"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaves a child process or a shared-memory file behind."""
    children, files = _children(os.getpid()), _shared_memory()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while left := _leaks(children, files):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind after the test: {', '.join(left)}")
        time.sleep(0.05)


def _leaks(children: set[int], files: set[str]) -> list[str]:
    processes = [f"process {pid} ({_command(pid)})" for pid in _children(os.getpid()) - children]
    new = _shared_memory() - files
    if new:
        new -= _mapped_elsewhere(new)
    return processes + [f"{SHM}/{name}" for name in sorted(new)]


def _shared_memory() -> set[str]:
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


def _processes() -> dict[int, int]:
    """Every process that still runs, with its parent."""
    parents = {}
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            # "pid (command) state parent ...": the command may hold spaces and brackets
            state, parent = Path(folder, "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(folder[6:])] = int(parent)
    return parents


def _children(pid: int) -> set[int]:
    """Descendants of `pid`, without multiprocessing's tracker, which lives as long as it does."""
    parents = _processes()
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return {
        child
        for child in family - {pid}
        if not any(name in _command(child) for name in ("resource_tracker", "forkserver"))
    }


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "ended"


def _mapped_elsewhere(names: set[str]) -> set[str]:
    """Those of `names` that a process outside this test run has open: not this test's leak."""
    mine = {os.getpid(), *_children(os.getpid())}
    found = set()
    for pid in _processes():
        try:
            maps = "" if pid in mine else Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {name for name in names if f"{SHM}/{name}" in maps}
    return found
