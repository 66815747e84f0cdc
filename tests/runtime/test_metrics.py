"""What the engine says of itself: counters for a scraper, times of requests, pictures of a run."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import scripts

import saguaro_runtime
from saguaro_runtime import ConfigError, Engine, Output, SamplingParams, UnsupportedError, cli
from saguaro_runtime.metrics import Histogram, Span, pause, trace_events
from saguaro_runtime.metrics.plot import check_pictures, plot_timeline

P = scripts.random_law(5, seed=1)
Q = scripts.random_law(5, seed=2, near=P)
SAMPLE = re.compile(r'saguaro_(\w+?)(?:\{(\w+="[^"]*"(?:,\w+="[^"]*")*)\})? (\S+)')


def _run(**options: object) -> tuple[Engine, list[Output]]:
    engine = scripts.engine(scripts.model(P), scripts.model(Q), branches=4, max_batch=2, **options)
    params = [
        SamplingParams(30, 1.0, seed=1),
        SamplingParams(40, 1.0, seed=2, stop_token_ids=(0,)),
        SamplingParams(0),
        SamplingParams(20),
    ]
    return engine, engine.generate([[1, 2, 3]] * 4, params)


def _samples(text: str) -> dict[str, dict[str, float]]:
    """name -> labels -> value of a page, which must be well formed."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert name not in kinds and kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
        elif not line.startswith("# HELP"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[2] not in found[match[1]], line
            found[match[1]][match[2]] = float(match[3])
    assert text.endswith("\n") and all(name.startswith("saguaro_") for name in kinds)
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter")
        if kind == "histogram":
            its = found[name.removeprefix("saguaro_") + "_bucket"]
            values = list(its.values())
            assert values == sorted(values) and list(its)[-1] == 'le="+Inf"'
            assert values[-1] == found[name.removeprefix("saguaro_") + "_count"][None]
    return found


def test_prometheus_text_says_what_stats_say() -> None:
    engine, outputs = _run()
    with engine:
        page, stats = _samples(engine.prometheus()), engine.stats()
        engine.add([1, 2], SamplingParams(5))
        assert _samples(engine.prometheus())["waiting"][None] == 1
        engine.reset_stats()
        assert _samples(engine.prometheus())["tokens_total"][None] == 0
    for name in ("tokens", "drafted", "accepted"):
        assert page[f"{name}_total"][None] == stats[name] > 0
    for name in ("hits", "misses"):
        assert sum(page[f"{name}_total"].values()) == stats[name] > 0
    assert sum(page["rounds_total"].values()) == stats["rounds"]
    assert page["requests_total"] == {'reason="length"': 3, 'reason="stop"': 1}
    assert stats["ended"] == {"length": 3, "stop": 1}
    assert page["prompt_tokens_total"][None] == 12
    assert page["accepted_length_sum"][None] == stats["accepted"]
    assert page["accepted_length_count"][None] == stats["rounds"]
    assert page["first_token_seconds_count"][None] == 3
    assert page["request_seconds_count"][None] == 4
    verify = page["work_seconds_total"]['lane="target",name="verify"']
    count = page["work_total"]['lane="target",name="verify"']
    assert 1e3 * verify / count == pytest.approx(stats["t_verify_ms"], rel=1e-6)
    assert page["speculation"][None] == 1 and page["slots_used"][None] == 0


def test_times_of_a_request() -> None:
    engine, outputs = _run()
    engine.close()
    waited = [output.metrics["wait_s"] for output in outputs]
    assert waited[3] > max(waited[:2])  # two rows: the last request waits for one of them
    for output in outputs:
        its = output.metrics
        assert 0 <= its["wait_s"] <= its["first_token_s"] <= its["seconds"]
        if len(output.token_ids) > 1:
            decoding = its["seconds"] - its["first_token_s"]
            assert its["tokens_per_s"] == pytest.approx((len(output.token_ids) - 1) / decoding)


def test_rounds_without_an_answer_of_the_draft_are_late_and_no_misses() -> None:
    engine, _ = _run()
    with engine:
        request = engine.add([1, 2], SamplingParams(40))
        for _ in range(4):
            engine.step()
        engine.lane.off = "gone"
        while request.finish_reason is None:
            engine.step()
        counts = request.counts
    sources = [round.source for round in request.rounds]
    assert sources[0] == "first" and set(sources[4:]) == {"late"} and "late" not in sources[:4]
    assert counts.hits + counts.misses == 3
    assert counts.rounds_after["late"] == len(sources) - 4
    assert request.output().metrics["rounds_by_source"]["late"] == len(sources) - 4


def test_a_bar_shows_how_far_a_generation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    class Bar:
        def __init__(self, total: int, disable: bool | None, **_: object) -> None:
            self.n, self.disable = 0, disable
            assert total == 30

        def update(self, count: int) -> None:
            self.n += count
            shown.append(self.n)

        def close(self) -> None:
            shown.append(-1)

    monkeypatch.setattr("saguaro_runtime.engine.tqdm", Bar)
    with scripts.engine(scripts.model(P), scripts.model(Q)) as engine:
        engine.generate([[1, 2]] * 2, SamplingParams(15), progress=True)
    assert shown[-2:] == [30, -1] and shown[:-1] == sorted(shown[:-1]) and len(shown) > 5


def test_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 14.0


def test_the_pause_between_two_verifications() -> None:
    spans = [
        Span("target", "verify", 0, 10), Span("target", "verify", 16, 26),
        Span("target", "verify", 28, 38), Span("target", "verify", 60, 70),
        # It outlasts the first verification by 2, answers for 1.5; then reply and start take 2.5.
        Span("draft", "look_ahead", 1, 12), Span("draft", "tree_step", 2, 11.5),
        Span("draft", "promote", 12, 13.5), Span("draft", "look_ahead", 15, 24),
        Span("draft", "tree_step", 15.5, 23),
        # Only hand-offs after the second; a prompt comes between the third and the last.
        Span("target", "prefill", 40, 55), Span("draft", "prefill", 40, 50),
        Span("row 0", "hit", 0, 38),
    ]  # fmt: skip
    found = pause(spans)
    assert (found.overrun, found.host) == pytest.approx((2 / 2, (2.5 + 2) / 2))
    assert pause(reversed(spans)) == found
    assert pause(spans[:1]) == pause([]) == (0, 0)
    # In one thread the draft's work lies in the pause: it is no time of the host, and outlasts
    # nothing.
    verifies = [Span("target", "verify", 0, 10), Span("target", "verify", 20, 30)]
    inline = [Span("draft", "draft_step", 10, 14), Span("draft", "look_ahead", 14, 19)]
    assert pause([*verifies, *inline]) == (0, 1)


def test_a_run_opens_in_a_trace_viewer(tmp_path: Path) -> None:
    engine, outputs = _run()
    with engine:
        rounds = engine.stats()["rounds"]
        events = json.loads(trace_events(engine.spans))["traceEvents"]
        plot_timeline(engine.spans, tmp_path / "run.png")
        plot_timeline(engine.spans, tmp_path / "end.png", seconds=0.01)
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert lanes == {"target", "draft", "row 0", "row 1"}
    shown = [event for event in events if event["name"] in ("first", "hit", "miss")]
    assert len(shown) == rounds
    assert {event["cname"] for event in shown if event["name"] == "hit"} == {"good"}
    for name in ("run.png", "end.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_and_one_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot_timeline([], tmp_path / "none.png")
    plot_timeline([Span("draft", "something else", 0.0, 1.0)], tmp_path / "one.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"saguaro-ssd\[bench\]"):
        plot_timeline([], tmp_path / "none.png")
    with pytest.raises(UnsupportedError, match=r"saguaro-ssd\[bench\]"):
        check_pictures(timeline=None, plot="none.png")
    with pytest.raises(ConfigError, match="no folder"):
        check_pictures(timeline=str(tmp_path / "no" / "run.json"), plot=None)


def test_generate_writes_timeline_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Letters:
        eos_token_id = None

        def __call__(self, text: str) -> object:
            return type("Encoding", (), {"input_ids": ["abcde".index(its) for its in text]})()

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join("abcde"[id] for id in ids)

    engine = scripts.engine(scripts.model(P), scripts.model(Q), tokenizer=Letters())
    monkeypatch.setattr(saguaro_runtime, "Engine", lambda *_: engine)
    timeline, plot = tmp_path / "run.json", tmp_path / "run.png"
    line = ["generate", "--target", "t", "--draft", "d", "--prompt", "bc", "--max-new-tokens", "20"]
    assert cli.main([*line, "--timeline", str(timeline), "--plot", str(plot)]) == 0
    assert len(capsys.readouterr().out.strip()) == 20
    assert any(its["name"] == "hit" for its in json.loads(timeline.read_text())["traceEvents"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*line, "--plot", str(tmp_path / "no" / "run.png")]) == 1
    assert "no folder" in capsys.readouterr().err
