"""Tokens per second of a whole engine, method beside method, in one interleaved run.

For each temperature and batch size every variant decodes the same prompts in turn: plain decoding,
SD, SSD as configured, SSD with policy="auto" (which may go back to SD or plain decoding), and, one
prompt at a time, which is all they take, transformers' own assisted generation and prompt lookup.
SSD with another rule, ranking or fallback, one of them changed alone, joins where OPTIONS says.

The table gives ratios; the spread is that of the single batches. What Theorem 7 makes of the same
run's times stands beside each SSD line, as published and with all that a round pays: each method's
own verifications, hand-offs and the host's work, drafting ahead that outlasts a verification, and
the prompts. Texts are compared with the variant that must give the same: plain decoding at
temperature 0. In bfloat16 rounding decides near ties, so a few differ;
`python -m bench equality` is the check in float32. A run that was cut short goes on where it was:
cells that --json has, of the same settings and commit, are not measured again.
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
from saguaro_runtime.config import Fallback
from saguaro_runtime.demo.measure import AssistedRun, Batch, Pair, Run, measure, opened
from saguaro_runtime.demo.report import Variant, predict, versions
from saguaro_runtime.planner.measured import in_full as with_all_paid
from saguaro_runtime.planner.theory import sd_speed
from saguaro_runtime.policy import choose_fallback

from . import files, report
from .equality import chat_prompts, code_prompts

TEMPERATURES = (0.0, 0.6, 1.0)
BATCHES = {1: 4, 4: 2, 8: 2}
"""How many batches of each size."""
OPTIONS = {1: ("rule", "ranking", "fallback"), 8: ("fallback",)}
"""What is changed alone at these sizes, at the lowest and the highest temperature: all of it in
every cell would take an hour and a half."""
AUTO = "SSD, auto"
SETTLE = 2
"""Batches of each cell that only AUTO decodes, before the cell: it learns from what it did."""
WARM = 0.5
"""The ranking "auto" uses the noise from this temperature on."""


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
    accepted: float
    hit_rate: float
    overlap: float
    per_core: float
    same_texts: str
    note: str
    in_full: float | None = None
    """Theorem 7 with all that a round pays."""


def methods(k: int, branches: int) -> list[Variant]:
    """In every cell; the methods proper give target and draft one core each."""
    ssd = EngineConfig(
        method="ssd", k=k, branches=branches, threads=1, policy="fixed", max_tokens=8192
    )
    return [
        Variant("AR", replace(ssd, method="ar")),
        Variant("AR, 2 threads", replace(ssd, method="ar", threads=2)),
        Variant("SD", replace(ssd, method="sd")),
        Variant("SD, 2 threads", replace(ssd, method="sd", threads=2, lane="inline")),
        Variant("SSD", ssd),
        Variant(AUTO, replace(ssd, policy="auto")),
    ]


def options(ssd: EngineConfig) -> list[Variant]:
    """SSD with one thing changed."""
    values: dict[str, tuple[Any, ...]] = {
        "rule": ("token", "coupled"),
        "ranking": ("probability",),
        "fallback": tuple(its.value for its in Fallback),
    }
    return [
        Variant(f"SSD, {name} {value}", replace(ssd, **{name: value}))
        for name, its in values.items()
        for value in its
    ]


def joins(variant: Variant, ssd: EngineConfig, temperature: float, batch: int) -> bool:
    """Whether one of `options` is measured in a cell: not where it is what SSD does anyway."""
    if temperature not in (TEMPERATURES[0], TEMPERATURES[-1]):
        return False
    names = [name for name in OPTIONS.get(batch, ()) if f", {name} " in variant.name]
    if "ranking" in names:
        return temperature >= WARM
    if "fallback" in names:
        return variant.config.fallback != choose_fallback(ssd, batch).value
    return bool(names)


def cell(
    runs: Mapping[str, Run],
    compared: Sequence[Variant],
    batches: Sequence[Batch],
    params: SamplingParams,
) -> list[Row]:
    """All variants on the same batches of one size, at one temperature."""
    if auto := [its for its in compared if its.name == AUTO]:
        measure(runs, auto, batches[:SETTLE], params, lambda: None)
    found = measure(runs, compared, batches, params, lambda: None)
    return [
        Row(
            temperature=params.temperature,
            batch=len(batches[0]),
            variant=variant.name,
            tokens_per_s=found[variant.name]["tokens_per_s"],
            vs_ar=ratio(found[variant.name], found["AR"]),
            vs_sd=ratio(found[variant.name], found["SD"]),
            theorem_7=theorem_7(found["SD"], found[variant.name], variant.config, len(batches[0])),
            accepted=found[variant.name]["accepted_per_round"],
            hit_rate=found[variant.name]["hit_rate"],
            overlap=found[variant.name]["overlap"],
            per_core=found[variant.name]["tokens_per_s"] / cores(variant.config),
            same_texts=same(found[variant.name]["texts"], found["AR"]["texts"])
            if params.temperature == 0
            else "-",
            note=note(found[variant.name], variant.config),
            in_full=in_full(found["SD"], found[variant.name], variant.config, len(batches[0])),
        )
        for variant in compared
    ]


def theorem_7(
    sd: Mapping[str, Any], found: Mapping[str, Any], config: EngineConfig, batch: int
) -> float | None:
    """SSD against SD from the times of these runs, for what the policy does at their end; None
    where nothing is drafted ahead, or nobody waits for a redraft and its row does."""
    if config.method != "ssd" or config.fallback == Fallback.INDEPENDENT.value:
        return None
    policy = found["policy"]
    if policy["method"] == "sd":
        return 1.0
    if policy["method"] == "ar":
        draft = config.k * sd["t_draft_step_ms"] / sd["t_verify_ms"]
        return 1.0 / sd_speed(sd["tokens_per_round"], draft)
    return predict(sd, found, config, batch, policy["retry"])


def in_full(
    sd: Mapping[str, Any], found: Mapping[str, Any], config: EngineConfig, batch: int
) -> float | None:
    """`theorem_7` with all that these runs' rounds paid; None also where nothing is drafted ahead
    at their end."""
    if config.method != "ssd" or config.fallback == Fallback.INDEPENDENT.value:
        return None
    policy = found["policy"]
    if policy["method"] != "ssd":
        return None
    return predict(sd, found, config, batch, policy["retry"], form=with_all_paid)


def note(found: Mapping[str, Any], config: EngineConfig) -> str:
    """A draft that failed; what the policy settled on."""
    said = [] if found.get("speculation", "on") in ("on", "off") else [found["speculation"]]
    if config.policy == "auto":
        its = found["policy"]
        ahead = f", {its['branches']} branches, retry {its['retry']}"
        said.append(
            f"{its['method']}, k {its['k']}{ahead if its['method'] == 'ssd' else ''}: {its['why']}"
        )
    return "; ".join(said)


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


def run(
    pair: Pair,
    prompts: Sequence[list[int]],
    settings: argparse.Namespace,
    done: set[tuple[float, int]] | None = None,
) -> Iterator[list[Row]]:
    """The rows of each cell that is not done, as it is measured."""
    compared = methods(settings.k, settings.branches)
    ssd = next(its.config for its in compared if its.name == "SSD")
    changed = [] if settings.quick else options(ssd)
    alone = EngineConfig(method="sd", threads=2, lane="inline")
    others = {
        "transformers' assisted": AssistedRun(pair.target, assistant_model=pair.draft),
        "transformers' prompt lookup": AssistedRun(pair.target, prompt_lookup_num_tokens=3),
    }
    temperatures = settings.temperatures or ((0.0, 1.0) if settings.quick else TEMPERATURES)
    sizes = settings.sizes or ((1,) if settings.quick else tuple(BATCHES))
    cells = [its for its in itertools.product(temperatures, sizes) if its not in (done or ())]
    with opened(pair, [*compared, *changed] if cells else []) as runs:
        for temperature, size in cells:
            here = [*compared, *(its for its in changed if joins(its, ssd, temperature, size))]
            if size == 1:
                here += [Variant(name, alone) for name in others]
            # Every batch is the same work: no text ends early.
            params = SamplingParams(settings.tokens, temperature, ignore_eos=True)
            batches = batches_of(prompts, size, settings.batches or BATCHES.get(size, 2))
            yield cell(runs | others, here, batches, params)


def render(rows: Sequence[Row]) -> str:
    """One line per variant and cell, then what "auto" did."""
    full = any(row.in_full is not None for row in rows)  # earlier results lack it
    headers = ("T", "batch", "variant", "tokens/s", "vs AR", "vs SD", "Theorem 7",
               *(("in full",) if full else ()), "accepted",
               "hit rate", "overlap", "tokens/s/core", "same texts")  # fmt: skip
    lines = [
        (f"{row.temperature:g}", str(row.batch), row.variant, f"{row.tokens_per_s:.1f}")
        + (_spread(row.vs_ar), _spread(row.vs_sd))
        + tuple(
            None if its is None else f"{its:.2f}"
            for its in (row.theorem_7, row.in_full)[: 1 + full]
        )
        + (f"{row.accepted:.2f}" if row.accepted else None,)
        + tuple(
            f"{value:.2f}" if row.variant.startswith("SSD") else None
            for value in (row.hit_rate, row.overlap)
        )
        + (f"{row.per_core:.1f}", row.same_texts)
        for row in rows
    ]
    notes = [
        f"{row.variant}, T = {row.temperature:g}, batch {row.batch}: {row.note}"
        for row in rows
        if row.note
    ]
    legend = [
        "Measured, but for Theorem 7: SSD over SD as predicted from the same run's times and hits.",
        "tokens/s: of all requests of a batch. vs: median (lowest-highest) of the batches. "
        "accepted: drafts per round.",
    ]
    return "\n".join([report.table(headers, lines), *legend, *notes, verdict(rows)])


def _spread(its: Sequence[float]) -> str:
    return f"{its[0]:.2f} ({its[1]:.2f}-{its[2]:.2f})"


def verdict(rows: Sequence[Row]) -> str:
    """In how many cells "auto" is at least as fast as SD, and where not."""
    auto = [row for row in rows if row.variant == AUTO]
    slower = [
        f"T = {row.temperature:g}, batch {row.batch}: {_spread(row.vs_sd)}"
        for row in auto
        if row.vs_sd[0] < 1
    ]
    text = f"{AUTO} is at least as fast as SD in {len(auto) - len(slower)} of {len(auto)} cells"
    return f"{text}; not at {', '.join(slower)}" if slower else text


def loses(rows: Sequence[Row]) -> bool:
    """In some cell "auto" was slower than SD in every batch."""
    return any(row.variant == AUTO and row.vs_sd[2] < 1 for row in rows)


def repeated(rows: Sequence[Row], before: Sequence[Row]) -> str:
    """The ratios of another run beside these: does each lie within the spread printed here?"""
    old = {(row.temperature, row.batch, row.variant): row for row in before}
    lines = [
        (f"{row.temperature:g}", str(row.batch), row.variant, name, _spread(then), _spread(now))
        + (f"{now[0] / then[0] - 1:+.1%}", abs(now[0] - then[0]) <= now[2] - now[1])
        for row in rows
        if (other := old.get((row.temperature, row.batch, row.variant)))
        for name, now, then in (
            ("vs AR", row.vs_ar, other.vs_ar), ("vs SD", row.vs_sd, other.vs_sd),
        )
        if now[1] < now[2]
    ]  # fmt: skip
    if not lines:
        return "no cell of that run is in this one"
    headers = ("T", "batch", "variant", "ratio", "then", "now", "apart", "within spread")
    within, apart = sum(line[-1] for line in lines), [abs(float(line[-2][:-1])) for line in lines]
    note = (
        f"{within} of {len(lines)} ratios differ by no more than the spread printed now (highest - "
        f"lowest); {statistics.median(apart):.1f}% apart in the median"
    )
    return f"{report.table(headers, lines, left=4)}\n{note}"


def changed(found: dict[str, Any], before: dict[str, Any]) -> str:
    """What another run was made with, where that is not what this one is made with."""
    lines = [
        f"{name}: {before.get(part, {}).get(name)} then, {found[part].get(name)} now"
        for part in ("machine", "versions", "settings")
        for name in found[part] | before.get(part, {})
        if name != "date" and before.get(part, {}).get(name) != found[part].get(name)
    ]
    return "\n".join(["the other run differs in", *lines] if lines else ["of the same commit"])


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """A file of --json: what it says of the run, and its rows."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found, [Row(**row) for row in found["rows"]]


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    result = argparse.ArgumentParser(
        prog="python -m bench end_to_end", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = result.add_argument
    add("--target", metavar="PATH", help="default: the demo's pair")
    add("--draft", metavar="PATH")
    add("--quick", action="store_true", help="batch 1, T = 0 and 1, methods only: 2 minutes")
    add("--prompts", choices=("both", "chat", "code"), default="both", help="(%(default)s)")
    add("--temperatures", type=float, nargs="+", metavar="T", help=f"default: {TEMPERATURES}")
    add("--sizes", type=int, nargs="+", metavar="B", help=f"of batches; default: {(*BATCHES,)}")
    add("--batches", type=int, help=f"of each size; default: {BATCHES}")
    add("--tokens", type=int, default=24, help="per prompt (%(default)s)")
    add("--k", type=int, default=2)
    add("--branches", type=int, default=12)
    add("--json", type=files.output, metavar="FILE", help="rewritten after every cell")
    add(
        "--against",
        type=files.existing,
        metavar="FILE",
        help="of --json: how far apart are they?",
    )
    return result


def main(arguments: Sequence[str]) -> int:
    """`python -m bench end_to_end`: 0 when measured; 1 if "auto" loses against SD in a cell."""
    options = parser().parse_args(arguments)
    other, earlier = read(options.against) if options.against else ({}, [])
    if options.quick:
        options.batches, options.tokens = min(options.batches or 3, 3), min(options.tokens, 16)
    from saguaro_runtime.cli.doctor import faster_dtype
    from saguaro_runtime.demo.cli import load
    from saguaro_runtime.demo.model import load_pair

    target, draft = (options.target, options.draft) if options.target else load_pair()
    dtype = faster_dtype()
    names = (
        "target", "draft", "quick", "prompts", "temperatures", "sizes", "batches", "tokens", "k",
        "branches",
    )  # fmt: skip
    settings = {name: getattr(options, name) for name in names} | {"dtype": dtype}
    found = {"machine": report.machine(), "versions": versions(), "settings": settings}
    rows: list[Row] = []
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        if all(before.get(name) == found[name] for name in found):
            rows = read(options.json)[1]
    pair = load(target, draft, dtype)
    chat, code = (its(pair.tokenizer, 8) for its in (chat_prompts, code_prompts))
    both = list(itertools.chain.from_iterable(zip(chat, code, strict=True)))
    prompts = {"both": both, "chat": chat, "code": code}[options.prompts]
    for measured in run(pair, prompts, options, {(row.temperature, row.batch) for row in rows}):
        rows += measured
        if options.json:
            data = found | {"rows": [asdict(row) for row in rows]}
            files.write_json(options.json, data)
    print(render(rows))
    if options.against:
        print(f"\nBeside {options.against}, {changed(found, other)}")
        print(repeated(rows, earlier))
    return int(loses(rows))
