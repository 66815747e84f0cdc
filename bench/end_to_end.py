"""Tokens per second of a whole engine, method beside method, in one interleaved run.

For each temperature and batch size every variant decodes the same prompts in turn: plain decoding,
SD, SSD with its defaults and with each rule, ranking and fallback changed alone, and transformers'
own assisted generation and prompt lookup (one prompt at a time, which is all they take). The table
gives ratios; the spread is that of the single batches. What Theorem 7 makes of the same run's times
stands beside each SSD line. Texts are compared with the variant that must give the same: plain
decoding at temperature 0. In bfloat16 rounding decides near ties, so a few differ; `python -m bench
equality` is the check in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saguaro_runtime import EngineConfig, SamplingParams
from saguaro_runtime.demo.measure import AssistedRun, Batch, Pair, Run, measure, opened
from saguaro_runtime.demo.report import Variant, predict, versions

from . import report
from .equality import chat_prompts, code_prompts

TEMPERATURES = (0.0, 0.6, 1.0)
BATCHES = (1, 4, 8)


@dataclass(frozen=True)
class Row:
    """One variant in one cell. Ratios are medians over the batches, with the lowest and highest."""

    temperature: float
    batch: int
    variant: str
    tokens_per_s: float
    vs_ar: tuple[float, float, float]
    vs_sd: tuple[float, float, float]
    theorem_7: float | None
    tokens_per_round: float
    hit_rate: float
    overlap: float
    per_core: float
    same_texts: str
    speculation: str


def variants(*, quick: bool, k: int, branches: int) -> list[Variant]:
    """What is compared; the methods proper give target and draft one core each."""
    ssd = EngineConfig(method="ssd", k=k, branches=branches, threads=1)
    found = [
        Variant("AR", replace(ssd, method="ar")),
        Variant("AR, 2 threads", replace(ssd, method="ar", threads=2)),
        Variant("SD", replace(ssd, method="sd")),
        Variant("SD, 2 threads", replace(ssd, method="sd", threads=2, lane="inline")),
        Variant("SSD", ssd),
    ]
    if quick:
        return found
    for name, values in (
        ("rule", ("token", "coupled")),
        ("ranking", ("probability", "noise")),
        ("fallback", ("immediate_retry", "batched_retry", "partial_accept")),
    ):
        for value in values:
            found.append(Variant(f"SSD, {name} {value}", replace(ssd, **{name: value})))
    return found


def cell(
    runs: Mapping[str, Run],
    compared: Sequence[Variant],
    batches: Sequence[Batch],
    params: SamplingParams,
) -> list[Row]:
    """All variants on the same batches of one size, at one temperature."""
    found = measure(runs, compared, batches, params, lambda: None)
    return [
        Row(
            temperature=params.temperature,
            batch=len(batches[0]),
            variant=variant.name,
            tokens_per_s=found[variant.name]["tokens_per_s"],
            vs_ar=ratio(found[variant.name], found["AR"]),
            vs_sd=ratio(found[variant.name], found["SD"]),
            theorem_7=predict(found["SD"], found[variant.name], variant.config)
            if variant.config.method == "ssd" and found[variant.name]["tokens_per_round"]
            else None,
            tokens_per_round=found[variant.name]["tokens_per_round"],
            hit_rate=found[variant.name]["hit_rate"],
            overlap=found[variant.name]["overlap"],
            per_core=found[variant.name]["tokens_per_s"] / cores(variant.config),
            same_texts=same(found[variant.name]["texts"], found["AR"]["texts"])
            if params.temperature == 0
            else "-",
            speculation=found[variant.name].get("speculation", "-"),
        )
        for variant in compared
    ]


def ratio(row: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of the rates of the same batches: median, lowest, highest."""
    each = [a / b for a, b in zip(row["rates"], base["rates"], strict=True)]
    return statistics.median(each), min(each), max(each)


def cores(config: EngineConfig) -> int:
    """Cores that a variant keeps for itself."""
    threads = config.threads or 1
    return threads + (config.method != "ar" and config.lane != "inline")


def same(texts: Sequence[list[int]], wanted: Sequence[list[int]]) -> str:
    """How many texts are those of plain decoding."""
    equal = sum(a == b for a, b in zip(texts, wanted, strict=True))
    return f"{equal}/{len(wanted)}"


