"""`saguaro generate`: stream the text of any two models."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from . import (
    add_engine_options,
    add_model_options,
    add_sampling_options,
    check_models,
    engine_config,
)

if TYPE_CHECKING:
    from ..requests import Output

EXAMPLES = """\
  saguaro generate --target ./llama-8b --draft ./llama-1b --prompt "Why is the sky blue?"
  saguaro generate --target ./llama-8b --draft ./llama-1b --raw --prompt "def fib(n):" --stats
  cat question.txt | saguaro generate --target ./llama-8b --draft ./llama-1b --prompt -
  saguaro generate --target ./llama-8b --method ar --prompt "Hello"      plain decoding
  saguaro generate --target ./llama-8b --draft ngram --prompt "Repeat this: .."
  saguaro generate --target ./llama-8b --draft ./llama-1b --prompt "Hello" --json | jq .usage
  saguaro generate --target ./llama-8b --draft ./llama-1b --prompt "Hello" --plot rounds.png
  saguaro generate --target ./llama-8b --draft ./llama-1b --prompt "Hello" --device auto
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="repeatable; - reads stdin"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template around the prompt")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, not the text"
    )
    parser.add_argument(
        "--stats", action="store_true", help="print what the rounds did, at the end"
    )
    parser.add_argument(
        "--timeline", metavar="JSON", help="write who did what when, for chrome://tracing, Perfetto"
    )
    parser.add_argument("--plot", metavar="PNG", help="draw it: lanes over time, hits and misses")
    add_sampling_options(parser, max_new_tokens=128)
    add_engine_options(parser, k=4, branches=20)


def run(args: argparse.Namespace) -> int:
    check_models(args)
    print(f"loading {args.target}", file=sys.stderr, flush=True)
    from saguaro_runtime import Engine, SamplingParams

    from ..metrics.plot import check_pictures, write_pictures

    pictures = {"timeline": args.timeline, "plot": args.plot}
    check_pictures(**pictures)

    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    with Engine(args.target, args.draft, engine_config(args)) as engine:
        for number, prompt in enumerate(args.prompt):
            text = sys.stdin.read() if prompt == "-" else prompt
            ids = encode(engine.tokenizer, text, chat=not args.raw)
            if args.json:
                print(_record(engine.generate(ids, params)[0]), flush=True)
                continue
            if number:
                print()
            for piece in engine.stream(ids, params):
                print(piece, end="", flush=True)
            print(flush=True)
        stats = engine.stats()
        if args.stats:
            print(_summary(stats), file=sys.stderr)
        write_pictures(engine.spans, **pictures)
    return 0


def encode(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """A prompt's ids; as a user's message if `chat` is set and the tokenizer has a template."""
    from ..intake import chat_ids, prompt_ids

    if chat and getattr(tokenizer, "chat_template", None):
        return chat_ids([{"role": "user", "content": text}], tokenizer)
    return prompt_ids(text, tokenizer)


def _record(output: Output) -> str:
    record = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": output.usage,
        "metrics": output.metrics,
    }
    return json.dumps(record, ensure_ascii=False)


def _summary(stats: dict[str, Any]) -> str:
    shown = {
        "tokens_per_s": "{:.1f} tokens/s",
        "tokens_per_round": "{:.2f} tokens per round",
        "accepted_per_round": "{:.2f} accepted per round",
        "hit_rate": "hit rate {:.2f}",
        "overlap": "overlap {:.2f}",
    }
    return ", ".join(text.format(stats[key]) for key, text in shown.items() if key in stats)
