"""The paper's table, and a pair measured as the paper's were."""

from __future__ import annotations

import json

import pytest
import scripts

from bench import __main__ as command
from bench import paper
from saguaro_runtime import Engine
from saguaro_runtime.demo.measure import EngineRun
from saguaro_runtime.planner import published

P = scripts.random_law(6, seed=1)
Q = scripts.random_law(6, seed=2, near=P)


def test_published_and_predicted_are_printed(capsys) -> None:
    assert command.main(["paper"]) == 0
    printed = capsys.readouterr().out
    assert "255.8" in printed and "Qwen3-32B" in printed and "assumed" in printed


def test_a_pair_by_path_needs_both(capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(["paper", "--target", "somewhere"])
    said = capsys.readouterr()
    assert "--draft" in said.err and not said.out
    with pytest.raises(SystemExit):
        command.main(["paper", "--json", "paper.json"])
    assert "--target" in capsys.readouterr().err


def test_a_pair_is_measured_in_the_papers_way(tmp_path, monkeypatch, capsys) -> None:
    pair = published.PAIRS[0]
    configs = paper.configs(pair.k, pair.fan_out)
    assert {config.branches for config in configs.values()} == {21}
    assert {config.max_batch for config in configs.values()} == {1}

    def measured(its: object, options: object) -> object:
        engines = {
            name: EngineRun(Engine(scripts.model(P), scripts.model(Q), scripts_inline(config)))
            for name, config in configs.items()
        }
        return paper.measure(engines, [[1, 2], [3]], 20)

    monkeypatch.setattr(paper, "_measured", measured)
    out = tmp_path / "paper.json"
    line = ["paper", "--target", "a", "--draft", "b", "--json", str(out)]
    assert command.main(line) == 0
    assert "texts of the methods: the same" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["methods"]["SSD"]["tokens"] == 40
    assert found["methods"]["SSD"]["hit_rate"] > 0
    assert {"commit", "date"} <= set(found["machine"])


def test_other_texts_fail() -> None:
    class Liar:
        def decode(self, batch: object, params: object) -> list[list[int]]:
            return [[id(self)]]

        def reset(self) -> None: ...

        def stats(self) -> dict[str, float]:
            return {"tokens_per_s": 1.0, "tokens_per_round": 1.0, "hit_rate": 0.5}

    liars = {name: Liar() for name in ("AR", "SD", "SSD")}
    found, same = paper.measure(liars, [[1]], 4)
    assert not same
    assert "NOT the same" in paper.render(published.PAIRS[1], found, same)


def scripts_inline(config: object) -> object:
    import dataclasses

    return dataclasses.replace(config, lane="inline", impl="reference")
