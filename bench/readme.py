"""The tables of README.md and docs/measured.md, made from the committed results.

    python -m bench readme            writes them
    python -m bench readme --check    says whether they are current

A table stands between `<!-- bench: NAME -->` and `<!-- /bench: NAME -->`; NAME is a file of
`bench/results` that `python -m bench ... --json` wrote, or "paper", which is computed. Plots that
are out of date are drawn, too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saguaro_runtime.demo import report as demo_report

from . import end_to_end, equality, hit_rates, paper, plots, report, scripted

PAGES = (report.HERE.parent / "README.md", report.HERE.parent / "docs" / "measured.md")
RESULTS = report.HERE / "results"
_RULES = ("verify.token", "verify.block", "verify.greedy", "verify.coupled")
_MARK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- /bench: \2 -->)", re.DOTALL)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def traffic(path: Path = RESULTS / "traffic.json") -> str:
    """Verification beside the peers, ours in bold, the least traffic first."""
    results = report.read_json(path)
    headers, rows = report.peer_rows(results)
    cells = []
    for row in rows:
        text = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row]
        ours = row[1].startswith("saguaro")
        cells.append([f"**{cell}**" if ours else cell for cell in text])
    machine = json.loads(path.read_text())["machine"]
    shape = report.peers()["shape"]
    return (
        f"\n{markdown(headers, cells)}\n"
        f"One request, K = {shape['K']}, V = {shape['V']}, bf16 logits; requested bytes, counted "
        f"in Triton's interpreter on {machine['date']} (triton {machine['triton']}, commit "
        f"{machine['commit'][:12]}) by `python -m bench traffic`. No time was measured. The bound "
        "of block is for computing every residual: a scan that stops early may go below it."
        f"{_of_batches(results)}\n"
    )


def _of_batches(results: Sequence[report.Result]) -> str:
    """MB per request of 8, the most over the temperatures."""
    most: dict[str, float] = {}
    for r in results:
        if r.provider == "ours" and r.shape.startswith("B8-K7") and r.case in _RULES:
            moved = ((r.bytes_read or 0) + (r.bytes_written or 0)) / 8e6
            most[r.case] = max(moved, most.get(r.case, 0.0))
    figures = (f"{case.partition('.')[2]} {moved:.2f}" for case, moved in most.items())
    return f" Of 8 requests, MB for each: {', '.join(figures)}." if most else ""


def demo(path: Path = RESULTS / "demo.json") -> str:
    """The table that `saguaro demo` printed, and what it ran on."""
    found = json.loads(path.read_text(encoding="utf-8"))
    machine, versions = found["machine"], found["versions"]
    return (
        f"\n```text\n{demo_report.render(found)}\n```\n\n"
        f"`saguaro demo --json`, {machine['date']}, {machine['cores']} cores of "
        f"{machine['processor']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}.\n"
    )


def headline(path: Path = RESULTS / "demo.json") -> str:
    """The same run in a sentence, with what speaks against SSD."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rate = {name: f"{row['tokens_per_s']:.1f}" for name, row in found["methods"].items()}
    speed = found["speed"]
    return (
        f"SSD {rate['ssd']} tokens/s, {speed['ssd_vs_sd']:.2f} times standard speculative decoding "
        f"({rate['sd']}) and {speed['ssd_vs_ar']:.2f} times plain decoding with one core "
        f"({rate['ar']}), {speed['ssd_vs_ar_2_threads']:.2f} times plain decoding with both "
        f"({rate['ar_2_threads']}); `saguaro demo`, {_taken(found['machine'])}.\n"
    )


def texts(path: Path = RESULTS / "equality.json") -> str:
    """What `python -m bench equality` found."""
    found = json.loads(path.read_text(encoding="utf-8"))
    table = equality.render(found)
    return f"\n```text\n{table}\n```\n\n`python -m bench equality`, {found['date']}.\n"


def scripted_runs(path: Path = RESULTS / "scripted.json") -> str:
    """What `python -m bench scripted` found."""
    found = json.loads(path.read_text(encoding="utf-8"))
    table = scripted.render([scripted.Row(**row) for row in found["rows"]])
    return f"\n```text\n{table}\n```\n\n`python -m bench scripted`, {_taken(found['machine'])}.\n"


def paper_rates() -> str:
    """What `python -m bench paper` prints without a pair: nothing of it is measured."""
    return f"\n```text\n{paper.predicted()}\n```\n\n`python -m bench paper`.\n"


def end_to_end_runs(path: Path = RESULTS / "end_to_end.json") -> str:
    """What `python -m bench end_to_end` found."""
    found, rows = end_to_end.read(path)
    its = found["settings"]
    return (
        f"\n```text\n{end_to_end.render(rows)}\n```\n\n`python -m bench end_to_end`, "
        f"{its['tokens']} tokens per prompt, k {its['k']}, {its['branches']} branches, "
        f"{its['dtype']}; {_taken(found['machine'])}.\n"
    )


def rates(path: Path = RESULTS / "hit_rates.json") -> str:
    """What `python -m bench hit_rates` found."""
    found = json.loads(path.read_text(encoding="utf-8"))
    its = found["settings"]
    return (
        f"\n```text\n{hit_rates.summary(found)}\n```\n\n`python -m bench hit_rates`, "
        f"{its['prompts']} prompts of {its['tokens']} tokens, k {its['k']}, {its['branches']} "
        f"branches, rule block, {its['dtype']}; {_taken(found['machine'])}.\n"
    )


def _taken(machine: dict[str, Any]) -> str:
    return f"{machine['date']}, {machine['cores']} cores of {machine['processor']}"


SECTIONS = {
    "traffic": traffic,
    "demo": demo,
    "headline": headline,
    "texts": texts,
    "plots": plots.markdown,
    "scripted": scripted_runs,
    "paper": paper_rates,
    "end_to_end": end_to_end_runs,
    "hit_rates": rates,
}


def section(name: str) -> str:
    """What stands between the marks of `name`; that there is nothing yet, where so it is."""
    try:
        return SECTIONS[name]()
    except FileNotFoundError as error:
        return f"\nNot measured yet: there is no {Path(error.filename).name}.\n"


def regenerate(text: str) -> str:
    """`text` with every marked table made anew."""
    return _MARK.sub(lambda match: match[1] + section(match[2]) + match[3], text)


def main(arguments: Sequence[str]) -> int:
    """Rewrite the tables; with --check only say whether they are current (exit 1: no)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench readme", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if missing := [str(page) for page in PAGES if not page.exists()]:
        print(f"no {', '.join(missing)}: run this in the repository")
        return 2
    drawn = [name for name in plots.PLOTS if plots.outdated(name)]
    if drawn and not options.check and plots.main(drawn):
        return 2
    stale = []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = regenerate(before)
        if before != after:
            stale.append(page.name)
            if not options.check:
                page.write_text(after, encoding="utf-8")
    if options.check:
        print(f"{', '.join(stale)}: run python -m bench readme" if stale else "current")
    return int(options.check and bool(stale))
