"""What the policies decide, on models whose times are known: against sweeps and closed forms."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import scripts
import torch
import virtual

import oracles
from saguaro_runtime import ConfigError, EngineConfig, SamplingParams
from saguaro_runtime.expectations import Predictor
from saguaro_runtime.metrics import Span
from saguaro_runtime.planner import crossover_batch
from saguaro_runtime.policy import Policy, choose_fallback, retry_length

VERIFY_S = 0.1
P = scripts.random_law(8, seed=1)
Q = scripts.random_law(8, seed=2, near=P)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> virtual.Clock:
    return virtual.Clock(monkeypatch)


def _pair(step_s: float, tree_s: float, *, row_s: float = 0.0, rows: int = 12):
    """A target that takes VERIFY_S, and a draft."""
    target = scripts.model(P, rows, extend_s=VERIFY_S, slots=4096)
    draft = virtual.RowModel(Q, rows=rows, extend_s=step_s, tree_s=tree_s, slots=4096)
    draft.row_s = row_s
    return target, draft


def _speed(clock: virtual.Clock, rows: int, tokens: int = 120, *, pair, **options):
    defaults = {"k": 4, "branches": 10, "rule": "block", "max_batch": rows, "max_tokens": 10**6}
    with virtual.engine(clock, *_pair(*pair), **(defaults | options)) as engine:
        return virtual.speed(clock, engine, rows, tokens), engine.stats()


def test_a_miss_leaves_the_other_rows_and_their_times_alone(
    clock: virtual.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 3 of 8 is made to miss once: the others have the same rounds at the same times."""
    predict = Predictor.predict

    def run(missing: bool, fallback: str):
        clock.now, turns = 0.0, iter(range(10**6))

        def wrongly(self, turn, drafter):
            depth, extra = predict(self, turn, drafter)
            if missing and next(turns) == 6:
                extra[3] = -2
            return depth, extra

        monkeypatch.setattr(Predictor, "predict", wrongly)
        options = {"fallback": fallback, "proposal": "none", "k": 3, "branches": 40}
        with virtual.engine(clock, *_pair(0.02, 0.01), max_batch=8, **options) as engine:
            requests = [engine.add([1, 2], scripts.sampled(seed, 60)) for seed in range(8)]
            for _ in range(12):
                engine.step()
            engine.stats()
            times = [span[2:4] for span in engine.spans if span.name == "verify"]
        return [request.rounds for request in requests], times

    rounds, times = run(False, "partial_accept")
    after, later = run(True, "partial_accept")
    assert after[3] != rounds[3] and "miss" in {its.source for its in after[3]}
    assert [its for row, its in enumerate(after) if row != 3] == [
        its for row, its in enumerate(rounds) if row != 3
    ]
    assert later == times
    waited, delayed = run(True, "batched_retry")
    assert waited[:3] == rounds[:3]
    assert delayed[:7] == times[:7] and delayed[7][0] > times[7][0] + 2 * 0.02


def test_going_on_undrafted_beats_waiting_at_batch_8(clock: virtual.Clock) -> None:
    """A redraft takes three quarters of a verification, and someone misses in most rounds."""
    pair = (0.75 * VERIFY_S / 4, 0.01)
    options = {"ranking": "probability", "proposal": "none", "pair": pair}
    wait, _ = _speed(clock, 8, 60, fallback="batched_retry", **options)
    fast, _ = _speed(clock, 8, 60, fallback="partial_accept", **options)
    assert fast > 1.08 * wait


