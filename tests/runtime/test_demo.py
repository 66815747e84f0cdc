"""The demo's own logic on engines whose numbers are known."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_stats import STATS

from saguaro_runtime import EngineConfig, SamplingParams, cli
from saguaro_runtime.compare import Comparison
from saguaro_runtime.demo import cli as demo
from saguaro_runtime.demo import measure as demo_measure
from saguaro_runtime.demo import report as demo_report
from saguaro_runtime.demo.cli import check_texts
from saguaro_runtime.demo.measure import measure, opened
from saguaro_runtime.demo.report import Variant, plan


class FakeTokenizer:
    chat_template = "yes"

    def apply_chat_template(self, message: list[dict[str, str]], **_: Any) -> str:
        return "Q:" + message[0]["content"]

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class FakeEngine:
    """Answers a prompt with its own ids, up to the limit; `wrong` makes SSD differ at the end."""

    def __init__(self, config: EngineConfig, log: list[Any], *, wrong: bool) -> None:
        self.config, self.log, self.wrong = config, log, wrong

    def __enter__(self) -> FakeEngine:
        self.log.append(("open", self.config.method))
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(("close", self.config.method))

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        ids = (prompt * 99)[: params.max_new_tokens]
        return [*ids[:-1], 0] if self.wrong and self.config.method == "ssd" else ids

    def generate(self, prompts: Any, params: SamplingParams) -> list[SimpleNamespace]:
        self.log.append(("generate", params.max_new_tokens))
        several = [prompts] if isinstance(prompts[0], int) else prompts
        return [SimpleNamespace(token_ids=self._answer(its, params), rounds=[]) for its in several]

    def reset_stats(self) -> None:
        self.log.append(("reset", self.config.method))

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[str]:
        yield from map(chr, self._answer(prompt, params))

    def stats(self) -> dict[str, Any]:
        return dict(STATS)


class FakeTarget:
    """Answers generate() with as many zeros as are asked for."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **options: Any) -> torch.Tensor:
        self.log.append(("assisted", max_new_tokens, options["do_sample"]))
        return torch.cat((ids, ids.new_zeros(1, max_new_tokens)), dim=1)


class FakePair:
    draft = None
    tokenizer = FakeTokenizer()

    def __init__(self, *, wrong: bool = False) -> None:
        self.log: list[Any] = []
        self.target = FakeTarget(self.log)
        self.wrong = wrong

    def open(self, config: EngineConfig) -> FakeEngine:
        return FakeEngine(config, self.log, wrong=self.wrong)


def arguments(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(line)


def compare_by_equality(first: list[int], second: list[int], *_: Any, **__: Any) -> Comparison:
    return Comparison("equal") if first == second else Comparison("different", 3, 0.5)


def test_plan_gives_the_methods_one_core_each_and_two_cores_to_the_rest() -> None:
    variants = plan(arguments("--k", "3", "--rule", "token"), cores=2)
    assert [v.name for v in variants] == [
        "ar", "ar_2_threads", "sd", "sd_2_threads", "assisted", "ssd"
    ]  # fmt: skip
    by_name = {v.name: v.config for v in variants}
    assert {by_name[name].threads for name in ("ar", "sd", "ssd")} == {1}
    assert by_name["sd"].lane == by_name["ssd"].lane == "auto"
    assert (by_name["sd_2_threads"].threads, by_name["sd_2_threads"].lane) == (2, "inline")
    assert {(config.k, config.rule) for config in by_name.values()} == {(3, "token")}


def test_plan_on_one_core_and_for_one_method() -> None:
    assert [v.name for v in plan(arguments(), cores=1)] == ["ar", "sd", "ssd"]
    assert [v.name for v in plan(arguments("--method", "sd"), cores=2)] == [
        "sd", "sd_2_threads", "assisted"
    ]  # fmt: skip
    assert [v.name for v in plan(arguments("--method", "ssd"), cores=2)] == ["ssd"]


def test_prompts_are_chat_messages_and_the_default_set_is_mixed() -> None:
    assert demo.read_prompts(FakeTokenizer(), ["hi"]) == [[ord(c) for c in "Q:hi"]]
    default = demo.read_prompts(FakeTokenizer(), None)
    chat = ["".join(map(chr, ids)).startswith("Q:") for ids in default]
    assert any(chat) and not all(chat)


def test_answer_is_streamed() -> None:
    out = io.StringIO()
    engine = FakePair().open(EngineConfig())
    demo.print_answer(engine, FakeTokenizer(), [97, 98], SamplingParams(5), out)
    assert out.getvalue() == "ab\nababa\n\n"


def test_variants_are_warmed_up_and_then_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 20.0, 24.0, 30.0, 31.0, 40.0, 44.0])  # 1 s by SD, 4 s by assisted
    monkeypatch.setattr(demo_measure.time, "perf_counter", lambda: next(clock))
    pair, ticks, threads = FakePair(), [], torch.get_num_threads()
    variants = [Variant("sd", EngineConfig(method="sd", threads=1))]
    variants.append(Variant("assisted", EngineConfig(method="sd", threads=2)))
    with opened(pair, variants) as runs:
        params = SamplingParams(20, 0.7)
        rows = measure(runs, variants, [[[1]], [[2, 3]]], params, lambda: ticks.append(1))
    warm = demo_measure.WARM_UP_TOKENS
    assert pair.log == [
        ("open", "sd"),
        *(("generate", warm), ("reset", "sd"), ("assisted", warm, True)),
        *(("generate", 20), ("assisted", 20, True)) * 2,
        ("close", "sd"),
    ]
    texts = [[1] * 20, [2, 3] * 10]
    measured = {"tokens_per_s": 40 / 2.0, "rates": [20.0, 20.0], "texts": texts}
    assert rows["sd"] == STATS | measured
    assert rows["assisted"]["tokens_per_s"] == 40 / 8.0 and rows["assisted"]["hit_rate"] == 0.0
    assert len(ticks) == 4
    assert torch.get_num_threads() == threads


