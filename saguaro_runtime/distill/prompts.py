"""What the target is asked: a file's prompts, or beginnings that it completes to questions itself.

The latter needs no data: after the part of the chat template that stands before a user's words, a
model that was trained on conversations writes what a user might say (Magpie, arXiv 2406.08464).
Each question is given a beginning, for variety. Every fourth text, and all of a model without a
chat template, has no template around it: code and prose to be continued.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro_kernels.errors import ConfigError

from ..cli.generate import encode

ASKED = (
    "What is", "What are the", "Why do", "Why is", "How do I", "How does", "How can I",
    "Explain", "Explain to a child", "Describe", "Compare", "Write a short story about",
    "Write a poem about", "Write an email", "Write a Python function that", "Write a program",
    "Fix this code:", "Give me a list of", "Give three reasons", "Name five", "Summarize",
    "Rewrite this sentence:", "Translate", "Correct the grammar:", "Solve", "If a train",
    "A shop sells", "Calculate", "Is it true that", "Who was", "When did", "Where is",
    "Can you help me", "I want to", "I have a problem with", "My", "Tell me about",
    "Plan a", "What should I", "Which is better,", "Imagine", "Classify", "Convert",
)  # fmt: skip
CONTINUED = (
    "def ", "class ", "import ", "from ", "#!/usr/bin/env python\n", "for i in range(", "The ",
    "In ", "Once upon a time", "# ", "A ", "function ", "It was", "When ", "1. ", "Dear ",
    "def is_", "def count_", "def get_", "SELECT ", "<html>", "Chapter 1\n", "There are ",
    "How to ",
)  # fmt: skip
_RAW_EVERY = 4
_MARK = "SAGUARO"


@dataclass(frozen=True)
class Prompt:
    """Text to be answered; `chat`: as a user's message."""

    text: str
    chat: bool


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file: lines of text, or JSON: a list, or one entry per line of .jsonl.

    Entries are strings, or objects with "text" and optionally "kind", "chat" (default) or another
    one, which stands without a template.

    Raises:
        ConfigError: no such file, not understood, or fewer than two prompts: one is held out.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
        entries: list[Any] = [line for line in content.splitlines() if line.strip()]
        if path.endswith(".jsonl"):
            entries = [json.loads(line) for line in entries]
        elif path.endswith(".json"):
            entries = json.loads(content)
        found = [
            Prompt(entry, True)
            if isinstance(entry, str)
            else Prompt(str(entry["text"]), entry.get("kind", "chat") == "chat")
            for entry in entries
        ]
    except OSError as error:
        raise ConfigError(f"prompts: {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"prompts: {path}: {type(error).__name__}: {error}; want lines of text, or JSON of "
            'strings or {"text": .., "kind": "chat"}'
        ) from error
    found = list(dict.fromkeys(found))
    if len(found) < 2:
        raise ConfigError(f"prompts: {path}: got {len(found)} distinct ones, want at least two")
    return found


def split_prompts(prompts: list[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(held out, trained on): an eighth, at most 16, and the rest; both in an order of the seed."""
    order = random.Random(f"{seed} order").sample(prompts, len(prompts))
    count = min(16, max(1, len(prompts) // 8))
    return order[:count], order[count:]


def invent_prompts(
    tokenizer: Any,
    numbers: range,
    seed: int,
    finish: Callable[[list[list[int]]], list[list[int]]],
) -> list[Prompt]:
    """Prompts that the target writes: `finish` samples the rest of each of the beginnings."""
    before = before_the_user(tokenizer)
    begun = []
    for number in numbers:
        chat = bool(before) and number % _RAW_EVERY > 0
        choice = random.Random(f"{seed} {number}").choice(ASKED if chat else CONTINUED)
        begun.append(Prompt(choice, chat))
    ids = [
        tokenizer(before + prompt.text, add_special_tokens=False).input_ids
        if prompt.chat
        else encode(tokenizer, prompt.text, chat=False)
        for prompt in begun
    ]
    prompts = []
    for prompt, rest in zip(begun, finish(ids), strict=True):
        text = prompt.text + tokenizer.decode(rest, skip_special_tokens=True)
        prompts.append(Prompt(text.strip() if prompt.chat else text, prompt.chat))
    return prompts


def before_the_user(tokenizer: Any) -> str:
    """The part of the chat template that stands before a user's words; "" without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    message = [{"role": "user", "content": _MARK}]
    text: str = tokenizer.apply_chat_template(message, tokenize=False)
    return text.partition(_MARK)[0]
