"""Result rows, and their tables, CSV, JSON and plots."""

from __future__ import annotations

import csv
import json
import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from saguaro_runtime.demo import report as demo_report

from . import files

HERE = Path(__file__).parent
BANDWIDTHS = {"H100 SXM": 3.35e12, "H200": 4.8e12, "A100 80GB": 2.04e12, "MI300X": 5.3e12}


@dataclass(frozen=True)
class Result:
    """One provider on one shape. Times are None without a GPU; predicted_us is no measurement."""

    case: str
    provider: str
    shape: str
    dtype: str
    bound_bytes: int
    launches: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    syncs: int | None = None
    wide_writes: int | None = None
    ratio: float | None = None
    limit: float | None = None
    """The most that `ratio` may be; None where any may."""
    predicted_us: float | None = None
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    gb_per_s: float | None = None
    percent_of_roof: float | None = None
    meets_bound: bool | None = None
    note: str = ""


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if 0 < abs(value) < 0.01:
            return f"{value:.{-math.floor(math.log10(abs(value)))}f}"
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 3) -> str:
    """Columns aligned, the first `left` of them to the left."""
    cells = [list(headers)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _shapes(results: Sequence[Result]) -> str:
    return (
        "Shapes: R rows or B requests, V ids of the vocabulary, K drafts, T temperature, F largest "
        "ids kept, M branches,\nL tokens of trunk, N of history, Hq and Hkv heads of dimension D; "
        f"{', '.join(dict.fromkeys(r.dtype for r in results))}."
    )


def traffic_table(results: Sequence[Result], machine: str) -> str:
    """What a run without a GPU prints."""
    headers = ("case", "provider", "shape", "launches", "host syncs", "MB read", "MB written",
               "MB bound", "ratio to bound", "limit", "within", "predicted us")  # fmt: skip
    rows = []
    for r in results:
        mb = [None if b is None else b / 1e6 for b in (r.bytes_read, r.bytes_written)]
        rows.append(
            (r.case, r.provider, r.shape, r.launches, r.syncs, *mb, r.bound_bytes / 1e6, r.ratio)
            + (r.limit, r.meets_bound, r.predicted_us)
        )
    notes = sorted({f"{r.case}: {r.note}" for r in results if r.note and r.meets_bound is None})
    footer = (
        f"{_shapes(results)}\n"
        "Counted: of one call, kernels launched, waits of the host for the device, and the MB that "
        "loads and stores ask for.\n"
        "ours (this package's kernels) in Triton's interpreter, torch (their reference in plain "
        "torch) op by op;\nwhat the reference of the cache keeps in a dictionary is not counted.\n"
        "MB bound: what inputs and outputs have to be read and written once (bench/cases.py). Of "
        "rules that may stop early,\nwhat the usual case reads: some stop sooner and go below 1. "
        "limit: the most that ours may have of it; within: the same,\nand of launches, and no "
        "host sync. NO fails the run.\n"
        "predicted us: MB moved / "
        f"{BANDWIDTHS[machine] / 1e12:g} TB/s ({machine}); a prediction, nothing was timed."
    )
    return "\n".join([table(headers, rows), *notes, footer])


def time_table(results: Sequence[Result], roof: float, floor_us: float) -> str:
    """What a run on a GPU prints."""
    headers = ("case", "provider", "shape", "p20 us", "p50 us", "p80 us", "GB/s", "% of roof",
               "launches")  # fmt: skip
    rows = [
        (r.case, r.provider, r.shape, r.p20_us, r.p50_us, r.p80_us, r.gb_per_s)
        + (r.percent_of_roof, r.launches)
        for r in results
    ]
    notes = sorted({f"{r.case}: {r.note}" for r in results if r.note})
    footer = (
        f"{_shapes(results)}\n"
        "ours: this package's kernels. torch: their reference in plain torch.\n"
        "Timed: one call, in graph replays over rotated inputs, providers in turn; percentiles. "
        "Counted: launches.\nWhat cannot be captured is timed call by call, the host's time "
        "included. GB/s is the least that any implementation moves, over p50. Measured "
        f"roof {roof / 1e9:.0f} GB/s (copy); an empty launch takes {floor_us:.1f} us."
    )
    return "\n".join([table(headers, rows), *notes, footer])


def peers() -> dict[str, Any]:
    """The peers' traffic, counted on their own code; see the file's note."""
    return json.loads((HERE / "peers.json").read_text())


def peer_rows(results: Sequence[Result]) -> tuple[Sequence[str], list[tuple]]:
    """Ours beside the peers, as headers and rows: one request, K = 7, V = 128256, bf16."""
    data = peers()
    rows = []
    for r in results:
        rule = r.case.partition(".")[2].partition("-")[0]
        if not r.case.startswith("verify.") or r.provider != "ours":
            continue
        if r.bytes_read is None or r.bytes_written is None:
            continue
        if not r.shape.startswith("B1-K7-V128256"):
            continue
        moved = (r.bytes_read + r.bytes_written) / 1e6
        bound = data["bound_mb"].get("block" if rule == "hsd" else rule)
        ratio = moved / bound if bound else r.ratio
        temperature, _, *worst = r.shape.partition("V128256-T")[2].split("-")
        label = f"saguaro, T = {float(temperature):g}{', worst case' if worst else ''}"
        label += ": is block (docs/theory.md, The rules)" if rule == "hsd" else ""
        row = (r.launches, r.syncs, r.bytes_read / 1e6, r.bytes_written / 1e6, ratio)
        rows.append((rule, label, "counted now", *row))
    for peer in data["verify"]:
        row = (peer["launches"], peer["syncs"], peer["read_mb"], peer["written_mb"], peer["ratio"])
        rows.append((peer["rule"], peer["peer"], "published", *row))
    order = ["token", "block", "hsd", "greedy", "coupled"]
    rows.sort(key=lambda row: (order.index(row[0]), row[7]))
    headers = ("rule", "implementation", "source", "launches", "syncs", "MB read", "MB written")
    return (*headers, "ratio to bound"), rows


def peer_table(results: Sequence[Result]) -> str:
    """`peer_rows` as text."""
    return table(*peer_rows(results))


def machine() -> dict[str, Any]:
    """Where, when and with what the numbers were taken."""
    found = demo_report.machine() | {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        found[package] = version(package)
    import torch

    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        )
        found["commit"] = git.stdout.strip() or "unknown"
    except OSError:  # no git here
        found["commit"] = "unknown"
    return found


def write_json(path: Path, results: Sequence[Result]) -> None:
    """The rows, with the machine, the versions and the commit."""
    data = {"machine": machine(), "results": [asdict(r) for r in results]}
    files.write_json(path, data)


def read_json(path: Path) -> list[Result]:
    """The rows of a file of `write_json`."""
    return [Result(**row) for row in json.loads(path.read_text())["results"]]


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One line per row, with a header."""
    with files.whole(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(r) for r in results)


def plot(path: Path, results: Sequence[Result]) -> None:
    """Bars by case and shape: microseconds where measured, else the ratio to the bound. A PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = any(r.p50_us is not None for r in results)
    values = [(r.p50_us if timed else r.ratio) for r in results]
    kept = [(r, v) for r, v in zip(results, values, strict=True) if v is not None]
    figure, axis = pyplot.subplots(figsize=(9, 0.6 + 0.28 * len(kept)), constrained_layout=True)
    colours = {p: f"C{i}" for i, p in enumerate(dict.fromkeys(r.provider for r, _ in kept))}
    labels = [f"{r.case} {r.shape} {r.provider}" for r, _ in kept]
    axis.barh(labels, [v for _, v in kept], color=[colours[r.provider] for r, _ in kept])
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("p50, microseconds" if timed else "bytes moved / lower bound")
    if not timed:
        axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    with files.whole(path) as part:
        figure.savefig(part, dpi=120, format="png")
    pyplot.close(figure)
