"""`saguaro demo`: one answer as it is written, then AR, SD and SSD measured on the same prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from saguaro_kernels.errors import ConfigError

from .cli import add_engine_options, add_sampling_options
from .cli_generate import encode
from .config import EngineConfig
from .requests import Output, SamplingParams

EXAMPLES = """\
  saguaro demo
  saguaro demo --temperature 1 --seed 7 --prompt "Tell me a joke." --prompt "And another."
  saguaro demo --json > result.json
  saguaro demo --target ./llama-8b --draft ./llama-1b --k 4      your own pair, no download
"""

CHECKED_TOKENS = 32
"""Tokens per prompt of the check that the texts are equal; it runs in float32 and so takes longer."""

STATS = (
    "tokens_per_s",
    "tokens_per_round",
    "accepted_per_round",
    "hit_rate",
    "overlap",
    "t_verify_ms",
    "t_draft_step_ms",
    "t_sample_ms",
)


@dataclass(frozen=True)
class Variant:
    """One line of the table. `threads` is the target's count, then the draft's if it has its own."""

    name: str
    label: str
    threads: str
    config: EngineConfig


OpenEngine = Callable[[EngineConfig], contextlib.AbstractContextManager[Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable; default: a mixed set")
    parser.add_argument("--target", metavar="PATH", help="a local transformers folder")
    parser.add_argument("--draft", metavar="PATH", help="its draft")
    parser.add_argument("--method", choices=("all", "ar", "sd", "ssd"), default="all")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the timed runs; auto is the one this processor is faster in")
    parser.add_argument("--no-check", action="store_true", help="skip the check that texts are equal")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_sampling_options(parser, max_new_tokens=64)
    add_engine_options(parser, k=2, branches=12)


def run(args: argparse.Namespace) -> int:
    import torch

    from . import Engine
    from .doctor import faster_dtype

    if (args.target is None) != (args.draft is None):
        raise ConfigError("--target and --draft: got one of them, want both or neither")
    pair = _pair(args)
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    dtype = faster_dtype() if args.dtype == "auto" else getattr(torch, args.dtype)
    target, draft, tokenizer = _load(*pair, dtype)
    prompts = _prompts(tokenizer, args.prompt)
    variants = plan(args, os.cpu_count() or 1)

    def open_engine(config: EngineConfig) -> Engine:
        return Engine(target, draft, config, tokenizer)

    out = sys.stderr if args.json else sys.stdout
    stream_answer(open_engine, variants[-1].config, tokenizer, prompts[0], params, out)
    rows = {v.name: measure(open_engine, v, prompts, params) for v in variants}
    report = summarize(args, rows)
    report["settings"]["dtype"] = str(dtype).removeprefix("torch.")
    if not args.no_check:
        del target, draft
        report |= _check(pair, tokenizer, prompts, args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(table(variants, report))
    return 0
