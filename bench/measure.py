"""Runs a case: its traffic without a GPU, its times with one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import report, timing
from .registry import Case, Shape, shape_id
from .report import BANDWIDTHS, Result
from .traffic import Meter

ROOT = Path(__file__).resolve().parents[1]
L2_BYTES = 256 << 20
"""Rotated inputs exceed this, so that no replay finds its rows in a cache."""


def has_tests() -> bool:
    """True in the repository; an installed package comes without the tests that gate it."""
    return (ROOT / "setup.py").is_file() and (ROOT / "tests").is_dir()


def gates(nodes: Sequence[str]) -> dict[str, str]:
    """Run the gating tests; those that are red, and why."""
    nodes = list(dict.fromkeys(nodes))
    # Together they start once. Which of them is red is asked only if one is.
    if len(nodes) > 1 and _pytest(nodes).returncode == 0:
        return {}
    return {node: reason for node in nodes if (reason := gate(node))}


@functools.cache
def gate(node: str) -> str:
    """Run the gating test, once: "" when it passed, else why it counts as red."""
    path = ROOT / node.partition("::")[0]
    if not path.exists():
        return f"no {node} here: the tests are in the repository"
    result = _pytest([node])
    if result.returncode == 0:
        return ""
    last = (result.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    return f"{node} is red: {last}"


def _pytest(nodes: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In one process: a gate is over before others would have started."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *nodes]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def measure_traffic(
    case: Case, shape: Shape, dtype: torch.dtype, machine: str, providers: Sequence[str]
) -> list[Result]:
    """Count what each provider launches, reads, writes and waits for. Nothing is timed."""
    inputs = case.inputs(shape, dtype, "cpu")
    bound = int(case.bound(shape, dtype.itemsize))
    results = []
    for name in providers:
        row: dict[str, Any] = {
            "case": case.name,
            "provider": name,
            "shape": shape_id(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "bound_bytes": bound,
        }
        try:
            with Meter() as meter:
                case.providers[name](inputs)
        except Exception as error:  # noqa: BLE001  one broken provider must not end the table
            results.append(Result(**row, note=f"{name} failed: {type(error).__name__}: {error}"))
            continue
        ran = any(event.kind == "triton" for event in meter.events)
        ratio = meter.bytes_moved / bound
        filtered = "top_k" in shape or "top_p" in shape
        # The byte bar is for rows without filters: those re-read the row.
        limit = None if filtered else case.limit
        over = [
            f"{what} {value:.3g} > {most:.3g}"
            for what, value, most in (
                ("ratio to bound", ratio, limit),
                ("launches", meter.launches, case.launches + filtered),
                ("host syncs", meter.syncs, 0),
            )
            if name == "ours" and most is not None and value > most
        ]
        over += ["no Triton kernel ran"] if name == "ours" and not ran else []
        results.append(
            Result(
                **row,
                launches=meter.launches,
                bytes_read=meter.bytes_read,
                bytes_written=meter.bytes_written,
                syncs=meter.syncs,
                wide_writes=len(meter.wide_writes(shape["V"])) if "V" in shape else None,
                ratio=ratio,
                predicted_us=meter.bytes_moved / BANDWIDTHS[machine] * 1e6,
                limit=limit if name == "ours" else None,
                meets_bound=not over if name == "ours" else None,
                note="; ".join(over),
            )
        )
    return results


def copies(bound: int) -> int:
    """Copies of inputs of `bound` bytes that a timing rotates over."""
    return max(2, min(16, L2_BYTES // max(bound, 1) + 1))


def measure_times(
    case: Case, shape: Shape, dtype: torch.dtype, providers: Sequence[str], roof: float
) -> list[Result]:
    """Time each provider on the GPU, and count its launches."""
    bound = int(case.bound(shape, dtype.itemsize))
    inputs = [case.inputs(shape, dtype, "cuda")]
    inputs += [moved(inputs[0], "cuda") for _ in range(copies(bound) - 1)]
    row: dict[str, Any] = {
        "case": case.name,
        "shape": shape_id(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "bound_bytes": bound,
    }
    results, runs = [], {}
    for name in providers:
        provider = case.providers[name]
        try:
            provider(inputs[0])
            torch.cuda.synchronize()
            runs[name] = [functools.partial(provider, x) for x in inputs]
        except Exception as error:  # noqa: BLE001  one broken provider must not end the table
            note = f"{name} failed: {type(error).__name__}: {error}"[:300]
            results.append(Result(provider=name, **row, note=note))
    for name, samples in timing.time_us(runs).items():
        median = timing.percentile(samples, 0.5)
        rate = bound / (median * 1e-6)
        results.append(
            Result(
                provider=name,
                **row,
                launches=timing.kernels_launched(runs[name][0]),
                p20_us=timing.percentile(samples, 0.2),
                p50_us=median,
                p80_us=timing.percentile(samples, 0.8),
                gb_per_s=rate / 1e9,
                percent_of_roof=100 * rate / roof,
            )
        )
    return results


def with_compiled(case: Case) -> dict[str, Any]:
    """The providers, and torch.compile of the torch one (GPU only)."""
    providers = dict(case.providers)
    if "torch" in providers:
        providers["torch.compile"] = torch.compile(providers["torch"])
    return providers


def is_commit(name: str) -> bool:
    """Whether `name` is a commit of this repository."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return has_tests() and subprocess.run(git, check=False, capture_output=True).returncode == 0


def against(base: str, arguments: Sequence[str]) -> list[Result]:
    """The same measurement at another commit, in a working tree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder, "tree"), Path(folder, "base.json")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), base], check=True, capture_output=True)
        try:
            command = [sys.executable, "-m", "bench", *arguments, "--no-gate", "--json", str(out)]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True)
            return report.read_json(out) if out.exists() else []
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False, capture_output=True)


def outputs(inputs: Any, result: Any) -> list[torch.Tensor]:
    """The tensors that a call produced: its result, or those that `inputs.changed` names."""
    if result is None:
        return [operator.attrgetter(name)(inputs) for name in inputs.changed]
    if isinstance(result, torch.Tensor):
        return [result]
    fields = result if isinstance(result, tuple) else vars(result).values()
    return [value for value in fields if isinstance(value, torch.Tensor)]


def moved(value: Any, device: str) -> Any:
    """A deep copy of the inputs of a case on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if hasattr(value, "__dict__"):
        clone = copy.copy(value)
        clone.__dict__.update(moved(vars(value), device))
        return clone
    return value