def check(pair: FakePair, params: SamplingParams, *line: str, **options: Any) -> Any:
    variants = plan(arguments(*line), cores=2)
    return check_texts(pair, [[1, 2], [3]], params, variants, **options)


def test_texts_are_checked_against_plain_decoding_when_greedy() -> None:
    seen = []

    def compare(first: list[int], second: list[int], *_: Any, **options: Any) -> Comparison:
        assert options["config"].method == "ar" and options["config"].reproducible
        seen.append((first, second))
        return Comparison("equal")

    pair = FakePair()
    assert check(pair, SamplingParams(500), compare=compare) == ("equal", None)
    assert [what for what in pair.log if what[0] == "open"] == [
        ("open", "ar"),
        ("open", "sd"),
        ("open", "ssd"),
    ]
    assert len(seen) == 4
    assert all(len(first) == demo.CHECKED_TOKENS for first, _ in seen)


def test_texts_are_checked_against_sd_when_sampled() -> None:
    pair = FakePair()
    check(pair, SamplingParams(4, 1.0), compare=compare_by_equality)
    assert [what for what in pair.log if what[0] == "open"] == [("open", "sd"), ("open", "ssd")]
    pair = FakePair()
    check(pair, SamplingParams(4, 1.0), "--rule", "coupled", compare=compare_by_equality)
    assert ("open", "ar") in pair.log


def test_a_different_text_is_found() -> None:
    pair = FakePair(wrong=True)
    assert check(pair, SamplingParams(4), compare=compare_by_equality) == ("different", 0.5)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["equal", "near_tie", "equal", "equal"], ("near_tie", 1e-4)),
        (["near_tie", "different", "equal", "near_tie"], ("different", 1e-4)),
    ],
)
def test_worst_verdict_is_reported(found: list[str], expected: tuple[str, float]) -> None:
    answers = iter(found)

    def compare(*_: Any, **__: Any) -> Comparison:
        verdict = next(answers)
        return Comparison(verdict, None if verdict == "equal" else 2, 1e-4)

    assert check(FakePair(), SamplingParams(4), compare=compare) == expected


def test_one_method_alone_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = []
    monkeypatch.setattr(demo, "load", lambda *what: loaded.append(what) or FakePair())
    line = ["demo", "--json", "--target", "t", "--draft", "d", "--method", "ssd"]
    assert cli.main([*line, "--dtype", "bfloat16"]) == 0
    assert loaded == [("t", "d", "bfloat16")]
    assert json.loads(capsys.readouterr().out)["texts_equal"] is None


def test_wrong_options_are_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saguaro_runtime.demo.model.load_pair", lambda: pytest.fail("fetched"))
    assert cli.main(["demo", "--k", "0"]) == 1
    assert "k: got 0, want an integer in 1..64" in capsys.readouterr().err
    assert cli.main(["demo", "--max-new-tokens", "0"]) == 1
    assert "max_new_tokens: got 0, want an integer in 1.." in capsys.readouterr().err


