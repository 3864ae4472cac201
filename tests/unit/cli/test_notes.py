"""Notes go to stderr, results to stdout."""

import pytest

from cli.notes import Notes


def test_results_and_notes_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that reads `ready …` from stdout gets nothing else."""
    notes = Notes()

    notes.say("logs: /somewhere/[bold]")
    notes.wait_for("Redis")
    notes.wait_for("Redis")
    notes.wait_for("a decode worker")
    notes.waited()
    notes.tell("ready http://127.0.0.1:8000", "curl …")

    captured = capsys.readouterr()
    assert "ready http://127.0.0.1:8000\ncurl …\n" == captured.out
    assert "logs: /somewhere/[bold]\nwaiting: Redis\nwaiting: a decode worker\n" == captured.err


def test_the_present_wait_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a timeout can say what it waited for."""
    notes = Notes()
    notes.wait_for("a prefill worker")

    assert "a prefill worker" == notes.waiting_for

    notes.waited()
    assert "" == notes.waiting_for
    assert "waiting: a prefill worker\n" == capsys.readouterr().err
