"""The command line: usage, exit codes, and what is left behind when it is interrupted."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_gguf

import saguaro_runtime
from saguaro_kernels import _launch
from saguaro_kernels.errors import ConfigError
from saguaro_runtime import Engine, EngineConfig, SamplingParams, cli
from saguaro_runtime.cli.generate import encode
from saguaro_runtime.models.gguf import convert

COMMAND = [sys.executable, "-c", "import saguaro_runtime.cli as c; raise SystemExit(c.main())"]
ROOT = Path(saguaro_runtime.__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny transformers folder with a tokenizer; it serves as target and as draft."""
    folder = tmp_path_factory.mktemp("model")
    tiny_gguf.write(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder)
    return str(folder)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by their reference, here and in the draft's process: kernels are not the subject."""
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def env() -> dict[str, str]:
    """Commands in a process of their own run as users run them: kernels not interpreted."""
    return {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}


def run_usage(line: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    return caught.value.code


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_usage(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"{name} " in text and command.summary in text
    assert "bench" in text


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_explains_itself_with_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_usage([name, "--help"]) == 0
    text = capsys.readouterr().out
    examples = importlib.import_module(cli.COMMANDS[name].module).EXAMPLES
    assert "examples:\n" + examples.rstrip() in text
    assert f"saguaro {name}" in examples


def complete(line: str, script: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    code = (
        f"{script}\nread -ra COMP_WORDS <<< '{line}'\n"
        "[[ $COMP_LINE == *' ' ]] && COMP_WORDS+=('')\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        "_shtab_saguaro; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    shell = subprocess.run(
        ["bash", "--norc"], input=code, capture_output=True, text=True,
        env={**os.environ, "COMP_LINE": line},
    )  # fmt: skip
    return shell.stdout.split()


def test_completion_in_a_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(complete("saguaro ", script)) >= {*cli.COMMANDS, "bench"}
    assert complete("saguaro generate --dra", script) == ["--draft", "--draft-device"]
    assert complete("saguaro generate --method s", script) == ["sd", "ssd"]
    (tmp_path / "model").mkdir()
    assert complete(f"saguaro chat --target {tmp_path}/mo", script) == [f"{tmp_path}/model"]
    for shell in ("zsh", "tcsh"):
        assert cli.main(["completion", shell]) == 0
        assert "saguaro" in capsys.readouterr().out
    assert cli.main(["completion", "cmd.exe"]) == 1
    assert "bash, zsh" in capsys.readouterr().err


@pytest.mark.parametrize("line", [[], ["cactus"], ["generate"], ["demo", "--rule", "none"]])
def test_wrong_usage_is_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_usage(line) == 2
    assert "usage: saguaro" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_usage(["--version"]) == 0
    assert capsys.readouterr().out == f"saguaro {cli.version()}\n"


def test_failure_is_1_with_the_reason_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["generate", "--target", missing, "--draft", missing, "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert missing in error
    assert "Traceback" not in error


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, saguaro_runtime.cli as c\n"
        "for name in ('', 'chat ', 'serve ', 'generate '):\n"
        "    try: c.main((name + '--help').split())\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'triton', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("found", ["nothing", "a file", "an empty folder"])
def test_a_missing_model_is_named_before_anything_is_loaded(
    found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model"
    if found == "a file":
        path.write_text("")
    elif found == "an empty folder":
        path.mkdir()
    assert cli.main(["generate", "--target", str(path), "--method", "ar", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    reason = {"nothing": "does not exist", "a file": "is a file"}.get(found, "config.json")
    assert error.startswith(f"saguaro: --target {path}: ") and reason in error
    assert "loading" not in error and "hub" not in error.replace(str(path), "")
    assert cli.check_model("--target", "org/name") == "org/name"  # a hub's name is not looked up
    with pytest.raises(ConfigError, match="--draft ./missing"):
        cli.check_model("--draft", "./missing")


def test_speculation_without_a_draft_is_refused(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--target", model, "--prompt", "x"]) == 1
    assert "--method ar" in capsys.readouterr().err


def test_ctrl_c_is_130_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("saguaro_runtime.cli.doctor.run", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "saguaro: interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def generated(model: str, *options: str) -> list[str]:
    speculation = ["--k", "2", "--branches", "4", "--max-new-tokens", "12"]
    return ["generate", "--target", model, "--draft", model, *speculation, *options]


def test_generate_prints_the_engines_text(
    model: str, capsys: pytest.CaptureFixture[str], fast: None, no_leaks: None
) -> None:
    assert cli.main(generated(model, "--prompt", "he 42", "--prompt", "then", "--stats")) == 0
    captured = capsys.readouterr()
    assert "tokens per round" in captured.err
    with Engine(model, None, EngineConfig(method="ar")) as engine:
        prompts = [encode(engine.tokenizer, text, chat=True) for text in ("he 42", "then")]
        expected = [out.text for out in engine.generate(prompts, SamplingParams(12))]
    assert captured.out == expected[0] + "\n\n" + expected[1] + "\n"


def test_generate_prints_objects_for_machines(
    model: str, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    line = ["generate", "--target", model, "--method", "ar", "--max-new-tokens", "5", "--json"]
    assert cli.main([*line, "--prompt", "he", "--prompt", "then"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    with Engine(model, None, EngineConfig(method="ar")) as engine:
        for its, text in ((first, "he"), (second, "then")):
            [output] = engine.generate(
                [encode(engine.tokenizer, text, chat=True)], SamplingParams(5)
            )
            assert (its["text"], its["token_ids"]) == (output.text, output.token_ids)
            assert its["usage"] == output.usage and its["finish_reason"] == output.finish_reason
            assert its["metrics"]["tokens"] == len(output.token_ids)


def test_generate_reads_a_raw_prompt_from_stdin(
    model: str, capsys: pytest.CaptureFixture[str], fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("he 42"))
    line = ["generate", "--target", model, "--method", "ar", "--max-new-tokens", "12"]
    assert cli.main([*line, "--raw", "--prompt", "-"]) == 0
    with Engine(model, None, EngineConfig(method="ar")) as engine:
        expected = engine.generate("he 42", SamplingParams(12))[0].text
    assert capsys.readouterr().out == expected + "\n"


def test_bench_gets_the_rest_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_bench").mkdir()
    (tmp_path / "some_bench" / "__init__.py").write_text("")
    (tmp_path / "some_bench" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "BENCH", ("not_installed_bench", "some_bench"))
    monkeypatch.setattr(sys, "argv", [])
    assert cli.main(["bench", "--list", "verify"]) == 0
    assert capsys.readouterr().out == "['--list', 'verify']\n"
    monkeypatch.setattr(cli, "BENCH", ("not_installed_bench",))
    with pytest.raises(ConfigError, match=r"saguaro-ssd\[bench\]"):
        cli._bench([])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"]
)
def test_interrupted_generation_leaves_nothing_behind(
    number: signal.Signals, code: int, model: str, env: dict[str, str], no_leaks: None
) -> None:
    line = [*COMMAND, *generated(model, "--prompt", "he", "--max-new-tokens", "100")]
    endless = [*line, *["--prompt", "then"] * 2000]
    process = subprocess.Popen(
        endless,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # text has come, so the draft's process runs
    # A terminal sends Ctrl-C to the whole group, the draft's process included.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code, error
    assert "Traceback" not in error
    if number == signal.SIGINT:
        assert error.rstrip().endswith("saguaro: interrupted")
    deadline = time.monotonic() + 5
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_module_is_a_command(env: dict[str, str]) -> None:
    line = [sys.executable, "-m", "saguaro_runtime.cli", "--version"]
    run = subprocess.run(line, env=env, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and run.stdout == f"saguaro {cli.version()}\n", run.stderr


def test_reader_that_goes_away_gets_no_traceback(env: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "doctor"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")],
)
def test_files_that_fail_are_told_without_a_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("saguaro_runtime.planner.cli.run", fail)
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == f"saguaro: {error}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plot", "."], "is a folder"),
        (["--plot", "no/where.png"], "there is no folder"),
        (["--plot", "plan.docx"], "want a suffix of"),
        (["--max-k", "0"], "--max-k: got 0"),
        (["--max-k", "2000"], "--max-k: got 2000"),
        (["--miss", "nan:1"], "--miss SCALE: got nan"),
        (["--handoff-ms", "nan"], "--handoff-ms: got nan"),
        (["--tp", "0"], "--tp: got 0"),
        (["--context", "-1"], "--context: got -1"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--verify-ms", "18", "--step-ms", "3", *options]) == 1
    assert words in capsys.readouterr().err
