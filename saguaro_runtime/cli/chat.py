"""`saguaro chat`: a conversation in the terminal, with a line of live speed figures."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from . import (
    add_engine_options,
    add_model_options,
    add_sampling_options,
    check_models,
    engine_config,
)

if TYPE_CHECKING:
    from ..engine import Engine
    from ..params import SamplingParams
    from ..requests import Request

EXAMPLES = """\
  saguaro chat --target ./llama-8b --draft ./llama-1b
  saguaro chat --target ./llama-8b --draft ./llama-1b --temperature 0.7 --system "Be brief."
  saguaro chat --target ./llama-8b --method ar      plain decoding
"""
HELP = "/reset begins anew, /stats shows counts, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling_options(parser, max_new_tokens=512)
    add_engine_options(parser, k=4, branches=20)


def run(args: argparse.Namespace) -> int:
    check_models(args)
    print(f"loading {args.target}", file=sys.stderr, flush=True)
    from saguaro_runtime import Engine, SamplingParams

    config = engine_config(args, max_batch=1)
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    with Engine(args.target, args.draft, config) as engine, StatusLine(sys.stderr) as status:
        print(HELP, file=sys.stderr, flush=True)
        Conversation(engine, params, status, args.system).hold()
    return 0


class Conversation:
    """Questions from stdin, answers to stdout; everything else goes to stderr."""

    def __init__(
        self, engine: Engine, params: SamplingParams, status: StatusLine, system: str | None = None
    ) -> None:
        self.engine, self.params, self.status, self.system = engine, params, status, system
        self.turns = 0
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def hold(self) -> None:
        """Until the end of input."""
        while True:
            try:
                question = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return
            if question == "/exit":
                return
            if question == "/reset":
                self.reset()
            elif question == "/stats":
                for key, value in self.engine.stats().items():
                    print(f"{key}: {value}", file=sys.stderr)
            elif question.startswith("/"):
                print(HELP, file=sys.stderr)
            elif question:
                self.answer(question)

    def answer(self, question: str) -> None:
        """Stream the answer; what was written before Ctrl-C stays in the conversation."""
        from saguaro_runtime import ConfigError

        self.messages.append({"role": "user", "content": question})
        # The last seed there is is followed by the first one.
        seed = (self.params.seed + self.turns + 2**63) % 2**64 - 2**63
        self.turns += 1
        try:
            ids = encode(self.engine.tokenizer, self.messages)
            request = self.engine.add(ids, replace(self.params, seed=seed))
        except ConfigError as error:
            self.messages.pop()
            print(f"{error}; /reset begins anew", file=sys.stderr)
            return
        start, text = time.monotonic(), ""
        with Interrupt() as interrupt:
            while request.finish_reason is None and not interrupt.asked:
                self.engine.step()
                text += _show(request.take_text())
                self.status.show(figures(request, time.monotonic() - start))
        self.engine.cancel(request)
        text += _show(request.take_text())
        print(flush=True)
        if request.error:
            print(f"the answer broke off: {request.error}", file=sys.stderr)
        self.status.keep(figures(request, time.monotonic() - start))
        self.messages.append({"role": "assistant", "content": text})


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The conversation's ids by the tokenizer's template, or as a plain dialogue without one."""
    from ..intake import chat_ids, prompt_ids

    if getattr(tokenizer, "chat_template", None):
        return chat_ids(messages, tokenizer)
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return prompt_ids("\n".join([*lines, "Assistant:"]), tokenizer)


def figures(request: Request, seconds: float) -> str:
    """How fast an answer comes, and how much of it was foreseen."""
    summary = request.counts.summary()
    asked = summary["hits"] + summary["misses"]
    parts = [
        f"{summary['tokens']} tokens",
        f"{summary['tokens'] / max(seconds, 1e-9):.1f} tokens/s",
        f"{summary['tokens_per_round']:.2f} per round",
    ]
    if asked:
        parts.append(f"hit rate {summary['hit_rate']:.2f}")
    return ", ".join(parts)


class Interrupt:
    """Inside, the first Ctrl-C sets `asked`, so that the round can end; the second interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class StatusLine:
    """A status line at the bottom of a terminal, below the scrolling text. If the stream is no
    terminal, only what is to be kept is printed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rows = 0
        if stream.isatty():
            self.rows = os.get_terminal_size(stream.fileno()).lines
        if self.rows > 2:
            # Scroll once, so that the cursor is above the line, and keep text out of it.
            self._write(f"\n\x1b[1;{self.rows - 1}r\x1b[{self.rows - 1};1H")

    def show(self, text: str) -> None:
        """Put `text` on the line."""
        if self.rows > 2:
            self._write(f"\x1b7\x1b[{self.rows};1H\x1b[2K\x1b[2m{text}\x1b[0m\x1b8")

    def keep(self, text: str) -> None:
        """Put `text` on the line for good; without a terminal, print it."""
        if self.rows > 2:
            self.show(text)
        else:
            self._write(f"[{text}]\n")

    def close(self) -> None:
        """Give the line back to the terminal."""
        if self.rows > 2:
            self._write(f"\x1b7\x1b[r\x1b[{self.rows};1H\x1b[2K\x1b8")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _show(text: str) -> str:
    if text:
        print(text, end="", flush=True)
    return text