def test_the_crossover_is_where_the_closed_form_says(
    clock: virtual.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft = target, and a script that says which outcomes are predicted: every number is known.
    A redraft of all tokens takes 0.4 T_V."""
    predict, missed = Predictor.predict, Counter()

    def by_script(self, turn, drafter):
        depth, extra = predict(self, turn, drafter)
        undrafted = drafter.chain.num_draft[turn.rows] == 0
        dice = (turn.base * 7919 + turn.uid * 104729) % 1000
        wrong = dice < torch.where(undrafted, 30, 250)
        for kind, its in (("chain", ~undrafted), ("undrafted", undrafted)):
            missed[kind] += int((wrong & its).sum())
            missed[kind, "of"] += int(its.sum())
        return depth, torch.where(wrong[:, None], -2, extra)

    monkeypatch.setattr(Predictor, "predict", by_script)
    law = scripts.random_law(8, seed=5)

    def measure(batch: int, fallback: str) -> float:
        target = scripts.model(law, batch, extend_s=VERIFY_S, slots=4096)
        draft = scripts.model(law, batch, extend_s=0.4 * VERIFY_S / 4, tree_s=0.01, slots=4096)
        options = {"fallback": fallback, "proposal": "none", "k": 4, "branches": 2}
        options |= {"max_batch": batch, "max_tokens": 10**6}
        with virtual.engine(clock, target, draft, **options) as engine:
            return virtual.speed(clock, engine, batch, 200, temperature=0.0)

    measure(4, "partial_accept")
    p, p_fast = (1 - missed[kind] / missed[kind, "of"] for kind in ("chain", "undrafted"))
    crossing = crossover_batch(p, p_fast, 0.4, tokens_hit=5.0, tokens_redraft=5.0)
    below, above = math.floor(crossing), math.ceil(crossing)
    assert 1 < below < above < 6
    # Both lie between the same two batches, so they are less than one apart.
    assert measure(below, "batched_retry") > measure(below, "partial_accept")
    assert measure(above, "batched_retry") < measure(above, "partial_accept")


def test_adaptive_follows_the_crossover(clock: virtual.Clock) -> None:
    """Cheap redrafts are waited for in a batch; dear ones not even alone."""
    _, cheap = _speed(clock, 4, 150, pair=(0.001, 0.01), policy="adaptive")
    assert cheap["policy"]["retry"] == 4
    numbers = cheap["policy"]["numbers"]
    assert numbers["crossover_redraft_4"] is None or numbers["crossover_redraft_4"] > 4
    _, dear = _speed(clock, 1, 150, pair=(0.09, 0.01), policy="adaptive")
    assert dear["policy"]["retry"] == 0
    assert dear["policy"]["numbers"]["crossover_redraft_1"] < 1
    assert dear["policy"]["changes"][-1]["why"].startswith("going on")


SWEEPS = {
    0.0: [(8, 4, "batched_retry"), (8, 4, "partial_accept"), (4, 12, "partial_accept")],
    1.0: [(7, 8, "immediate_retry")],
}
"""The fastest of all k, branches and fallbacks on these models, and a usual one."""


@pytest.mark.parametrize(("temperature", "tokens"), [(0.0, 200), (1.0, 400)])
def test_auto_is_as_fast_as_the_best_of_a_sweep(
    clock: virtual.Clock, temperature: float, tokens: int
) -> None:
    """Branches cost, so that neither the most of them nor the longest chain need be the best."""
    options = {"temperature": temperature}

    def run(**config):
        defaults = {"rule": "block", "max_batch": 1, "max_tokens": 10**6, "proposal": "none"}
        pair = _pair(0.012, 0.008, row_s=0.0006)
        with virtual.engine(clock, *pair, **(defaults | config)) as engine:
            if config.get("policy") == "auto":  # until it has settled
                virtual.speed(clock, engine, 1, 200, **options)
                for request in list(engine.scheduler._running.values()):
                    engine.cancel(request)
            return virtual.speed(clock, engine, 1, tokens, **options), engine.stats()["policy"]

    fixed = {its: run(k=its[0], branches=its[1], fallback=its[2])[0] for its in SWEEPS[temperature]}
    auto, report = run(k=8, branches=32, policy="auto")
    assert report["changes"] and report["changes"][0]["predicted_vs_ar"] > 1
    assert auto >= 0.95 * max(fixed.values()), (report, fixed)


def test_auto_knows_what_going_on_gains_where_proposals_are_kept(clock: virtual.Clock) -> None:
    """The target mostly repeats a token, which the draft knows nothing of: what followed earlier in
    the text is kept, and what the draft would draw while it is waited for is not."""
    law = torch.full((8, 8), 0.02 / 7).fill_diagonal_(0.98).repeat(8, 1)
    flat = torch.full((64, 8), 1 / 8)
    target = scripts.model(law, 1, extend_s=VERIFY_S, slots=4096)
    draft = virtual.RowModel(flat, rows=12, extend_s=0.03, tree_s=0.01, slots=4096)
    options = {"k": 4, "branches": 4, "max_batch": 1, "max_tokens": 10**6, "policy": "auto"}
    with virtual.engine(clock, target, draft, **options) as engine:
        virtual.speed(clock, engine, 1, 300, temperature=1.0)
        report, estimates = engine.stats()["policy"], engine.scheduler.policy.estimates
    assert report["method"] == "ssd" and report["retry"] == 0
    assert report["numbers"]["tokens_going_on"] > 2.5
    # The proposals are kept and the draft's own tokens are not: that is not mixed up.
    assert estimates.acceptance < 0.35


def test_auto_goes_back_where_drafting_loses(clock: virtual.Clock) -> None:
    """A tree step longer than a verification: SD. A draft as slow as the target: nothing. Both are
    said, and tried again after a while."""
    for step_s, tree_s, method in ((0.01, 0.2, "sd"), (0.1, 0.12, "ar")):
        speed, stats = _speed(clock, 1, 350, pair=(step_s, tree_s), policy="auto")
        changes = stats["policy"]["changes"]
        assert changes[0]["method"] == method
        assert "predicted to lose" in changes[0]["why"]
        assert changes[0]["predicted_vs_ar"] > changes[0]["predicted_before_vs_ar"]
        assert [change["why"] for change in changes[1:2]] == ["drafting ahead is tried again"]
        assert changes[2]["method"] == method
    assert speed > 0.8 / VERIFY_S  # plain decoding, but for the attempts


def _played(
    batch: int, row_s: float, acceptance: float, pause_s: float = 0.0, rounds: int = 260
) -> tuple[Policy, list]:
    """What "auto" does on a clock alone. Verifications are as wide as a chain may be, as on a GPU,
    and take `row_s` more for each row; drafting is cheap; what is kept and found is drawn. Between
    two rounds `pause_s` go by.
    """
    policy, dice, now = Policy(EngineConfig(policy="auto", k=4, branches=8)), Random(batch), 0.0
    decisions, before = [], [(0, 0, False)] * batch
    for _ in range(rounds):
        its = policy.decide(batch)
        decisions.append(its)
        works = [("verify", VERIFY_S + row_s * batch * (its.draft_len + 1), its.draft_len + 1)]
        if its.branches:
            ahead = [("tree_step", 0.004, its.branches), ("sample", 0.001, its.branches)]
            works += [("feed_last", 0.004, 1), ("predict", 0.001, 1), *ahead * its.draft_len]
        for row in range(batch):
            source = "asked"
            if before[row][1]:
                source = "hit" if dice.random() < 0.85 else "miss"
            drafted = its.draft_len if source == "hit" or its.retry else 0
            kept = next((n for n in range(drafted) if dice.random() > acceptance), drafted)
            policy.observe_row(source, drafted, kept, before[row])
            before[row] = its.draft_len, its.branches, drafted > 0
        if its.retry:
            works.append(("draft_step", 0.004, 1))
        spans = [Span("lane", name, now, now + s, batch * n) for name, s, n in works]
        now = spans[0].end + pause_s
        policy.observe(spans)
    return policy, decisions


@pytest.mark.parametrize("batch", [4, 8])
def test_auto_finds_plain_decoding_where_each_row_costs(batch: int) -> None:
    """A third of the drafts is kept, and one a row takes 45 % more time: plain decoding is 9 %
    faster than the shortest chain, and more than that than any other."""
    row_s = 0.45 / (1 - 0.45) * VERIFY_S / batch
    policy, decisions = _played(batch, row_s, 0.33)
    one, two = (VERIFY_S + row_s * batch * n for n in (1, 2))
    assert 1.05 < (1 / one) / (1.33 / two) < 1.12
    known = policy.estimates.deployment(batch)
    assert known is not None and known.verify_seconds == pytest.approx(one, rel=0.02)
    assert Counter(decision.draft_len for decision in decisions[:16])[0] == 3
    changes = policy.report()["changes"]
    assert "ar" in [change["method"] for change in changes]
    assert "predicted to lose against plain" in next(
        change["why"] for change in changes if change["method"] == "ar"
    )
    assert [decision.draft_len for decision in decisions].count(0) > 100
    # The same measurements, the same decisions.
    assert _played(batch, row_s, 0.33)[1] == decisions


@pytest.mark.parametrize("batch", [4, 8])
def test_auto_keeps_drafting_where_rows_cost_little(batch: int) -> None:
    policy, decisions = _played(batch, 0.05 * VERIFY_S / batch, 0.8)
    assert policy.report()["method"] == "ssd" and policy.report()["k"] >= 3
    assert [decision.draft_len for decision in decisions].count(0) == 3
    assert all(decision.draft_len for decision in decisions[16:])


def test_auto_knows_what_a_round_costs_beside_the_models() -> None:
    """Where plain decoding is 9 % faster by the models alone, a pause of .8 verifications after
    each round makes it 7 % slower."""
    row_s, pause_s = 0.45 / (1 - 0.45) * VERIFY_S / 4, 0.15
    policy, decisions = _played(4, row_s, 0.33, pause_s)
    known = policy.estimates.deployment(4)
    assert known is not None and known.round_seconds == pytest.approx(pause_s, rel=0.1)
    assert policy.report()["numbers"]["t_round_ms"] == pytest.approx(1e3 * pause_s, rel=0.1)
    assert policy.report()["method"] == "ssd"
    assert [decision.draft_len for decision in decisions].count(0) == 3


def test_what_a_proposal_is_worth_is_hoped_for_until_it_is_known() -> None:
    """A redraft that is about as good as going on would keep it from ever being seen."""

    def worth(proposal: str, kept: list[int]) -> float:
        estimates = Policy(EngineConfig(policy="auto", proposal=proposal)).estimates
        for name in ("verify", "draft_step", "tree_step", "sample"):
            estimates.observe_spans([Span("lane", name, 0.0, VERIFY_S, 1)])
        for accepted in kept:
            estimates.observe_row("miss", 4, accepted, (4, 8, True), went_on=True)
        known = estimates.deployment(1)
        assert known is not None
        return known.tokens_fast

    assert worth("ngram", []) > 1.2 and worth("none", []) == 1.0
    assert worth("ngram", [0] * 100) == pytest.approx(1.0, abs=0.05)
    assert worth("ngram", [2, 0] * 50) == pytest.approx(2.0, abs=0.1)


def test_plain_decoding_is_not_tried_where_it_is_known_or_not_wanted() -> None:
    seen = Span("target", "verify", 0.0, VERIFY_S, 2)
    for config, known in ((EngineConfig(policy="auto"), True),
                          (EngineConfig(policy="auto", reproducible=True), False),
                          (EngineConfig(policy="adaptive"), False)):  # fmt: skip
        policy = Policy(config)
        if known:
            policy.estimates.observe_spans([seen] * 3)
        assert all(policy.decide(2).draft_len for _ in range(16))


def test_auto_changes_no_greedy_text_and_is_a_function_of_its_measurements(
    clock: virtual.Clock,
) -> None:
    greedy = SamplingParams(max_new_tokens=300)
    with scripts.engine(scripts.model(P), None, method="ar") as engine:
        wanted = engine.generate([[1, 2], [3]], greedy)
    reports = []
    for _ in range(2):
        clock.now = 0.0
        with virtual.engine(
            clock, *_pair(0.012, 0.008, row_s=0.002), policy="auto", k=6, branches=32, max_batch=2
        ) as engine:
            outputs = engine.generate([[1, 2], [3]], greedy)
            reports.append(engine.stats()["policy"])
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert reports[0] == reports[1]
    assert len(reports[0]["changes"]) >= 1
    json.dumps(reports[0], allow_nan=False)


def test_reproducible_keeps_k_and_the_text_under_auto(clock: virtual.Clock) -> None:
    texts = []
    for options in ({"policy": "fixed"}, {"policy": "auto"}, {"method": "sd"}):
        with virtual.engine(
            clock, *_pair(0.012, 0.05, row_s=0.01), reproducible=True, k=3, branches=24,
            max_batch=2, **options,
        ) as engine:  # fmt: skip
            outputs = engine.generate([[1, 2], [3]], [scripts.sampled(s, 100) for s in (1, 2)])
            report = engine.stats()["policy"]
        texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1] == texts[2]
    assert report["k"] == 3


def test_bands_and_configured_fallbacks() -> None:
    bands = EngineConfig(policy="batch_size")
    found = [choose_fallback(bands, batch).value for batch in (1, 8, 16, 33)]
    assert found == ["immediate_retry", "batched_retry", "batched_retry", "partial_accept"]
    assert [retry_length(EngineConfig(k=6), batch) for batch in (1, 2)] == [2, 0]
    policy = Policy(EngineConfig(policy="auto", fallback="independent"))
    decision = policy.decide(4)
    assert decision.sit_out and decision.retry == 4
    assert Policy(EngineConfig(reproducible=True)).decide(9).retry == 4


def test_downweight_is_chosen_where_the_ranking_is_blind() -> None:
    config = EngineConfig(policy="auto", ranking="probability")
    assert Policy(config).decide(1, [1.0]).downweight < 1
    assert Policy(config).decide(2, [1.0, 0.0]).downweight == 1
    assert Policy(EngineConfig(policy="auto")).decide(1, [1.0]).downweight == 1
    with pytest.raises(ConfigError, match="downweight"):
        EngineConfig(downweight=0.5, rule="coupled")


def _tried(
    hit_rates: dict[str, float],
    tokens: dict[float, float],
    temperatures: tuple[float, ...] = (1.0,) * 4,
    rounds: int = 3000,
    **options: object,
) -> tuple[Policy, list]:
    """What "auto" does where hit rates are given by ranking and tokens per round by C.

    A hit is of what the round before prepared, and C of the round before that drafted the chain
    that it was prepared for. Every 300 rounds the text becomes much harder or easier. k and
    branches stay, as nothing is said of the draft's times.
    """
    policy, dice, now = (
        Policy(EngineConfig(policy="auto", k=4, branches=8, **options)),
        Random(3),
        0.0,
    )
    usual, batch = "noise" if max(temperatures) >= 0.5 else "probability", len(temperatures)
    decisions: list = []
    for number in range(rounds):
        its = policy.decide(batch, temperatures)
        decisions.append(its)
        before, older = decisions[-2:][0], decisions[-3:][0]
        easy, ranking = number // 300 % 2, before.ranking.replace("auto", usual)
        for _ in temperatures:
            hit = dice.random() < hit_rates[ranking] + 0.15 * easy
            source = ("hit" if hit else "miss") if before.branches else "asked"
            accepted = int(tokens[older.downweight] - 1 + easy + dice.random())
            policy.observe_row(source, 4, accepted, (4, 8, True))
        now += VERIFY_S
        policy.observe([Span("target", "verify", now - VERIFY_S, now, batch * (its.draft_len + 1))])
    return policy, decisions


EITHER = {1.0: 2.5}


@pytest.mark.parametrize(
    ("temperature", "noise", "probability", "used", "changes"),
    [
        (1.0, 0.49, 0.41, "noise", 0),
        (0.6, 0.45, 0.55, "probability", 1),
        (0.6, 0.50, 0.50, "noise", 0),
        (0.3, 0.50, 0.50, "probability", 0),
        (0.3, 0.70, 0.60, "noise", 1),
    ],
)
def test_auto_uses_the_ranking_that_is_seen_to_find_more(
    temperature: float, noise: float, probability: float, used: str, changes: int
) -> None:
    """The rule by temperature, until the other ranking is seen to be better."""
    rates = {"noise": noise, "probability": probability}
    policy, decisions = _tried(rates, EITHER, (temperature,) * 4)
    report = policy.report()
    assert report["ranking"] == used
    assert len(report["changes"]) == changes
    for its in report["changes"]:
        assert its["ranking"] == used and its["why"].startswith(f"ranking by {used}")
        other = next(ranking for ranking in rates if ranking != used)
        assert its[f"hit_rate_{used}"] > its[f"hit_rate_{other}"]
    measured = [report["numbers"][f"hit_rate_{its}"] for its in ("noise", "probability")]
    assert measured[0] - measured[1] == pytest.approx(noise - probability, abs=0.05)
    # Both are tried in the first rounds, and later one of them in few.
    assert [decision.ranking for decision in decisions[:16]].count("auto") in range(6, 14)
    late = [decision.ranking for decision in decisions[1500:]]
    assert min(late.count("auto"), len(late) - late.count("auto")) <= 0.04 * len(late)
    # The same measurements, the same decisions.
    assert _tried(rates, EITHER, (temperature,) * 4)[1] == decisions
    # A batch with a greedy request tries nothing and uses what was settled on; T = 0 needs neither.
    settled = "auto" if not changes else used
    assert {policy.decide(2, [temperature, 0.0]).ranking for _ in range(300)} == {settled}
    assert policy.decide(2, [0.0, 0.0]).ranking == "auto"


@pytest.mark.parametrize(
    ("temperature", "on", "used", "changes"),
    [(1.0, 2.9, 0.5, 0), (1.0, 2.2, 1.0, 1), (0.6, 2.9, 0.5, 1), (0.6, 2.2, 1.0, 0)],
)
def test_auto_uses_c_where_it_is_seen_to_be_faster(
    temperature: float, on: float, used: float, changes: int
) -> None:
    """Tokens per round with C and without, 2.5; verifications take the same time."""
    rates = {"probability": 0.6}
    tokens = {1.0: 2.5, 0.5: on}
    policy, decisions = _tried(rates, tokens, (temperature,) * 4, ranking="probability")
    report = policy.report()
    assert report["downweight"] == used and report["ranking"] == "probability"
    assert [its["downweight"] for its in report["changes"]] == [used] * changes
    for factor, mean in tokens.items():
        speed = report["numbers"][f"tokens_per_s_downweight_{factor:g}"]
        assert speed == pytest.approx((mean + 0.5) / VERIFY_S, rel=0.1)
    late = [decision.downweight for decision in decisions[2000:]]
    assert late.count(used) >= 0.86 * len(late)
    # Where nothing is measured of it, it stays as it was.
    assert len({decision.downweight for decision in decisions[:16] if decision.branches}) == 1


def test_what_is_equal_does_not_flap() -> None:
    for rates, tokens, options in (
        ({"noise": 0.5, "probability": 0.5}, EITHER, {}),
        ({"probability": 0.5}, {1.0: 2.5, 0.5: 2.5}, {"ranking": "probability"}),
    ):
        policy, _ = _tried(rates, tokens, rounds=12000, **options)
        assert len(policy.report()["changes"]) <= 1


@pytest.mark.parametrize(
    ("temperatures", "options"),
    [
        ((0.0, 0.0), {}),
        ((0.0, 1.0), {}),
        ((1.0, 1.0), {"reproducible": True}),
        ((1.0, 1.0), {"rule": "coupled"}),
        ((1.0, 1.0), {"fallback": "independent"}),
        ((1.0, 1.0), {"ranking": "noise"}),
        ((1.0, 1.0), {"ranking": "probability", "reproducible": True}),
    ],
)
def test_ranking_and_c_stay_where_they_are_given_or_change_nothing(
    temperatures: tuple[float, ...], options: dict
) -> None:
    rates = {"noise": 0.3, "probability": 0.7}
    policy, decisions = _tried(rates, EITHER, temperatures, rounds=200, **options)
    ranking = options.get("ranking", "auto")
    assert {(decision.ranking, decision.downweight) for decision in decisions} == {(ranking, 1.0)}
    assert not policy.report()["changes"]


def test_the_law_stays_while_ranking_and_c_are_tried() -> None:
    case = oracles.load_golden()["markov2-V4-K2"]
    p, q = (scripts.law_of_two(case[law], case["V"]) for law in "pq")
    for ranking in ("auto", "probability"):
        options = {"policy": "auto", "ranking": ranking, "reproducible": False, "rule": "block"}
        options |= {"k": case["K"], "branches": 2, "max_batch": 32, "max_tokens": 32 * 128}
        target, draft = scripts.model(p, 32), scripts.model(q, 32)
        with scripts.engine(target, draft, **options) as engine:
            used, decide = Counter(), engine.scheduler.policy.decide

            def counted(*args, used=used, decide=decide):
                used[(its := decide(*args)).ranking, its.downweight] += 1
                return its

            engine.scheduler.policy.decide = counted
            tokens = scripts.texts(engine, case["start"], 1000, case["L"])
            report = engine.stats()["policy"]
        assert report["method"] == "ssd" and len(used) == 2 and min(used.values()) >= 8, used
        assert oracles.follows(scripts.joint(tokens, case["V"]), np.array(case["target_joint"]))


def test_memory_limit_takes_branches_and_says_so() -> None:
    with scripts.engine(
        scripts.model(P), scripts.model(Q), branches=40, k=4, max_batch=2, memory_limit=6000
    ) as engine:
        engine.generate([1, 2], SamplingParams(max_new_tokens=20))
        stats = engine.stats()
    memory = stats["memory"]
    assert memory["branches_asked"] == 40 and 1 <= memory["branches"] < 40
    assert memory["bytes"] <= 6000 and engine.config.branches == memory["branches"]
    assert engine.lane.speculator.branches.store.logits.nbytes <= 6000
    with pytest.raises(ConfigError, match="memory_limit"):
        scripts.engine(scripts.model(P), scripts.model(Q), memory_limit=100)
    with pytest.raises(ConfigError, match="memory_limit"):
        EngineConfig(memory_limit=0)
