"""The plots, from the committed results: `python -m bench plots [--check]`.

    throughput   tokens/s against the time of a token, over batch        results/end_to_end.json
    hit_rates    hit rate against temperature, per ranking               results/hit_rates.json
    downweight   acceptance against hit rate, over Saguaro's C           results/downweight.json
    timeline     a few rounds: who does what when                        results/scripted.json

A picture carries the digest of the results it was drawn from, so that --check (exit code 1) finds
those that are out of date or missing without drawing them again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report

RESULTS = report.HERE / "results"
PICTURES = report.HERE.parent / "docs" / "plots"
_KEY = b"Results\0"


@dataclass(frozen=True)
class Plot:
    """One picture: the file it is drawn from, what it shows, and who draws it."""

    data: str
    caption: str
    draw: Callable[[Any, Any], None]
    """(contents of the file, matplotlib figure)."""
    size: tuple[float, float] = (7.0, 4.0)


def throughput(found: dict[str, Any], figure: Any) -> None:
    """One panel per temperature, one line per method, one point per batch."""
    shown = ("AR", "AR, 2 threads", "SD", "SD, 2 threads", "SSD", "SSD, auto")
    rows = [row for row in found["rows"] if row["variant"] in shown]
    temperatures = sorted({row["temperature"] for row in rows})
    axes = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    for axis, temperature in zip(axes, temperatures, strict=True):
        for variant in shown:
            its = [
                row for row in rows
                if (row["variant"], row["temperature"]) == (variant, temperature)
            ]  # fmt: skip
            its.sort(key=lambda row: row["batch"])
            x = [1e3 * row["batch"] / row["tokens_per_s"] for row in its]
            axis.plot(x, [row["tokens_per_s"] for row in its], marker="o", label=variant)
            if variant == "SSD":
                for row, at in zip(its, x, strict=True):
                    axis.annotate(f"batch {row['batch']}", (at, row["tokens_per_s"]), fontsize=7)
        axis.set(title=f"T = {temperature:g}", xlabel="ms per token of a request")
    axes[0].set_ylabel("tokens/s, all requests")
    axes[-1].legend(fontsize=7)


def hit_rates(found: dict[str, Any], figure: Any) -> None:
    """One panel per pair, one line per ranking; the allocation that finds most."""
    cells = [cell for cell in found["rates"] if cell["allocation"] == "best"]
    pairs = list(dict.fromkeys(cell["pair"] for cell in cells))
    axes = figure.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    for axis, pair in zip(axes, pairs, strict=True):
        for ranking in dict.fromkeys(cell["ranking"] for cell in cells):
            its = [c for c in cells if (c["pair"], c["ranking"]) == (pair, ranking)]
            its.sort(key=lambda cell: cell["temperature"])
            x, y = [c["temperature"] for c in its], [c["hit_rate"] for c in its]
            spreads = _spreads(y, [cell["rounds"] for cell in its])
            axis.errorbar(x, y, yerr=spreads, marker="o", capsize=3, label=ranking)
        axis.set(title=f"{pair} draft", xlabel="temperature", ylim=(0, 1))
    settings = found["settings"]
    axes[0].set_ylabel(f"hit rate, K = {settings['k']}, {settings['branches']} branches")
    axes[-1].legend(fontsize=8, title="ranking")


def _spreads(shares: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Half the 95 % interval of shares of so many."""
    pairs = zip(shares, counts, strict=True)
    return [1.96 * (p * (1 - p) / max(n, 1)) ** 0.5 for p, n in pairs]


def downweight(found: dict[str, Any], figure: Any) -> None:
    """One line per ranking, one point per C."""
    axis = figure.subplots()
    for ranking in dict.fromkeys(row["ranking"] for row in found["rows"]):
        its = [row for row in found["rows"] if row["ranking"] == ranking]
        its.sort(key=lambda row: row["factor"])
        x, y = [row["acceptance"] for row in its], [row["hit_rate"] for row in its]
        judged = [row["rounds"] * (row["tokens_per_round"] - 1) / row["acceptance"] for row in its]
        axis.errorbar(
            x, y, xerr=_spreads(x, judged), yerr=_spreads(y, [row["rounds"] for row in its]),
            marker="o", linewidth=0.8, capsize=2, label=f"ranked by {ranking}",
        )  # fmt: skip
        for row in its:
            axis.annotate(f"C = {row['factor']:g}", (row["acceptance"], row["hit_rate"]),
                          fontsize=7, textcoords="offset points", xytext=(4, 4))  # fmt: skip
    axis.set(xlabel="acceptance of a draft", ylabel="hit rate")
    axis.legend(fontsize=8)