def batches_of(prompts: Sequence[list[int]], size: int, count: int) -> list[list[list[int]]]:
    """`count` batches of `size` prompts, taken in turn and from the front again."""
    taken = [prompts[i % len(prompts)] for i in range(size * count)]
    return [taken[i : i + size] for i in range(0, len(taken), size)]


def run(pair: Pair, prompts: Sequence[list[int]], options: argparse.Namespace) -> Iterator[Row]:
    """The rows, cell by cell, as they are measured."""
    compared = variants(quick=options.quick, k=options.k, branches=options.branches)
    inline = EngineConfig(method="sd", threads=2, lane="inline")
    others = {
        "transformers' assisted": AssistedRun(pair.target, assistant_model=pair.draft),
        "transformers' prompt lookup": AssistedRun(pair.target, prompt_lookup_num_tokens=3),
    }
    with opened(pair, compared) as runs:
        for temperature in (0.0, 1.0) if options.quick else TEMPERATURES:
            for size in (1,) if options.quick else BATCHES:
                here = list(compared)
                if size == 1:
                    here += [Variant(name, inline) for name in others]
                # Every batch is the same work: no text ends early.
                params = SamplingParams(options.tokens, temperature, ignore_eos=True)
                count = max(2, options.batches // size)
                yield from cell(runs | others, here, batches_of(prompts, size, count), params)


def render(rows: Sequence[Row]) -> str:
    """One line per variant and cell."""
    headers = ("T", "batch", "variant", "tokens/s", "vs AR", "vs SD", "Theorem 7", "tokens/round")
    headers += ("hit rate", "overlap", "tokens/s/core", "same texts")
    spread = lambda its: f"{its[0]:.2f} ({its[1]:.2f}-{its[2]:.2f})"  # noqa: E731
    lines = [
        (f"{row.temperature:g}", str(row.batch), row.variant, f"{row.tokens_per_s:.1f}")
        + (spread(row.vs_ar), spread(row.vs_sd))
        + (None if row.theorem_7 is None else f"{row.theorem_7:.2f}",)
        + (f"{row.tokens_per_round:.2f}" if row.tokens_per_round else None,)
        + tuple(
            f"{value:.2f}" if row.variant.startswith("SSD") else None
            for value in (row.hit_rate, row.overlap)
        )
        + (f"{row.per_core:.1f}", row.same_texts)
        for row in rows
    ]
    notes = sorted(
        {
            f"{row.variant}, T = {row.temperature:g}, batch {row.batch}: {row.speculation}"
            for row in rows
            if row.speculation not in ("on", "off", "-")
        }
    )
    return "\n".join([report.table(headers, lines), *notes])


def main(arguments: Sequence[str]) -> int:
    """`python -m bench end_to_end`: prints the table; 0 when it was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench end_to_end", description=__doc__)
    add = parser.add_argument
    add("--target", metavar="PATH", help="default: the demo's pair")
    add("--draft", metavar="PATH")
    add("--quick", action="store_true", help="batch 1, T = 0 and 1, the defaults only: 3 minutes")
    add("--batches", type=int, default=8, help="of one prompt; fewer of larger ones (%(default)s)")
    add("--tokens", type=int, default=48, help="per prompt (%(default)s)")
    add("--k", type=int, default=2)
    add("--branches", type=int, default=12)
    add("--json", type=Path, metavar="FILE", help="rewritten after every cell")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches, options.tokens = min(options.batches, 4), min(options.tokens, 32)
    from saguaro_runtime.cli.doctor import faster_dtype
    from saguaro_runtime.demo import load
    from saguaro_runtime.demo.model import load_pair

    paths = (options.target, options.draft) if options.target else load_pair()
    dtype = faster_dtype()
    pair = load(*paths, dtype)
    both = zip(chat_prompts(pair.tokenizer, 8), code_prompts(pair.tokenizer, 8), strict=True)
    prompts = list(itertools.chain.from_iterable(both))
    rows: list[Row] = []
    for row in run(pair, prompts, options):
        rows.append(row)
        if options.json:
            found = {"machine": report.machine(), "versions": versions(), "dtype": dtype}
            found |= {"tokens": options.tokens, "k": options.k, "branches": options.branches}
            rows_json = [asdict(its) for its in rows]
            options.json.write_text(json.dumps(found | {"rows": rows_json}, indent=1) + "\n")
    print(render(rows))
    return 0
