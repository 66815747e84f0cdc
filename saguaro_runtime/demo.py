"""`saguaro demo`: one answer as it is written, then AR, SD and SSD measured on the same prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from saguaro_kernels.errors import ConfigError

from .cli import add_engine_options, add_sampling_options
from .cli_generate import encode
from .config import EngineConfig
from .demo_report import render, summarize
from .requests import Output, SamplingParams

EXAMPLES = """\
  saguaro demo
  saguaro demo --temperature 1 --seed 7 --prompt "Tell me a joke." --prompt "And another."
  saguaro demo --json > result.json
  saguaro demo --target ./llama-8b --draft ./llama-1b --k 4      your own pair, no download
"""

PROMPTS = Path(__file__).with_name("data") / "prompts.json"
WARM_UP_TOKENS = 8
CHECKED_TOKENS = 32
"""Tokens per prompt in the check that the texts are equal; in float32, which takes longer."""

OpenEngine = Callable[[EngineConfig], AbstractContextManager[Any]]
Tick = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """One line of the table: a method, and the cores it may use."""

    name: str
    label: str
    config: EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="repeatable; default: a mixed set")
    add("--target", metavar="PATH", help="a transformers folder, instead of the demo's model")
    add("--draft", metavar="PATH", help="and its draft")
    add("--method", choices=("all", "ar", "sd", "ssd"), default="all")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the timing")
    add("--no-check", action="store_true", help="do not check that the texts are equal")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add_sampling_options(parser, max_new_tokens=64)
    add_engine_options(parser, k=2, branches=12)


def run(args: argparse.Namespace) -> int:
    pair = _pair(args)
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    variants = plan(args, cores=os.cpu_count() or 1)
    from .doctor import faster_dtype

    dtype = faster_dtype() if args.dtype == "auto" else args.dtype
    out = sys.stderr if args.json else sys.stdout
    open_engine, tokenizer = _load(*pair, dtype)
    prompts = read_prompts(tokenizer, args.prompt)
    stream_answer(open_engine, variants[-1].config, prompts[0], params, out)
    rows = {}
    with _bar(len(variants) * len(prompts), "measuring") as bar:
        for variant in variants:
            bar.set_description(variant.label)
            rows[variant.name] = measure(open_engine, variant.config, prompts, params, bar.update)
    check = None if args.no_check else check_pair(pair, prompts, params, variants)
    report = summarize(rows, check, variants, params, dtype, len(prompts))
    print(json.dumps(report, indent=2) if args.json else render(report, variants))
    return 0


def plan(args: argparse.Namespace, cores: int) -> list[Variant]:
    """What is measured. The methods proper give the target one core and the draft another.

    Plain decoding and SD also run with both cores for whichever model is at work: that is what two
    cores can do without SSD, so the comparison hides nothing.
    """
    config = EngineConfig(
        method="ar",
        rule=args.rule,
        ranking=args.ranking,
        k=args.k,
        branches=args.branches,
        threads=1,
    )
    variants = [Variant("ar", "AR", config), Variant("sd", "SD", replace(config, method="sd"))]
    if cores > 1:
        both = replace(config, threads=2, lane="inline")
        variants.insert(1, Variant("ar_2_threads", "AR, 2 threads", both))
        variants.append(Variant("sd_2_threads", "SD, 2 threads", replace(both, method="sd")))
    variants.append(Variant("ssd", "SSD", replace(config, method="ssd")))
    wanted = ("ar", "sd", "ssd") if args.method == "all" else (args.method,)
    return [variant for variant in variants if variant.config.method in wanted]


def read_prompts(tokenizer: Any, texts: Sequence[str] | None) -> list[list[int]]:
    """The ids of the user's prompts, as chat messages, or of the default set."""
    entries = [{"kind": "chat", "text": text} for text in texts or ()]
    entries = entries or json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [encode(tokenizer, entry["text"], chat=entry["kind"] == "chat") for entry in entries]


def stream_answer(
    open_engine: OpenEngine,
    config: EngineConfig,
    prompt: list[int],
    params: SamplingParams,
    out: TextIO,
) -> None:
    """Print the answer to one prompt while it is written."""
    with open_engine(config) as engine:
        print(engine.tokenizer.decode(prompt, skip_special_tokens=True).rstrip(), file=out)
        for piece in engine.stream(prompt, params):
            print(piece, end="", file=out, flush=True)
    print("\n", file=out, flush=True)


def measure(
    open_engine: OpenEngine,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tick: Tick = lambda: None,
) -> dict[str, float]:
    """Decode the prompts one by one; the engine's numbers, with tokens/s by the wall clock."""
    with open_engine(config) as engine:
        # Start-up, first touches of memory and the draft's arrival are not what is compared.
        engine.generate(prompts[0], replace(params, max_new_tokens=WARM_UP_TOKENS))
        tokens = 0
        start = time.perf_counter()
        for prompt in prompts:
            tokens += len(engine.generate(prompt, params)[0].token_ids)
            tick()
        seconds = time.perf_counter() - start
        return engine.stats() | {"tokens_per_s": tokens / seconds}


def check_pair(
    pair: tuple[str, str],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    variants: Sequence[Variant],
) -> tuple[str, float | None]:
    """Whether the methods give the same texts, in float32 (see compare.py)."""
    from .compare import compare_texts

    open_engine, _ = _load(*pair, "float32")
    params = replace(params, max_new_tokens=min(params.max_new_tokens, CHECKED_TOKENS))
    methods = {
        v.name: replace(v.config, reproducible=True) for v in variants if v.name == v.config.method
    }
    with _bar(len(methods) * len(prompts), "checking the texts") as bar:
        outputs = {
            name: generate_each(open_engine, config, prompts, params, bar.update)
            for name, config in methods.items()
        }
    return compare_texts(outputs)


def generate_each(
    open_engine: OpenEngine,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tick: Tick,
) -> list[Output]:
    outputs = []
    with open_engine(config) as engine:
        for prompt in prompts:
            outputs += engine.generate(prompt, params)
            tick()
    return outputs


def _pair(args: argparse.Namespace) -> tuple[str, str]:
    if (args.target is None) != (args.draft is None):
        raise ConfigError("--target and --draft: got one of the two, want both or neither")
    if args.target:
        return args.target, args.draft
    from .demo_model import load_pair

    return load_pair()


def _load(target_path: str, draft_path: str, dtype: str) -> tuple[OpenEngine, Any]:
    """Load a pair once; the engines opened on it share its weights."""
    import torch
    from transformers import AutoTokenizer

    from . import Engine
    from .models.transformers import load_draft, load_model

    with _bar(3, f"loading ({dtype})") as bar:
        tokenizer = AutoTokenizer.from_pretrained(target_path)
        bar.update()
        target = load_model(target_path, getattr(torch, dtype))
        bar.update()
        draft = load_draft(draft_path, target, getattr(torch, dtype))
        bar.update()
    return lambda config: Engine(target, draft, config, tokenizer), tokenizer


def _bar(total: int, what: str) -> Any:
    """A progress bar on stderr where that is a terminal, else nothing."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=what,
        leave=False,
        disable=None,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}",
    )
