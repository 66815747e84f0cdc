"""`saguaro chat`: turns, commands, what is kept, and the line of figures."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import saguaro_runtime
from saguaro_kernels import _launch
from saguaro_runtime import Engine, EngineConfig, SamplingParams, build, cli
from saguaro_runtime.cli import chat
from saguaro_runtime.cli.chat import Conversation, Interrupt, StatusLine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.llama())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(build, "choose_lane", lambda config: "inline")


def talk(model: str, lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    pair = ["--target", model, "--draft", model, "--k", "2", "--branches", "4"]
    return cli.main(["chat", *pair, "--max-new-tokens", "8", *options])


def test_a_conversation_grows_and_begins_anew(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hello\n\nagain\n/what\n/stats\n/reset\nhello\n/exit\nnot read\n"
    assert talk(model, lines, monkeypatch, "--system", "be brief") == 0
    said = capsys.readouterr()
    with Engine(model, None, EngineConfig(method="ar")) as engine:
        # Without a template a conversation is a plain dialogue.
        first = "System: be brief\nUser: hello\nAssistant:"
        [one] = engine.generate(first, SamplingParams(8))
        second = f"{first[: -len('Assistant:')]}Assistant: {one.text}\nUser: again\nAssistant:"
        [two] = engine.generate(second, SamplingParams(8))
    assert said.out == f"{one.text}\n{two.text}\n{one.text}\n"
    assert said.err.count("tokens/s, ") >= 3 and "hit rate" in said.err
    assert said.err.count(chat.HELP) == 2 and "accepted_per_round: " in said.err


def test_an_answer_that_does_not_fit_says_so(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(model, "x" * 300 + "\nhello\n", monkeypatch) == 0
    said = capsys.readouterr()
    assert "/reset" in said.err and said.out.count("\n") >= 1


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(k=2, branches=4)
    with Engine(model, model, config) as engine:
        conversation = Conversation(engine, SamplingParams(512), StatusLine(io.StringIO()))
        step, steps = engine.step, 0

        def interrupted() -> Any:
            nonlocal steps
            steps += 1
            if steps == 4:
                signal.raise_signal(signal.SIGINT)  # the round itself goes on
            return step()

        monkeypatch.setattr(engine, "step", interrupted)
        conversation.answer("hello")
        assert steps == 4
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
        assert conversation.messages[1]["content"] == capsys.readouterr().out.rstrip("\n")
        assert engine.scheduler.turn() is None  # its row is free
        monkeypatch.undo()
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        signal.raise_signal(signal.SIGINT)


def test_a_template_is_used_where_there_is_one() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    ids = chat.encode(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<user>hi"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def test_the_line_of_figures_keeps_out_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    size = type("Size", (), {"lines": 24})
    monkeypatch.setattr("os.get_terminal_size", lambda fd: size)
    terminal = Terminal()
    with StatusLine(terminal) as status:
        assert "\x1b[1;23r" in terminal.getvalue()  # text scrolls in the rows above
        status.show("12 tokens/s")
        shown = terminal.getvalue()
        assert shown.endswith("\x1b7\x1b[24;1H\x1b[2K\x1b[2m12 tokens/s\x1b[0m\x1b8")
    assert "\x1b[r" in terminal.getvalue()
    plain = io.StringIO()
    with StatusLine(plain) as status:
        status.show("unseen")
        status.keep("3 tokens")
    assert plain.getvalue() == "[3 tokens]\n"


def test_chat_needs_models_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--target", str(tmp_path / "no"), "--method", "ar"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_options_are_checked_before_anything_is_loaded(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saguaro_runtime, "Engine", None)
    assert talk(model, "hello\n", monkeypatch, "--temperature", "-1") == 1
    assert "temperature: got -1.0" in capsys.readouterr().err
