"""The README's tables are those of the committed results."""

from __future__ import annotations

import dataclasses

from bench import __main__ as command
from bench import readme, report

OURS = report.Result(
    "verify.token", "ours", "B1-K7-V128256-T0.7-token", "bfloat16", 2308608, 2, 2330000, 100, 0
)


def test_the_readme_is_current() -> None:
    assert command.main(["readme", "--check"]) == 0


def test_the_committed_traffic_is_the_least_of_all() -> None:
    _, rows = report.peer_rows(report.read_json(readme.RESULTS / "traffic.json"))
    for rule in ("token", "block", "greedy"):
        ours = [row for row in rows if row[0] == rule and row[1].startswith("saguaro")]
        peers = [row for row in rows if row[0] == rule and not row[1].startswith("saguaro")]
        assert ours and peers
        launches, syncs, ratio = 3, 4, 7
        assert all(row[syncs] == 0 for row in ours)
        assert max(row[launches] for row in ours) < min(row[launches] for row in peers)
        # Greedy needs K rows, whoever does it; 3 % are lengths, ids and partial results.
        assert max(row[ratio] for row in ours) <= 1.03 * min(row[ratio] for row in peers)


def test_a_marked_table_is_made_anew(tmp_path, monkeypatch) -> None:
    path = tmp_path / "traffic.json"
    report.write_json(path, [OURS, dataclasses.replace(OURS, provider="torch")])
    monkeypatch.setitem(readme.SECTIONS, "traffic", lambda: readme.traffic(path))
    text = "before\n<!-- bench: traffic -->\nold\n<!-- /bench: traffic -->\nafter\n"
    made = readme.regenerate(text)
    assert "old" not in made
    assert made.startswith("before\n<!-- bench: traffic -->\n")
    assert made.endswith("<!-- /bench: traffic -->\nafter\n")
    assert "| **token** | **saguaro, T = 0.7** |" in made
    assert made.count("| published |") == len(report.peers()["verify"])
    assert readme.regenerate(made) == made


def test_a_stale_table_is_noticed(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "traffic.json"
    report.write_json(path, [OURS])
    page = tmp_path / "README.md"
    page.write_text("<!-- bench: traffic -->\n<!-- /bench: traffic -->\n")
    monkeypatch.setitem(readme.SECTIONS, "traffic", lambda: readme.traffic(path))
    monkeypatch.setattr(readme, "README", page)
    assert command.main(["readme", "--check"]) == 1
    assert "python -m bench readme" in capsys.readouterr().out
    assert command.main(["readme"]) == 0
    assert command.main(["readme", "--check"]) == 0