@pytest.mark.parametrize("target", [[], ["--target", "t"]])
def test_ngrams_are_refused_by_name(target: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *target, "--draft", "ngram"]) == 1
    assert "--draft ngram: the demo measures" in capsys.readouterr().err


def report(*line: str, check: Any = ("equal", None)) -> tuple[dict[str, Any], list[Variant]]:
    variants = plan(arguments(*line), cores=2)
    speeds = {"ar": 10.0, "ar_2_threads": 16.0, "sd": 20.0, "sd_2_threads": 24.0, "ssd": 25.0}
    speeds["assisted"] = 12.5
    rows = {v.name: {**STATS, "tokens_per_s": speeds[v.name]} for v in variants}
    params = SamplingParams(48)
    return demo_report.summarize(rows, check, variants, params, "bfloat16", 4), variants


def test_json_has_the_promised_keys() -> None:
    found = json.loads(json.dumps(report()[0]))
    wanted = {
        "tokens_per_s",
        "tokens_per_round",
        "accepted_per_round",
        "hit_rate",
        "overlap",
        "t_verify_ms",
        "t_draft_step_ms",
    }
    for method in ("ar", "sd", "ssd"):
        assert wanted <= set(found["methods"][method])
    assert found["speed"]["sd_vs_ar"] == 2.0
    assert found["speed"]["ssd_vs_ar"] == 2.5
    assert found["speed"]["ssd_vs_sd"] == 1.25
    assert found["speed"]["ssd_vs_assisted"] == 2.0
    assert found["texts_equal"] == "equal"
    assert set(found["machine"]) == {"date", "processor", "cores"}
    assert set(found["versions"]) == {"saguaro", "python", "torch", "triton", "transformers"}


def test_prediction_is_theorem_7_of_the_measured_parts() -> None:
    # SD: 2 tokens in 60 + 2 * 15 ms. SSD: half the rounds hit and take 60 ms (3 steps of 15 fit),
    # half miss and redraft one token: (2.5 + 1.5) / 2 tokens in (60 + 60 + 12) / 2 ms.
    expected = (2.0 / 66) / (2.0 / 90)
    found = report()[0]
    assert found["predicted_ssd_vs_sd"] == pytest.approx(expected)
    # SD: a text's first round has no drafts. SSD: half the rounds promote, half redraft; all pay
    # what drafting ahead takes longer; both the host and the prompts.
    sd, ssd = 60 + 5 + 0.9 * 2 * 15, 60 + 5 + 3 + (4 + 12) / 2
    assert found["predicted_in_full"] == pytest.approx((10 * sd + 500) / (10 * ssd + 500))
    assert "by Theorem 7, 1.13 with all that a round pays" in demo_report.render(found)


def test_one_method_is_reported_alone() -> None:
    found, variants = report("--method", "ssd", check=None)
    assert list(found["methods"]) == ["ssd"]
    assert found["speed"] == {}
    assert found["predicted_ssd_vs_sd"] is None and found["texts_equal"] is None
    assert demo_report.render(found).count("\n") == 4


def test_table_shows_every_variant_and_the_verdict() -> None:
    text = demo_report.render(report(check=("near_tie", 2e-4))[0])
    lines = text.splitlines()
    assert lines[0].split() == [
        *("tokens/s", "vs", "AR", "vs", "SD", "tokens/round", "accepted/round", "hit", "rate"),
        "overlap",
    ]
    assert lines[1].split() == ["AR", "10.0", "1.00", "0.50", "2.00", "-", "-", "-"]
    assert lines[6].split() == ["SSD", "25.0", "2.50", "1.25", "2.00", "1.00", "0.50", "0.90"]
    assert "texts of the methods (float32): near tie, gap 2.0e-04" in text
    assert "sampling 3.0 ms (20% of it)" in text
    assert len({len(line) for line in lines[:7]}) == 1


def test_command_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "load", lambda *_: FakePair())
    line = ["demo", "--json", "--target", "t", "--draft", "d", "--prompt", "x", "--no-check"]
    assert cli.main(line) == 0
    captured = capsys.readouterr()
    assert set(json.loads(captured.out)["methods"]) >= {"ar", "sd", "ssd"}
    assert "Q:x" in captured.err  # the streamed answer


def test_a_target_without_a_draft_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--target", "t"]) == 1
    assert "want both or neither" in capsys.readouterr().err
