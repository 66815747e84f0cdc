"""Scripted runs: the pairs are what they are made to be, and the engine does what is predicted."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import scripted, scripted_race
from bench.scripted_pairs import PRIME, START, greedy_laws, path, places_for, play, sampled_laws
from saguaro_runtime.metrics import Span
from saguaro_runtime.planner import expected_tokens, published

NONE = scripted_race.Delays(0.0, 0.0, 0.0)


def test_the_path_visits_every_context_once() -> None:
    tokens = [*START, *path(PRIME**2 - 3)]
    contexts = list(zip(tokens, tokens[1:], strict=False))
    assert len(set(contexts)) == len(contexts) == PRIME**2 - 2


def test_rounds_played_by_hand() -> None:
    places = ["agree", "agree", "far", "near", "agree", "agree", "agree", "agree", "agree"]
    found = play(places, 2)
    # Two kept and a far extra; a near one; two kept and an agreeing extra.
    assert (found.rounds, found.tokens_per_round, found.hit_rate) == (3, 7 / 3, 2 / 3)


@pytest.mark.parametrize("pair", published.PAIRS, ids=lambda its: its.name.split("-")[0])
def test_places_play_what_they_are_made_for(pair: published.Published) -> None:
    tokens = scripted._tokens(pair)
    places, acceptance = places_for(tokens, published.HIT_RATE, pair.k, 400)
    found = play(places, pair.k)
    assert expected_tokens(acceptance, pair.k) == pytest.approx(tokens)
    assert found.tokens_per_round == pytest.approx(tokens, rel=0.02)
    assert found.hit_rate == pytest.approx(published.HIT_RATE, abs=0.015)


def test_the_engine_plays_the_places() -> None:
    """Round by round: what is kept and what hits is what the places say."""
    places, _ = places_for(3.5, 0.9, 4, 120)
    ran = scripted_race.run(
        greedy_laws(places), NONE, 25, lane="inline", method="ssd", k=4, branches=10,
        allocation="uniform", ranking="probability", rule="token", reproducible=True,
    )  # fmt: skip
    rounds = ran.rounds[0]
    for its, following in zip(rounds, rounds[1:], strict=False):
        at, kept = its.base - len(START), 0
        while kept < its.drafted and places[at + kept] == "agree":
            kept += 1
        assert its.drafted == 4 and its.committed == kept + 1
        assert (following.source == "hit") == (places[at + kept] != "far")


def test_sampled_laws_are_laws_that_differ() -> None:
    target, draft = sampled_laws(16)
    for law in (target, draft):
        assert torch.allclose(law.sum(-1), torch.ones(256, dtype=torch.float64))
    accepted = float(torch.minimum(target, draft).sum(-1).mean())
    assert 0.6 < accepted < 0.95


def test_the_papers_proportions_are_timed_and_predicted() -> None:
    """A dozen rounds: the two processes overlap as Theorem 7 says."""
    (ssd_sd, ssd_ar), spans = scripted.paper(published.PAIRS[0], 0.1, 12)
    assert ssd_sd.expected == pytest.approx(255.8 / 161.8)
    assert ssd_ar.expected == pytest.approx(255.8 / 54.7)
    assert ssd_sd.measured == pytest.approx(ssd_sd.predicted, rel=0.15)
    assert ssd_sd.measured > 1.25
    assert {"verify", "look_ahead"} <= {span.name for span in spans}


def _row(**changes: object) -> scripted.Row:
    row = scripted.Row("ranking", "noise", 1.2, 1.21, None, (0.5, 0.7), 3.0, True)
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize("ok", [True, False])
def test_the_command_writes_what_it_found_and_fails_where_it_must(
    ok: bool, tmp_path, capsys, monkeypatch
) -> None:
    spans = [Span("target", "verify", 5.0, 5.06), Span("draft", "look_ahead", 5.0, 5.05)]
    monkeypatch.setattr(scripted, "measure", lambda *_, **__: ([_row(ok=ok)], spans))
    out = tmp_path / "scripted.json"
    assert command.main(["scripted", "--no-gate", "--json", str(out)]) == int(not ok)
    printed = capsys.readouterr().out
    assert "0.50, 0.70" in printed and ("yes" in printed) == ok
    assert "held to the prediction only" in printed
    (made_of,) = [
        line for line in printed.splitlines() if line.startswith("Llama") and "0.90" in line
    ]
    assert made_of.split()[-7:-2] == ["18.28", "3.02", "6", "3", "5.89"]
    found = json.loads(out.read_text())
    assert found["timeline"][0] == ["target", "verify", 0.0, 0.06]
    assert any("authors" in its[2] or "arXiv" in its[2] for its in found["inputs"])
    assert {"commit", "date", "torch"} <= set(found["machine"])


def test_hit_rates_by_what_came_before() -> None:
    def round_(drafted: int, source: str) -> SimpleNamespace:
        return SimpleNamespace(drafted=drafted, source=source)

    rounds = [round_(5, "hit"), round_(0, "miss"), round_(5, "hit"), round_(5, "hit")]
    ran = scripted_race.Ran(0.0, {}, [rounds, rounds[:1]], [])
    assert scripted._hit_rates(ran) == (0.5, 1.0)


def test_gains_are_predicted_from_the_runs_own_times(monkeypatch) -> None:
    times = {"t_verify_ms": 100.0, "t_look_ahead_ms": 90.0, "t_redraft_step_ms": 15.0}

    def ran(name: str) -> scripted_race.Ran:
        hits = {"probability": 0.5, "partial_accept": 0.9}.get(name, 0.8)
        stats = times | {"hit_rate": hits, "tokens_per_round": 3.0}
        stats["tokens_per_round_after"] = {"hit": 3.2}
        went_on = [SimpleNamespace(drafted=5, source="hit")] * 10
        went_on.append(SimpleNamespace(drafted=0, source="miss"))
        went_on.append(SimpleNamespace(drafted=5, source="hit"))
        rates = {"probability": 10.0, "noise": 11.957, "batched_retry": 21.0}
        return scripted_race.Ran(rates.get(name, 30.0), stats, [went_on], [])

    def race(*arguments: Any, **_: object) -> dict[str, scripted_race.Ran]:
        return {name: ran(name) for name in arguments[3]}

    monkeypatch.setattr(scripted, "race", race)
    monkeypatch.setattr(scripted, "calibrated", lambda *_, **__: NONE)
    row = scripted.ranking(0.1, 10, 1.0)
    # 3 tokens in 1 + (1 - p) * .75 verifications.
    assert row.predicted == pytest.approx((1 + 0.5 * 0.75) / (1 + 0.2 * 0.75))
    assert row.ok and row.hit_rates == (0.5, 0.8)
    row = scripted.waiting(0.1, 10)
    p = 9 / 10
    going_on = (3.2 + (1 - p)) / (1 - p + 1)
    waiting = 3.0 / (1 + (1 - 0.8**8) * 0.75)
    assert row.predicted == pytest.approx(going_on / waiting)
    assert row.measured == pytest.approx(30 / 21)


def test_variants_take_turns_and_their_first_rounds_are_not_timed(monkeypatch) -> None:
    order: list[str] = []
    real = scripted_race._Runner.time

    def timed(self: Any, rounds: int) -> None:
        order.append(f"{self.engine.config.ranking} {rounds}")
        real(self, rounds)

    monkeypatch.setattr(scripted_race._Runner, "time", timed)
    variants = {name: {"ranking": name} for name in ("probability", "noise")}
    found = scripted_race.race(
        sampled_laws(8), NONE, 12, variants, lane="inline", method="ssd", k=2, branches=4,
        temperature=1.0, reproducible=True,
    )  # fmt: skip
    assert order == ["probability 10", "noise 10", "probability 2", "noise 2"]
    blind, knowing = found.values()
    assert blind.stats["rounds"] == knowing.stats["rounds"] == 12 + 2
    # The same text in the same rounds; which of them were foreseen differs.
    assert [round.committed for round in blind.rounds[0]] == [
        round.committed for round in knowing.rounds[0]
    ]
