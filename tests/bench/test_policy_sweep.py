"""The sweep that the policy is held against, on a scripted pair."""

from __future__ import annotations

import scripts

from bench import policy
from saguaro_runtime import EngineConfig, SamplingParams
from saguaro_runtime.demo.measure import Pair

P = scripts.random_law(8, seed=1)
Q = scripts.random_law(8, seed=2, near=P)


def test_every_variant_decodes_the_same_prompts(monkeypatch) -> None:
    monkeypatch.setattr(policy, "SWEEP", [(1, 2), (3, 4)])
    monkeypatch.setattr(
        Pair, "open", lambda self, config: scripts.engine(
            scripts.model(P), scripts.model(Q), **{**vars(config), "impl": "reference"}
        ),
    )  # fmt: skip
    cell = policy.compare(
        Pair(None, None, None), [[1, 2], [3]], EngineConfig(lane="inline"),
        SamplingParams(12, temperature=1.0), size=1, first=1, settle=1, count=2, finalists=2,
    )  # fmt: skip
    assert len(cell["sweep"]) == 1 + 2 + 2 * 2 + 1
    assert len(cell["final"]) == 2 + 1 and "auto" in cell["final"]
    assert cell["best"] in cell["final"] and cell["best"] != "auto"
    assert cell["auto_vs_best"] > 0 and cell["error"] >= 0
    assert cell["policy"]["name"] == "auto" and cell["policy"]["k"] <= 3
    text = policy.render([cell])
    assert "auto / best fixed" in text and "SD, k 3" in text
