"""`saguaro demo`: one answer as it is written, then AR, SD and SSD measured on the same prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from saguaro_kernels.errors import ConfigError

from ..cli import add_engine_options, add_sampling_options
from ..cli.doctor import faster_dtype
from ..cli.generate import encode
from ..compare import Comparison, compare_texts
from ..config import EngineConfig, check_number
from ..devices import places
from ..engine import Engine
from ..ngram import NGRAM
from ..params import SamplingParams
from ..requests import Output
from .measure import Pair, Tick, measure, opened
from .report import Variant, plan, render, summarize

EXAMPLES = """\
  saguaro demo
  saguaro demo --temperature 1 --seed 7 --prompt "Tell me a joke." --prompt "And another."
  saguaro demo --json > result.json
  saguaro demo --target ./llama-8b --draft ./llama-1b --k 4      your own pair, no download
"""

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"
CHECKED_TOKENS = 32
"""Tokens per prompt in the check that the texts are equal; in float32, which takes longer."""

Finding = tuple[str, float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="repeatable; default: a mixed set")
    add("--target", metavar="PATH", help="a transformers folder, instead of the demo's model")
    add("--draft", metavar="PATH", help="and its draft")
    add("--method", choices=("all", "ar", "sd", "ssd"), default="all")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the timing")
    add("--no-check", action="store_true", help="do not check that the texts are equal")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add_sampling_options(parser, max_new_tokens=48)
    add_engine_options(parser, k=2, branches=12)
    parser.set_defaults(device=None, draft_device=None)  # two cores are what it is about


def run(args: argparse.Namespace) -> int:
    check_number("max_new_tokens", args.max_new_tokens, 1, 2**63 - 1, whole=True)
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    variants = plan(args, cores=os.cpu_count() or 1)
    paths = _paths(args)
    dtype = faster_dtype() if args.dtype == "auto" else args.dtype
    out = sys.stderr if args.json else sys.stdout
    pair = load(*paths, dtype)
    prompts = read_prompts(pair.tokenizer, args.prompt)
    with _bar(1, "starting the draft"), opened(pair, variants) as runs:
        print_answer(runs[variants[-1].name].engine, pair.tokenizer, prompts[0], params, out)
        with _bar(len(variants) * len(prompts), "measuring each method") as bar:
            rows = measure(runs, variants, [[p] for p in prompts], params, bar.update)
    check = None
    if args.method == "all" and not args.no_check:
        check = check_texts(load(*paths, "float32"), prompts, params, variants)
    report = summarize(rows, check, variants, params, dtype, len(prompts))
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def read_prompts(tokenizer: Any, texts: Sequence[str] | None) -> list[list[int]]:
    """The ids of the user's prompts, as chat messages, or of the default set."""
    entries = [{"kind": "chat", "text": text} for text in texts or ()]
    entries = entries or json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [encode(tokenizer, entry["text"], chat=entry["kind"] == "chat") for entry in entries]


def print_answer(
    engine: Engine, tokenizer: Any, prompt: list[int], params: SamplingParams, out: TextIO
) -> None:
    """Print the answer to one prompt while it is written."""
    print(tokenizer.decode(prompt, skip_special_tokens=True).rstrip(), file=out)
    for piece in engine.stream(prompt, params):
        print(piece, end="", file=out, flush=True)
    print("\n", file=out, flush=True)


def check_texts(
    pair: Pair,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    variants: Sequence[Variant],
    compare: Callable[..., Comparison] = compare_texts,
) -> Finding:
    """Whether the methods give the same texts: the worst verdict of `compare_texts`, and its gap.

    The reference is plain decoding at temperature 0 and with the coupled rule. Otherwise its text
    is a different sample of the same distribution, and the reference is SD.
    """
    params = replace(params, max_new_tokens=min(params.max_new_tokens, CHECKED_TOKENS))
    same_text = params.temperature == 0 or variants[0].config.rule == "coupled"
    methods = ("ar", "sd", "ssd") if same_text else ("sd", "ssd")
    configs = [
        replace(variant.config, reproducible=True)
        for variant in variants
        if variant.name in methods
    ]
    worst: Finding = ("equal", None)
    with _bar(len(configs) * len(prompts), "checking the texts") as bar:
        runs = [_texts(pair, config, prompts, params, bar.update) for config in configs]
    for other in runs[1:]:
        for prompt, first, second in zip(prompts, runs[0], other, strict=True):
            found = compare(
                first.token_ids,
                second.token_ids,
                prompt,
                params,
                target=pair.target,
                draft=pair.draft,
                config=configs[0],
                rounds=first.rounds,
            )
            worst = max(worst, (found.verdict, found.gap), key=_severity)
    return worst


def _severity(found: Finding) -> tuple[int, float]:
    verdict, gap = found
    return ("equal", "near_tie", "different").index(verdict), gap or 0.0


def _texts(
    pair: Pair,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tick: Tick,
) -> list[Output]:
    outputs = []
    with pair.open(config) as engine:
        for prompt in prompts:
            outputs += engine.generate(prompt, params)
            tick()
    return outputs


def _paths(args: argparse.Namespace) -> tuple[str, str]:
    if args.draft == NGRAM:
        raise ConfigError(
            f"--draft {NGRAM}: the demo measures what drafting ahead is worth, and n-grams leave "
            "nothing to draft ahead; want a model's folder (one of that name is ./ngram), or run "
            "saguaro generate --draft ngram --stats"
        )
    if (args.target is None) != (args.draft is None):
        raise ConfigError("--target and --draft: got one of the two, want both or neither")
    if args.target:
        return args.target, args.draft
    from .model import load_pair

    return load_pair()


def load(
    target_path: str,
    draft_path: str,
    dtype: str,
    device: str = "cpu",
    draft_device: str | None = None,
) -> Pair:
    """Load the models once, to where EngineConfig would; engines on them share their weights."""
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from ..models.loading import load_draft, load_model, load_tokenizer

    where = places(EngineConfig(device=device, draft_device=draft_device))
    disable_progress_bar()  # transformers' own; ours covers the whole load
    set_verbosity_error()  # its assisted generation warns of its own calls
    with _bar(3, f"loading ({dtype})") as bar:
        target = load_model(target_path, getattr(torch, dtype), where.target)
        bar.update()
        tokenizer = load_tokenizer(target_path)
        bar.update()
        draft = load_draft(draft_path, target, getattr(torch, dtype), where.draft)
        bar.update()
    return Pair(target, draft, tokenizer)


def _bar(total: int, what: str) -> Any:
    """A progress bar on stderr where that is a terminal, else a line."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    if not terminal:
        print(what, file=sys.stderr, flush=True)
    shape = "{l_bar}{bar}| {n_fmt}/{total_fmt}"
    return tqdm(total=total, desc=what, leave=False, disable=not terminal, bar_format=shape)
