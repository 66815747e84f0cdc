"""The plots show the numbers of their files, and know which file they were drawn from."""

from __future__ import annotations

import builtins
import json
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench import __main__ as command
from bench import plots, readme

END_TO_END = {
    "rows": [
        {"variant": variant, "temperature": T, "batch": batch, "tokens_per_s": rate * batch**0.5}
        for variant, rate in (("AR", 10.0), ("SSD", 15.0), ("SSD, rule token", 14.0))
        for T in (0.0, 1.0)
        for batch in (4, 1)
    ]
}
HIT_RATES = {
    "settings": {"k": 4, "branches": 20},
    "rates": [
        {"pair": pair, "temperature": T, "ranking": ranking, "allocation": allocation,
         "rounds": 700, "hit_rate": 0.5 + 0.1 * T}
        for pair in ("weak", "strong")
        for T in (1.0, 0.0)
        for ranking in ("probability", "noise")
        for allocation in ("uniform", "best")
    ],
}  # fmt: skip
DOWNWEIGHT = {
    "rows": [
        {
            "ranking": ranking,
            "factor": C,
            "acceptance": 0.5 + C / 4,
            "hit_rate": 0.9 - C / 4,
            "tokens_per_round": 3.0,
            "rounds": 100,
        }
        for ranking in ("probability", "noise")
        for C in (1.0, 0.5)
    ]
}
SCRIPTED = {
    "timeline": [
        ["target", "verify", 0.5, 0.6], ["draft", "look_ahead", 0.5, 0.55],
        ["draft", "draft_step", 0.61, 0.63], ["draft", "tree_step", 0.5, 0.51],
    ]
}  # fmt: skip
FOUND = {
    "end_to_end": END_TO_END, "hit_rates": HIT_RATES, "downweight": DOWNWEIGHT,
    "scripted": SCRIPTED,
}  # fmt: skip


@pytest.fixture
def folders(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Results and pictures of the test's own."""
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "PICTURES", tmp_path / "plots")
    return tmp_path


def _figure(name: str) -> Any:
    figure = Figure()
    plots.PLOTS[name].draw(FOUND[plots.PLOTS[name].data], figure)
    return figure


def test_throughput_against_latency_over_batch() -> None:
    axes = _figure("throughput").axes
    assert [axis.get_title() for axis in axes] == ["T = 0", "T = 1"]
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    assert lines["SSD"].get_xydata().tolist() == [
        pytest.approx([1e3 / 15, 15]), pytest.approx([4e3 / 30, 30]),
    ]  # fmt: skip
    assert "SSD, rule token" not in lines


def test_hit_rate_against_temperature_per_ranking() -> None:
    axes = _figure("hit_rates").axes
    assert [axis.get_title() for axis in axes] == ["weak draft", "strong draft"]
    for axis in axes:
        assert [box.get_label() for box in axis.containers] == ["probability", "noise"]
        for box in axis.containers:
            assert box.lines[0].get_xydata().tolist() == [[0.0, 0.5], [1.0, 0.6]]


def test_acceptance_against_hit_rate_over_c() -> None:
    (axis,) = _figure("downweight").axes
    for box in axis.containers:
        assert box.lines[0].get_xydata().tolist() == [[0.625, 0.775], [0.75, 0.65]]
    assert [box.get_label() for box in axis.containers] == [
        "ranked by probability",
        "ranked by noise",
    ]
    assert {text.get_text() for text in axis.texts} == {"C = 1", "C = 0.5"}


def test_timeline_of_rounds() -> None:
    (axis,) = _figure("timeline").axes
    bars = [
        path.get_extents().bounds
        for collection in axis.collections
        for path in collection.get_paths()
    ]
    assert [(round(x), round(width)) for x, _, width, _ in bars] == [(0, 100), (0, 50), (110, 20)]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["target", "draft"]


def test_pictures_are_drawn_stamped_and_checked(folders, capsys) -> None:
    for name, found in FOUND.items():
        (folders / f"{name}.json").write_text(json.dumps(found))
    assert command.main(["plots", "--check"]) == 1
    assert capsys.readouterr().out.count("missing") == 4
    assert command.main(["plots"]) == 0
    pictures = sorted((folders / "plots").iterdir())
    assert [path.stem for path in pictures] == sorted(plots.PLOTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert command.main(["plots", "--check"]) == 0
    assert plots.markdown().count("![") == 4
    (folders / "scripted.json").write_text(json.dumps(SCRIPTED | {"new": 1}))
    assert command.main(["plots", "--check"]) == 1
    assert "timeline: drawn from other results" in capsys.readouterr().out
    assert command.main(["plots", "timeline"]) == 0
    assert command.main(["plots", "--check"]) == 0


def test_plots_without_data_say_so(folders, capsys) -> None:
    assert command.main(["plots"]) == command.main(["plots", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "throughput: no data yet; python -m bench end_to_end" in printed
    assert printed.count("no data yet") == 8
    assert plots.markdown() == ""
    with pytest.raises(SystemExit):
        command.main(["plots", "nothing"])


def test_matplotlib_is_optional(folders, capsys, monkeypatch) -> None:
    (folders / "downweight.json").write_text(json.dumps(DOWNWEIGHT))
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert command.main(["plots", "downweight"]) == 2
    assert "saguaro-ssd[bench]" in capsys.readouterr().out


def test_the_readme_command_draws_what_is_out_of_date(folders, tmp_path, monkeypatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- bench: plots -->\n<!-- /bench: plots -->\n")
    monkeypatch.setattr(readme, "PAGES", (page,))
    (folders / "downweight.json").write_text(json.dumps(DOWNWEIGHT))
    assert command.main(["readme"]) == 0
    assert "docs/plots/downweight.png" in page.read_text()
    assert command.main(["readme", "--check"]) == 0


def test_committed_pictures_are_of_the_committed_results() -> None:
    for name in plots.PLOTS:
        assert plots.outdated(name) in ("", "missing"), f"{name}: run python -m bench plots"
