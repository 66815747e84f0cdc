"""Files that the commands write: refused at the start, or written whole."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError

import pytest

from bench import __main__ as command
from bench import files, measure
from bench.systems import SYSTEM

WRITERS = [(name, "--json") for name in ("row_stats", "all", "traffic", *SYSTEM)]
WRITERS += [("row_stats", "--csv"), ("row_stats", "--plot")]


@pytest.mark.parametrize(("name", "option"), WRITERS)
def test_a_file_that_cannot_be_written_is_refused(
    name: str, option: str, tmp_path, capsys, monkeypatch
) -> None:
    """Before the gate, too; a command that writes none has no such option."""
    monkeypatch.setattr(measure, "gates", lambda nodes: pytest.fail("ran"))
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "x", "cannot be written: "),
        (tmp_path / ("x" * 300), "cannot be written: "),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main([name, option, str(path)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"argument {option}: {path}" in said and why in said or "unrecognized" in said


def test_what_may_be_written_is_left_alone(tmp_path) -> None:
    new = tmp_path / "folder" / "new.json"
    assert files.output(str(new)) == new and not list(new.parent.iterdir())
    new.write_text("before")
    assert files.output(str(new)) == new and new.read_text() == "before"
    assert files.output(os.devnull).exists()
    with pytest.raises(ArgumentTypeError, match="no such file"):
        files.existing(str(tmp_path / "none"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "out.json"
    files.write_json(path, {"a": 1})
    before = path.read_text()
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), files.whole(path) as part:
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_a_device_is_no_file(tmp_path) -> None:
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(path)
    files.write_json(link, [])
    assert link.is_symlink() and path.read_text() == "[]\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_json(files.output(str(pipe)), [])
    assert os.read(reader, 9) == b"[]\n" and pipe.is_fifo()
    os.close(reader)
