"""Lives as observed from outside, against the table of transitions."""

import json
from pathlib import Path

import pytest

from tests.support.life_traces import Observed, log_lines, traces, violations


def trace(*said: str) -> list[Observed]:
    """`what/attempt` or `Outcome:state`, in order."""
    found: list[Observed] = []
    for number, text in enumerate(said):
        what, _, state = text.partition(":")
        what, _, attempt = what.partition("/")
        found.append(Observed(at=f"{number}", by="x", what=what, attempt=int(attempt or 0), state=state or None))
    return found


PLAIN = ("Queued", "reserved/1", "Placed/1", "prefill_done/1", "kv_committed/1", "sequence_done/1", "Outcome:finished")
LIVES = {
    "plain": PLAIN,
    "overtaken by the commit": ("Queued", "reserved/1", "kv_committed/1", "prefill_done/1", "sequence_done/1"),
    "refused and placed again": ("Queued", "reserve_refused/1", "reserved/2", "prefill_done/2", "kv_committed/2"),
    "refused, and again by the next scheduler": (
        "Queued",
        "reserve_refused/1",
        "reserved/1",
        "Placed/1",
        "kv_committed/1",
    ),
    "refused twice, and from the beginning where its record is lost": (
        "Queued",
        "reserve_refused/1",
        "reserve_refused/2",
        "reserved/1",
        "Placed/1",
        "kv_committed/1",
    ),
    "preempted": ("reserved/1", "kv_committed/1", "preempted/1", "Requeued/1", "reserved/2", "Placed/2", "Queued"),
    "lost, then late words of the old attempt": ("reserved/1", "reserved/2", "kv_committed/1", "kv_committed/2"),
    "cancelled and done at the same time": ("reserved/1", "kv_committed/1", "Outcome:cancelled", "sequence_done/1"),
    "told late": ("reserved/1", "prefill_done/1", "attempt_failed/1", "Queued", "Placed/1", "Requeued/1"),
    "failed in the queue": ("Queued", "Outcome:failed"),
}
IMPOSSIBLE = {
    "committed without a reservation": ("Queued", "kv_committed/1"),
    "committed in the wrong attempt": ("reserved/1", "kv_committed/2"),
    "a prompt without a place for it": ("Queued", "prefill_done/1"),
    "done before anything": ("sequence_done/1",),
    "placed without a reservation": ("Queued", "Placed/1"),
    "finished out of the blue": ("Queued", "Outcome:finished"),
    "two outcomes": (*PLAIN, "Outcome:cancelled"),
    "an outcome and then another attempt": (*PLAIN, "Placed/1"),
    "back to an older attempt": ("reserved/1", "Placed/1", "reserved/2", "Placed/2", "Placed/1"),
}


@pytest.mark.parametrize("said", LIVES.values(), ids=list(LIVES))
def test_lives_that_the_table_allows(said: tuple[str, ...]) -> None:
    """With what nobody outside the scheduler sees between the lines."""
    assert [] == violations(trace(*said))


@pytest.mark.parametrize("said", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
def test_lives_that_it_does_not(said: tuple[str, ...]) -> None:
    """Exactly the last word is wrong."""
    (problem,) = violations(trace(*said))
    assert problem.startswith(f"{len(said) - 1} x {said[-1].partition('/')[0].partition(':')[0]}")


def test_logs_become_traces(tmp_path: Path) -> None:
    """By time over all processes; torn lines, other lines and answers to releases are left out."""

    def line(at: str, event: str, **fields: object) -> str:
        return json.dumps({"timestamp": at, "event": event, "role": "decode", "request_id": "r", **fields})

    worker = [line("3", "reported", process="decode-0", what="kv_committed", attempt=1), '{"timestamp": "9", "ev']
    worker.insert(0, line("1", "reported", process="decode-0", what="reserved", attempt=1))
    gateway = [
        line("4", "told", what="Outcome", attempt=None, state="finished"),
        line("2", "told", what="Placed", attempt=1, state=None),
        line("2", "something else"),
        line("5", "reported", what="released", attempt=1),
    ]
    (tmp_path / "decode-0.log").write_text("\n".join(worker))
    (tmp_path / "gateway-0.log").write_text("\n".join(gateway))
    found = traces(log_lines(tmp_path))
    assert ["r"] == list(found)
    assert ["reserved", "Placed", "kv_committed", "Outcome"] == [observed.what for observed in found["r"]]
    assert ("decode", "finished") == (found["r"][-1].by, found["r"][-1].state)


def test_what_an_older_reader_is_told_is_no_outcome_of_the_request() -> None:
    """It is superseded; the newer one goes on."""
    line = {"timestamp": "1", "role": "gateway", "event": "told", "request_id": "r", "attempt": None}
    told = [
        {**line, "what": "Outcome", "state": "failed", "code": "SUPERSEDED"},
        {**line, "what": "Outcome", "state": "failed", "code": "WORKER_LOST"},
    ]
    assert ["Outcome"] == [observed.what for observed in traces(told)["r"]]
    assert {} == traces(told[:1])
