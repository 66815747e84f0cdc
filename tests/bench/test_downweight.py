"""Saguaro's C: counts, and the trade that they show."""

from __future__ import annotations

import json

import pytest

from bench import __main__ as command
from bench import downweight


def test_acceptance_is_of_the_drafts_that_were_judged() -> None:
    # Ten rounds of 2: four kept both, three one, three none: 11 kept, 6 refused.
    assert downweight.acceptance({2: 4, 1: 3, 0: 3}, 2) == pytest.approx(11 / 17)
    assert downweight.acceptance({}, 2) == 0.0


def test_hits_are_bought_with_acceptance(tmp_path, capsys) -> None:
    out = tmp_path / "downweight.json"
    assert command.main(["downweight", "--quick", "--rounds", "60", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {(row["ranking"], row["factor"]): row for row in found["rows"]}
    assert set(rows) == {(ranking, C) for ranking in downweight.RANKINGS for C in (1.0, 0.45)}
    assert all(row["rounds"] == 15 * downweight.BATCH for row in rows.values())
    # What is drafted does not depend on how outcomes are ranked, but what is found does.
    plain, knowing = rows["probability", 1.0], rows["noise", 1.0]
    assert plain["acceptance"] == knowing["acceptance"]
    assert knowing["hit_rate"] > plain["hit_rate"] + 0.1
    assert {"commit", "date"} <= set(found["machine"])
    assert "acceptance" in capsys.readouterr().out


def test_a_c_that_buys_nothing_fails(monkeypatch, capsys) -> None:
    def flat(rounds: int, factors: object) -> list[downweight.Row]:
        return [downweight.Row("probability", C, 0.7, 0.5, 3.0, 10) for C in (1.0, 0.45)]

    monkeypatch.setattr(downweight, "measure", flat)
    assert command.main(["downweight", "--quick"]) == 1
