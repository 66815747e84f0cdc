"""`saguaro distill`: train a draft for a target that has none."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli import check_model

EXAMPLES = """\
  saguaro distill --target ./llama-8b --out ./draft                      ten minutes
  saguaro distill --target ./llama-8b --out ./draft --minutes 600 --layers 0,1,30,31
  saguaro distill --target ./llama-8b --out ./draft --resume             after Ctrl-C
  saguaro distill --target ./llama-8b --out ./draft --prompts questions.txt --texts 2000
  saguaro distill --target ./llama-8b --out ./better --draft ./draft --minutes 600
  saguaro generate --target ./llama-8b --draft ./draft --prompt "Why is the sky blue?"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="PATH", help="folder, .gguf file or hub name")
    add("--out", required=True, metavar="DIR", help="where the draft goes, and what is resumed")
    add("--resume", action="store_true", help="go on where an interrupted run stopped")
    # No defaults: they are those of Settings, or of the run that is resumed.
    group = parser.add_argument_group("what is done (--resume knows it)")
    add = group.add_argument
    add("--layers", metavar="N|A,B,..", help="how many of the target's layers, or which (4)")
    add("--draft-vocab", type=int, metavar="N", help="logits for the N most frequent ids alone")
    add("--draft", metavar="DIR", help="train this draft further, instead of layers of the target")
    add("--minutes", type=float, metavar="M", help="to sample and train in (10)")
    add("--texts", type=int, metavar="N", help="texts to sample, instead of --minutes")
    add("--prompts", metavar="FILE", help="lines, .json or .jsonl; default: made up by the target")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (160)")
    add("--seed", type=int, help="the same seed and --texts give the same draft (0)")
    add("--dtype", choices=("auto", "bfloat16", "float32"), help="of the products (auto)")
    add("--device", choices=("auto", "cpu", "cuda"), help="a GPU where there is one (auto)")


def run(args: argparse.Namespace) -> int:
    target = check_model("--target", args.target)
    from .measure import render
    from .run import distill
    from .settings import Settings, Work

    names = (
        "draft_vocab", "draft", "minutes", "texts", "prompts", "max_new_tokens", "seed", "dtype",
        "device",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.layers is not None:
        given["layers"] = _layers(args.layers)
    stored = Work(Path(args.out)).stored() if args.resume else {}
    stored.pop("target", None)
    report = distill(target, args.out, Settings(**(stored | given)), resume=args.resume)
    print(render(report["measured"]))
    print(f"\nthe draft is in {args.out}: --target {args.target} --draft {args.out}")
    return 0


def _layers(text: str) -> int | tuple[int, ...]:
    try:
        if "," in text:
            return tuple(int(part) for part in text.split(","))
        return int(text)
    except ValueError:
        from saguaro_kernels.errors import ConfigError

        raise ConfigError(f"--layers: got {text!r}, want a number, or numbers A,B,..") from None
