"""Is the policy "auto" as fast as the best fixed k, branches and fallback? Against a sweep.

First all variants decode the same few prompts in turn; the fastest of them and "auto", which has
had some prompts more to learn from, then decode others in turn, and those alone count. So the best
of the sweep is not the luckiest of the prompts that it is judged by. One engine decodes for all
variants that draft, each with a policy of its own, so that nothing else differs between them. Where
"auto" settled, and the numbers that led there, are printed below.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, Final

from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.demo.measure import Batch, EngineRun, Pair, measure, opened
from saguaro_runtime.demo.report import Variant
from saguaro_runtime.policy import Policy

from . import files, report
from .end_to_end import batches_of

SWEEP = [(k, branches) for k in (1, 2, 4) for branches in (8, 20)]
FALLBACKS = ("immediate_retry", "partial_accept")
WITHIN = 0.05
AUTO: Final = "auto"


def variants(base: EngineConfig) -> list[Variant]:
    """Plain decoding, SD by k, SSD by k, branches and fallback, and the policy over all of them."""
    ks = sorted({k for k, _ in SWEEP})
    most = replace(base, k=max(ks), branches=max(m for _, m in SWEEP), policy=AUTO)
    fixed = replace(base, policy="fixed")
    return [
        Variant("AR", replace(fixed, method="ar")),
        *(Variant(f"SD, k {k}", replace(fixed, method="sd", k=k)) for k in ks),
        *(
            Variant(f"k {k}, {m}, {name}", replace(fixed, k=k, branches=m, fallback=name))
            for k, m in SWEEP
            for name in FALLBACKS
        ),
        Variant(AUTO, most),
    ]


class PolicyRun(EngineRun):
    """An engine that decides as `config` says."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        super().__init__(engine)
        self.policy = Policy(config)

    def decode(self, batch: Batch, params: SamplingParams) -> list[list[int]]:
        self.engine.scheduler.policy = self.policy
        return super().decode(batch, params)

    def stats(self) -> dict[str, Any]:
        self.engine.scheduler.policy = self.policy
        return super().stats()


@contextlib.contextmanager
def shared(pair: Pair, compared: Sequence[Variant]) -> Iterator[dict[str, EngineRun]]:
    """Every variant ready to decode: plain decoding has an engine of its own, the rest one."""
    plain = [its for its in compared if its.config.method == "ar"]
    with opened(pair, [*plain, compared[-1]]) as runs:
        engine = runs[compared[-1].name].engine
        drafted = {its.name: PolicyRun(engine, its.config) for its in compared if its not in plain}
        yield {name: run for name, run in runs.items() if name not in drafted} | drafted


def compare(
    pair: Pair,
    prompts: Sequence[list[int]],
    base: EngineConfig,
    params: SamplingParams,
    *,
    size: int,
    first: int,
    settle: int,
    count: int,
    finalists: int,
) -> dict[str, Any]:
    """`first` batches by all, `settle` by auto alone, `count` by it and the fastest others."""
    compared = variants(replace(base, max_batch=max(size, base.max_batch)))
    batches = batches_of(prompts, size, first + settle + count)
    tick = lambda: None  # noqa: E731
    with shared(pair, compared) as runs:
        sweep = measure(runs, compared, batches[:first], params, tick)
        speeds = {name: its["tokens_per_s"] for name, its in sweep.items()}
        order = sorted(speeds.keys() - {AUTO}, key=lambda name: -speeds[name])
        last = [its for its in compared if its.name in (AUTO, *order[:finalists])]
        measure(runs, last[-1:], batches[first : first + settle], params, tick)
        final = measure(runs, last, batches[first + settle :], params, tick)
    means = {name: math.exp(fmean(map(math.log, its["rates"]))) for name, its in final.items()}
    best = max(means.keys() - {AUTO}, key=lambda name: means[name])
    gains = [
        math.log(mine / its)
        for mine, its in zip(final[AUTO]["rates"], final[best]["rates"], strict=True)
    ]
    return {
        "temperature": params.temperature,
        "batch": size,
        "sweep": {name: round(speeds[name], 2) for name in (*order, AUTO)},
        "final": {name: round(mean, 2) for name, mean in means.items()},
        "rates": {name: [round(r, 2) for r in its["rates"]] for name, its in final.items()},
        "best": best,
        "auto_vs_best": round(math.exp(fmean(gains)), 4),
        "error": round(stdev(gains) / math.sqrt(len(gains)), 4) if len(gains) > 1 else None,
        "policy": final[AUTO]["policy"],
    }


def render(cells: Sequence[dict[str, Any]]) -> str:
    """A table of speeds per cell, and what the policy did."""
    blocks = []
    for cell in cells:
        policy, final = cell["policy"], cell["final"]
        ordered = sorted(cell["sweep"].items(), key=lambda its: (-final.get(its[0], 0), -its[1]))
        settled = f"{policy['method']}, k {policy['k']}, {policy['branches']} branches, "
        error = "" if cell["error"] is None else f" +- {cell['error']:.3f}"
        blocks += [
            f"T = {cell['temperature']:g}, batch {cell['batch']}, tokens/s",
            report.table(
                ("variant", "in the sweep", "of the last"),
                [(name, f"{v:.1f}", f"{final[name]:.1f}" if name in final else None)
                 for name, v in ordered],
            ),
            f"auto / best fixed: {cell['auto_vs_best']:.3f}{error} ({cell['best']})",
            f"auto settled on {settled}retry {policy['retry']}: {policy['why']}",
            "",
        ]  # fmt: skip
    return "\n".join(blocks)


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    result = argparse.ArgumentParser(prog="python -m bench policy", description=__doc__)
    add = result.add_argument
    add("--tokens", type=int, default=40, help="per prompt (%(default)s)")
    add("--first", type=int, default=2, help="batches of the sweep (%(default)s)")
    add("--settle", type=int, default=4, help="batches by auto alone (%(default)s)")
    add("--batches", type=int, default=10, help="that count (%(default)s)")
    add("--finalists", type=int, default=3, help="of the sweep (%(default)s)")
    add("--size", type=int, default=1, help="prompts at once (%(default)s)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--json", type=files.output, metavar="FILE", help="rewritten after every temperature")
    return result


def main(arguments: Sequence[str]) -> int:
    """`python -m bench policy`: 0 if auto is within 5 % of the best fixed variant everywhere."""
    options = parser().parse_args(arguments)
    from saguaro_runtime.cli.doctor import faster_dtype
    from saguaro_runtime.demo.cli import load
    from saguaro_runtime.demo.model import load_pair

    from .equality import chat_prompts, code_prompts

    pair = load(*load_pair(), faster_dtype())
    both = zip(chat_prompts(pair.tokenizer, 10), code_prompts(pair.tokenizer, 10), strict=True)
    prompts = [prompt for two in both for prompt in two]
    cells = []
    for temperature in options.temperatures:
        params = SamplingParams(options.tokens, temperature, ignore_eos=True)
        cells.append(
            compare(
                pair, prompts, EngineConfig(threads=1), params, size=options.size,
                first=options.first, settle=options.settle, count=options.batches,
                finalists=options.finalists,
            )
        )  # fmt: skip
        if options.json:
            data = {"machine": report.machine(), "cells": cells}
            files.write_json(options.json, data)
    print(render(cells))
    return int(any(cell["auto_vs_best"] < 1 - WITHIN for cell in cells))