_COLOURS = {
    "verify": "#f4b76b", "look_ahead": "#9ecae1", "draft_step": "#d94801", "promote": "#31a354",
}  # fmt: skip
"""What a stranger has to tell apart; what happens inside these is left out."""


def timeline(found: dict[str, Any], figure: Any) -> None:
    """The last rounds of the first scripted pair."""
    axis = figure.subplots()
    lanes = ["target", "draft"]
    begin = min(start for _, _, start, _ in found["timeline"])
    for name, colour in _COLOURS.items():
        for height, lane in enumerate(lanes):
            bars = [
                (1e3 * (start - begin), 1e3 * (end - start))
                for its_lane, its_name, start, end in found["timeline"]
                if (its_lane, its_name) == (lane, name)
            ]
            label = {"look_ahead": "drafting ahead", "draft_step": "redrafting after a miss",
                     "promote": "taking the prepared chain"}.get(name, "verifying")  # fmt: skip
            axis.broken_barh(bars, (height - 0.35, 0.7), facecolors=colour,
                             edgecolors="white", label="" if height else label)  # fmt: skip
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.35), ncol=4, fontsize=7, frameon=False)


PLOTS = {
    "throughput": Plot("end_to_end", "Throughput against latency, over batch", throughput,
                       (9.0, 3.4)),
    "hit_rates": Plot("hit_rates", "Hit rate against temperature, by ranking", hit_rates,
                      (7.0, 3.4)),
    "downweight": Plot("downweight", "Acceptance against hit rate, over Saguaro's C", downweight,
                       (5.5, 3.6)),
    "timeline": Plot("scripted", "A few rounds: the draft works while the target verifies",
                     timeline, (9.0, 2.3)),
}  # fmt: skip


def digest(path: Path) -> str:
    """What a picture remembers of its data."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamp(path: Path, value: str) -> None:
    """Add `value` to a PNG as a text chunk, after its header."""
    data = path.read_bytes()
    text = b"tEXt" + _KEY + value.encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    end = 8 + 25  # the signature, and the header's chunk
    path.write_bytes(data[:end] + chunk + data[end:])


def stamped(path: Path) -> str:
    """The value that `stamp` added; "" where there is none."""
    data = path.read_bytes()
    at = data.find(b"tEXt" + _KEY)
    if at < 0:
        return ""
    (length,) = struct.unpack(">I", data[at - 4 : at])
    return data[at + 4 + len(_KEY) : at + 4 + length].decode()


def outdated(name: str) -> str:
    """Why this picture has to be drawn (again); "" where it is current, or has no data yet."""
    data, picture = RESULTS / f"{PLOTS[name].data}.json", PICTURES / f"{name}.png"
    if not data.exists():
        return ""
    if not picture.exists():
        return "missing"
    return "" if stamped(picture) == digest(data) else "drawn from other results"


def draw(name: str) -> Path:
    """Draw it and stamp it; its data is there.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plot = PLOTS[name]
    data, picture = RESULTS / f"{plot.data}.json", PICTURES / f"{name}.png"
    figure = Figure(figsize=plot.size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plot.caption, fontsize=9)
    plot.draw(json.loads(data.read_text(encoding="utf-8")), figure)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    stamp(picture, digest(data))
    return picture


def markdown() -> str:
    """The pictures that are there, for the README."""
    return "".join(
        f"![{plot.caption}](docs/plots/{name}.png)\n"
        for name, plot in PLOTS.items()
        if (PICTURES / f"{name}.png").exists()
    )


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring; exit code 2 without matplotlib."""
    parser = argparse.ArgumentParser(
        prog="python -m bench plots", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}")
    parser.add_argument("--check", action="store_true", help="only say which are out of date")
    options = parser.parse_args(arguments)
    wrong = [name for name in options.names if name not in PLOTS]
    if wrong:
        parser.error(f"no plot {wrong[0]!r}, want {', '.join(PLOTS)}")
    bad = 0
    for name in options.names or PLOTS:
        data = RESULTS / f"{PLOTS[name].data}.json"
        if not data.exists():
            print(f"{name}: no data yet; {_SOURCE[PLOTS[name].data]} measures it")
        elif options.check:
            reason = outdated(name)
            bad += bool(reason)
            print(f"{name}: {reason or 'current'}")
        else:
            try:
                print(draw(name))
            except ImportError:
                print('plots: matplotlib is missing; run: pip install "saguaro-ssd[bench]"')
                return 2
    return int(bad > 0)


_SOURCE = {
    name: f"python -m bench {name} --json bench/results/{name}.json"
    for name in (plot.data for plot in PLOTS.values())
}
