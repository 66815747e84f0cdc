"""The paper's rates beside the planner's, and beside a pair of yours: `python -m bench paper`.

    python -m bench paper                                        published and predicted
    python -m bench paper --target ./qwen-32b --draft ./qwen-0.6b --as qwen --device auto
                                                                 and measured, on GPUs

A pair is measured as the paper's were: greedy, one request, K and fan-out of the authors' log (the
same number of branches for each accepted length, by probability), a miss redrafted in full, the
same prompts and lengths for AR, SD and SSD. A rate is tokens by the time spent in rounds, so that
prefill and serving are excluded for all alike. Exit code: 1 if the three texts are not the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import files, report

_LEGEND = """\
Rates in tokens/s. Published: by the paper. Predicted: by the planner from the inputs below, not
from the rate beside it. Nothing is measured but for a pair given by path.
"""


def configs(k: int, fan_out: int) -> dict[str, Any]:
    """AR, SD and SSD as the authors ran them."""
    from saguaro_runtime import EngineConfig
    from saguaro_runtime.config import Method

    common: dict[str, Any] = {
        "k": k, "branches": fan_out * (k + 1), "allocation": "uniform", "ranking": "probability",
        "rule": "token", "fallback": "batched_retry", "max_batch": 1,
    }  # fmt: skip
    methods: tuple[Method, ...] = ("ar", "sd", "ssd")
    return {method.upper(): EngineConfig(method=method, **common) for method in methods}


def predicted() -> str:
    """The published rates, the planner's, and the inputs of these."""
    from saguaro_runtime.planner import published

    return f"{_LEGEND}\n{published.render()}"


def measure(
    runs: Mapping[str, Any], prompts: Sequence[list[int]], tokens: int
) -> tuple[dict[str, dict[str, Any]], bool]:
    """The numbers of each method, in turn on each prompt; and whether the texts are the same."""
    from saguaro_runtime import SamplingParams

    params = SamplingParams(tokens, 0.0, ignore_eos=True)
    for run in runs.values():
        run.decode([prompts[0]], SamplingParams(8, 0.0, ignore_eos=True))
        run.reset()
    texts: dict[str, list[Any]] = {name: [] for name in runs}
    for prompt in prompts:
        for name, run in runs.items():
            texts[name] += run.decode([prompt], params)
    return {name: run.stats() for name, run in runs.items()}, len(
        {json.dumps(text) for text in texts.values()}
    ) == 1


def render(pair: Any, found: Mapping[str, Mapping[str, Any]], same: bool) -> str:
    """Measured beside published, as rates and as ratios."""
    published = {"AR": pair.ar, "SD": pair.sd, "SSD": pair.ssd}
    rates = {name: its["tokens_per_s"] for name, its in found.items()}
    rows = [
        (
            name,
            published[name],
            rates[name],
            published[name] / pair.ar,
            rates[name] / rates["AR"],
            published[name] / pair.sd,
            rates[name] / rates["SD"],
            found[name]["tokens_per_round"],
            found[name]["hit_rate"] if name == "SSD" else None,
        )
        for name in found
    ]
    headers = ("method", "published", "here", "vs AR, published", "here", "vs SD, published",
               "here", "tokens/round", "hit rate")  # fmt: skip
    verdict = "texts of the methods: " + ("the same" if same else "NOT the same")
    return f"{report.table(headers, rows)}\n{verdict}"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    from saguaro_runtime.planner import published

    parser = argparse.ArgumentParser(
        prog="python -m bench paper", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--target", metavar="PATH", help="a pair to measure")
    add("--draft", metavar="PATH")
    add("--device", default="cpu", help="of the pair, as in saguaro generate (%(default)s)")
    add("--draft-device", metavar="NAME", help="default: as --device; another GPU if that is auto")
    add("--as", dest="pair", choices=("llama", "qwen"), default="llama",
        help="whose K, fan-out and published rates (%(default)s)")  # fmt: skip
    add("--prompts", type=int, default=8, help="HumanEval problems (%(default)s)")
    add("--tokens", type=int, default=512, help="per prompt (%(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--json", type=files.output, metavar="FILE", help="what was measured, with the machine")
    options = parser.parse_args(arguments)
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft: want both, or neither")
    if options.json and options.target is None:
        parser.error("--json: writes what was measured; want --target and --draft, too")
    print(predicted())
    if options.target is None:
        return 0
    pair = next(its for its in published.PAIRS if its.name.lower().startswith(options.pair))
    found, same = _measured(pair, options)
    print(f"\nmeasured here as {pair.name}: K = {pair.k}, fan-out {pair.fan_out}, tokens/s")
    print(render(pair, found, same))
    if options.json:
        data = {"machine": report.machine(), "as": pair.name, "methods": found, "texts_equal": same}
        files.write_json(options.json, data)
    return int(not same)


def _measured(pair: Any, options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], bool]:
    from saguaro_runtime.demo.cli import load
    from saguaro_runtime.demo.measure import opened
    from saguaro_runtime.demo.report import Variant

    from .equality import code_prompts

    models = load(
        options.target, options.draft, options.dtype, options.device, options.draft_device
    )
    variants = [Variant(name, its) for name, its in configs(pair.k, pair.fan_out).items()]
    with opened(models, variants) as runs:
        prompts = code_prompts(models.tokenizer, options.prompts)
        return measure(runs, prompts, options.tokens)
