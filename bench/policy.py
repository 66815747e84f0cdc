"""Is the policy "auto" as fast as the best fixed k, branches and fallback? Against a sweep.

All variants decode the same prompts in turn. "auto" starts without knowledge, so the first batches
count for nobody. Where the policy settled, and the numbers that led there, are printed below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saguaro_runtime import EngineConfig, SamplingParams
from saguaro_runtime.demo.measure import Pair, measure, opened
from saguaro_runtime.demo.report import Variant

from . import report
from .end_to_end import batches_of

SWEEP = [(k, branches) for k in (1, 2, 4) for branches in (8, 20)]
FALLBACKS = ("immediate_retry", "partial_accept")
WITHIN = 0.05
AUTO = "auto"


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


def compare(
    pair: Pair,
    prompts: Sequence[list[int]],
    base: EngineConfig,
    params: SamplingParams,
    *,
    size: int,
    count: int,
    settle: int,
) -> dict[str, Any]:
    """The speeds of all variants over `count` batches after `settle` uncounted ones."""
    compared = variants(replace(base, max_batch=max(size, base.max_batch)))
    batches = batches_of(prompts, size, settle + count)
    with opened(pair, compared) as runs:
        found = measure(runs, compared, batches, params, lambda: None)
    speeds = {name: sum(its["rates"][settle:]) / count for name, its in found.items()}
    best = max((name for name in speeds if name != AUTO), key=lambda name: speeds[name])
    return {
        "temperature": params.temperature,
        "batch": size,
        "tokens_per_s": {name: round(speed, 2) for name, speed in speeds.items()},
        "best": best,
        "auto_vs_best": round(speeds[AUTO] / speeds[best], 4),
        "policy": found[AUTO]["policy"],
    }


def render(cells: Sequence[dict[str, Any]]) -> str:
    """A table of speeds per cell, and what the policy did."""
    blocks = []
    for cell in cells:
        ordered = sorted(cell["tokens_per_s"].items(), key=lambda its: -its[1])
        policy = cell["policy"]
        settled = f"{policy['method']}, k {policy['k']}, {policy['branches']} branches, "
        blocks += [
            f"T = {cell['temperature']:g}, batch {cell['batch']}",
            report.table(("variant", "tokens/s"), [(name, f"{v:.1f}") for name, v in ordered]),
            f"auto / best fixed: {cell['auto_vs_best']:.3f} ({cell['best']})",
            f"auto settled on {settled}retry {policy['retry']}: {policy['why']}",
            "",
        ]
    return "\n".join(blocks)


def main(arguments: Sequence[str]) -> int:
    """`python -m bench policy`: 0 if auto is within 5 % of the best fixed variant everywhere."""
    parser = argparse.ArgumentParser(prog="python -m bench policy", description=__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=48, help="per prompt (%(default)s)")
    add("--batches", type=int, default=5, help="that count (%(default)s)")
    add("--settle", type=int, default=4, help="batches before them (%(default)s)")
    add("--size", type=int, default=1, help="prompts at once (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="rewritten after every temperature")
    options = parser.parse_args(arguments)
    from saguaro_runtime.cli.doctor import faster_dtype
    from saguaro_runtime.demo import load
    from saguaro_runtime.demo.model import load_pair

    from .equality import chat_prompts, code_prompts

    pair = load(*load_pair(), faster_dtype())
    prompts = chat_prompts(pair.tokenizer, 8) + code_prompts(pair.tokenizer, 8)
    cells = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(options.tokens, temperature, ignore_eos=True)
        counts = {"size": options.size, "count": options.batches, "settle": options.settle}
        cells.append(compare(pair, prompts, EngineConfig(threads=1), params, **counts))
        if options.json:
            data = {"machine": report.machine(), "cells": cells}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(render(cells))
    return int(any(cell["auto_vs_best"] < 1 - WITHIN for cell in cells))
