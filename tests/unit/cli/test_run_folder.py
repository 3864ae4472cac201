"""Logs of a run: bounded in number and size."""

import os
import stat
from pathlib import Path

import pytest

from cli import run_folder
from cli.run_folder import MAX_RUNS, RunFolder


def test_a_run_has_a_folder_that_others_cannot_read(tmp_path: Path) -> None:
    """Logs hold no text of prompts, but still ids and addresses."""
    folder = RunFolder.create(tmp_path / "home")

    assert str(os.getpid()) == folder.path.name.rpartition("-")[2]
    assert 0o700 == stat.S_IMODE(folder.path.stat().st_mode)


def test_old_runs_are_removed_but_not_one_that_lives(tmp_path: Path) -> None:
    """The oldest go first; one whose process is alive stays, however old."""
    living = tmp_path / "run" / f"20000101T000000-{os.getppid()}"
    living.mkdir(parents=True)
    for number in range(20):
        (tmp_path / "run" / f"20010101T0000{number:02}-99999999").mkdir()

    newest = RunFolder.create(tmp_path)

    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert MAX_RUNS + 1 == len(left)
    assert living.name == left[0]
    assert newest.path.name == left[-1]


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    """Of a log that exists, in order; nothing for a child that never wrote."""
    folder = RunFolder.create(tmp_path)
    folder.log_path("decode-0").write_text("".join(f"line {number}\n" for number in range(10_000)))

    assert ["line 9998", "line 9999"] == folder.tail("decode-0", 2)
    assert [] == folder.tail("prefill-0", 2)


def test_tail_can_leave_out_what_an_earlier_start_wrote(tmp_path: Path) -> None:
    """Else the third try would show the complaints of the first two again."""
    folder = RunFolder.create(tmp_path)
    assert 0 == folder.log_size("decode-0")
    folder.log_path("decode-0").write_text("first start\n")
    begin = folder.log_size("decode-0")
    with folder.log_path("decode-0").open("a") as log:
        log.write("second start\n")

    assert ["second start"] == folder.tail("decode-0", 10, begin=begin)


def test_a_long_log_is_turned_over_under_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on into the same, now empty, file; one older file is kept."""
    monkeypatch.setattr(run_folder, "MAX_LOG_BYTES", 10)
    folder = RunFolder.create(tmp_path)
    with folder.log_path("decode-0").open("ab", buffering=0) as log:
        log.write(b"more than ten bytes\n")
        folder.turn_over_long_logs()
        log.write(b"new\n")

    assert "new\n" == folder.log_path("decode-0").read_text()
    assert "more than ten bytes\n" == (folder.path / "decode-0.log.1").read_text()
