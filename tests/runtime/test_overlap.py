"""Scripted models whose calls take a known time: what overlaps, and what that is worth."""

from __future__ import annotations

import json

import pytest
import scripts

from saguaro_runtime import SamplingParams
from saguaro_runtime.metrics import Span, SpanLog, Timeline, overlap, trace_events
from saguaro_runtime.models.scripted import ScriptedModel
from saguaro_runtime.planner import ssd_vs_sd

VERIFY_S = 0.2  # long beside a hand-off on a busy machine
K = 4
STEP_S = 0.75 * VERIFY_S / K
TREE_STEP_S = 0.6 * VERIFY_S / (K + 1)
P = scripts.random_law(8, seed=1)
Q = scripts.random_law(8, seed=2, near=P)


def _run(method: str) -> dict:
    target = ScriptedModel(P, extend_s=VERIFY_S, prefill_s=0.01)
    draft = ScriptedModel(Q, extend_s=STEP_S, tree_s=TREE_STEP_S, prefill_s=0.01)
    with scripts.engine(
        target, draft, method=method, lane="process", k=K, branches=16, ranking="noise", max_batch=1
    ) as engine:
        request = engine.add([1, 2] * 20, scripts.sampled(3, 80))
        engine.step()
        engine.stats()
        prefill = overlap(engine.spans, "prefill", "prefill")
        engine.reset_stats()
        while request.finish_reason is None:
            engine.step()
        return engine.stats() | {"prefill_overlap": prefill}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    return {method: _run(method) for method in ("sd", "ssd")}


def test_drafting_ahead_happens_inside_verification(runs: dict[str, dict]) -> None:
    assert runs["ssd"]["overlap"] >= 0.85
    assert runs["ssd"]["t_verify_ms"] == pytest.approx(1e3 * VERIFY_S, rel=0.15)


def test_the_draft_prefills_while_the_target_does(runs: dict[str, dict]) -> None:
    assert all(run["prefill_overlap"] >= 0.8 for run in runs.values())


def test_ssd_is_faster_than_sd_by_theorem_7(runs: dict[str, dict]) -> None:
    """The draft chain takes three quarters of a verification; SSD hides it wherever it hits."""
    sd, ssd = runs["sd"], runs["ssd"]
    measured = ssd["tokens_per_s"] / sd["tokens_per_s"]
    after = ssd["tokens_per_round_after"]
    predicted = ssd_vs_sd(
        verify_seconds=ssd["t_verify_ms"] / 1e3,
        draft_seconds=K * sd["t_redraft_step_ms"] / 1e3,
        tree_round_seconds=ssd["t_look_ahead_ms"] / 1e3,
        redraft_seconds=K * ssd["t_redraft_step_ms"] / 1e3,
        hit_rate=ssd["hit_rate"],
        tokens_sd=sd["tokens_per_round"],
        tokens_hit=after["hit"],
        tokens_miss=after["miss"],
    )
    assert measured >= 1.3
    assert measured == pytest.approx(predicted, rel=0.10)


def test_one_miss_in_a_batch_leaves_the_other_rows_alone() -> None:
    """With partial_accept a missed row goes on undrafted: the others keep their chains."""
    with scripts.engine(
        scripts.model(P), scripts.model(Q), k=3, branches=4, reproducible=False,
        fallback="partial_accept", proposal="none",
    ) as engine:  # fmt: skip
        params = [scripts.sampled(seed, 60) for seed in range(8)]
        requests = [engine.add([1, 2], param) for param in params]
        mixed = 0
        for _ in range(12):
            engine.step()
            last = [request.rounds[-1] for request in requests]
            sources = {its.source for its in last}
            mixed += sources == {"hit", "miss"}
            assert all(its.drafted == (3 if its.source == "hit" else 0) for its in last)
        assert mixed > 5


def test_a_round_that_missed_undrafted_has_one_outcome_to_predict() -> None:
    with scripts.engine(
        scripts.model(P), scripts.model(Q), k=3, branches=8, reproducible=False,
        fallback="partial_accept", proposal="none", ranking="noise",
    ) as engine:  # fmt: skip
        output = engine.generate([1, 2], scripts.sampled(1, 300))[0]
    pairs = list(zip(output.rounds, output.rounds[1:], strict=False))
    after_miss = [now.source for before, now in pairs if before.drafted == 0]
    assert len(after_miss) > 5 and set(after_miss) == {"hit"}


def test_overlap_of_hand_made_spans() -> None:
    spans = [
        Span("target", "verify", 0.0, 1.0),
        Span("target", "verify", 2.0, 3.0),
        Span("draft", "look_ahead", 0.5, 2.5),
        Span("draft", "verify", 0.0, 9.0),
    ]
    assert overlap(spans, "look_ahead", "verify") == pytest.approx(0.5)
    assert overlap(spans, "nothing", "verify") == 0.0
    log = SpanLog()
    log.extend(spans)
    assert log.mean_ms("look_ahead") == pytest.approx(2000.0)


def test_timeline_opens_in_a_trace_viewer() -> None:
    timeline = Timeline("draft")
    with timeline.span("tree_step"):
        pass
    spans = timeline.drain()
    events = json.loads(trace_events(spans))["traceEvents"]
    assert [event["ph"] for event in events] == ["M", "X"]
    assert events[1]["name"] == "tree_step" and events[1]["dur"] >= 0
    assert timeline.drain() == []


def test_counts_add_up() -> None:
    with scripts.engine(scripts.model(P), scripts.model(Q), branches=3) as engine:
        outputs = engine.generate([[1, 2]] * 3, SamplingParams(max_new_tokens=50, temperature=1.0))
        stats = engine.stats()
    assert stats["tokens"] == sum(len(o.token_ids) for o in outputs) == 150
    assert stats["rounds"] == sum(o.metrics["rounds"] for o in outputs)
    assert stats["accepted"] <= stats["drafted"]
    assert stats["hits"] + stats["misses"] == stats["rounds"] - 3
    assert sum(stats["accepted_lengths"].values()) == stats["rounds"]
