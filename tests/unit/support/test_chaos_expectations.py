"""Which ends of a request its faults explain."""

import pytest

from tests.support.chaos_client import End, Seen
from tests.support.chaos_expectations import is_explained, may_be_unknown, may_end_twice, may_lack_its_line
from tests.support.chaos_load import STALL_TIMEOUT_S, Fate, Form, Question
from tests.support.chaos_schedule import Fault, FaultKind
from tests.support.script import counting


def seen(end: End, code: str = "", *, asked_s: float = 10.0, ended_s: float = 12.0, has_begun: bool = False) -> Seen:
    """A request that lived from 10 to 12."""
    return Seen(
        number=0,
        client_request_id="x",
        asked_s=asked_s,
        gateway=0,
        ended_s=ended_s,
        end=end,
        code=code,
        has_begun=has_begun,
    )


def question(*, by_proxy: bool = False, form: Form = Form.STREAM, timeout_s: float | None = None) -> Question:
    """A stream."""
    return Question(
        at_s=10.0,
        number=0,
        script=counting(3),
        form=form,
        by_proxy=by_proxy,
        fate=Fate.READ,
        timeout_s=timeout_s,
    )


def fault(kind: FaultKind, target: str = "", *, at_s: float = 9.0, lasts_s: float = 0.0) -> Fault:
    """Shortly before the request."""
    return Fault(at_s=at_s, kind=kind, target=target, lasts_s=lasts_s)


KILL = FaultKind.KILL


@pytest.mark.parametrize(
    ("expected", "code", "faults"),
    [
        (False, "internal_error", [fault(KILL, "decode-0"), fault(KILL, "scheduler-0")]),
        (False, "request_poisoned", [fault(KILL, "decode-0")]),
        (True, "request_poisoned", [fault(KILL, "decode-0"), fault(KILL, "decode-0")]),
        (False, "request_poisoned", [fault(KILL, "decode-0"), fault(KILL, "decode-0", at_s=12_000.0)]),
        (False, "no_capacity", [fault(KILL, "decode-0"), fault(KILL, "prefill-1")]),
        (True, "no_capacity", [fault(KILL, "prefill-0"), fault(FaultKind.FREEZE, "prefill-1", lasts_s=1.0)]),
        (True, "no_capacity", [fault(KILL, "scheduler-0")]),
        (False, "no_capacity", [fault(KILL, "scheduler-0", at_s=-100.0)]),
        (True, "state_unavailable", [fault(FaultKind.REDIS_FREEZE, lasts_s=2.0)]),
        (True, "state_unavailable", [fault(FaultKind.REDIS_LINK_CUT, "scheduler-1", lasts_s=2.0)]),
        (False, "state_unavailable", [fault(FaultKind.REDIS_LINK_CUT, "decode-0", lasts_s=2.0)]),
        (False, "state_unavailable", [fault(KILL, "decode-0")]),
        (True, "draining", [fault(FaultKind.TERMINATE, "gateway-0", lasts_s=6.0)]),
        (False, "draining", [fault(FaultKind.TERMINATE, "gateway-1", lasts_s=6.0)]),
        (False, "draining", [fault(FaultKind.TERMINATE, "decode-0", lasts_s=6.0)]),
        (False, "request_poisoned", [fault(FaultKind.TERMINATE, "decode-0"), fault(FaultKind.TERMINATE, "decode-1")]),
        (False, "cancelled", [fault(KILL, "decode-0")]),
        (True, "cancelled", [fault(FaultKind.FREEZE, "gateway-0", lasts_s=9.0)]),
    ],
)
def test_codes(expected: bool, code: str, faults: list[Fault]) -> None:
    """Each needs its own faults, at the time."""
    assert expected is is_explained(seen(End.FAILED, code), question(), faults)


def test_redis_ends_no_answer_that_has_begun() -> None:
    """It is needed to admit a request, and for nothing after."""
    begun = seen(End.FAILED, "state_unavailable", has_begun=True)
    assert not is_explained(begun, question(), [fault(FaultKind.REDIS_KILL, lasts_s=2.0)])


def test_one_lost_scheduler_ends_no_answer_that_has_begun() -> None:
    """The next one adopts it; only if that comes to nothing, too, nobody is left."""
    begun = seen(End.FAILED, "no_capacity", has_begun=True)
    killed = fault(KILL, "scheduler-0")
    assert not is_explained(begun, question(), [killed])
    assert is_explained(begun, question(), [killed, killed])


def test_a_killed_gateway_may_not_have_written_its_line() -> None:
    """Killed between the end that its client saw and the outcome."""
    assert may_lack_its_line(seen(End.FINISHED), [fault(KILL, "gateway-0", at_s=13.0)])
    assert not may_lack_its_line(seen(End.FINISHED), [fault(KILL, "gateway-0", at_s=9.0)])
    assert not may_lack_its_line(seen(End.FINISHED), [fault(KILL, "scheduler-0", at_s=13.0)])


def test_an_outcome_may_be_lost_with_redis_and_scheduler() -> None:
    """Not with one of them."""
    redis, scheduler = fault(FaultKind.REDIS_FREEZE, at_s=11.0, lasts_s=2.0), fault(KILL, "scheduler-0", at_s=14.0)
    assert may_end_twice(seen(End.FINISHED), [redis, scheduler])
    assert not may_end_twice(seen(End.FINISHED), [redis])
    assert not may_end_twice(seen(End.FINISHED), [scheduler])


def test_cut_connections() -> None:
    """Of those on the link that was cut, and of all where the gateway has died."""
    cut = seen(End.CUT)
    link_cut = fault(FaultKind.LINK_CUT, "gateway-0", lasts_s=2.0)
    assert not is_explained(cut, question(), [link_cut])
    assert is_explained(cut, question(by_proxy=True), [link_cut])
    assert not is_explained(cut, question(by_proxy=True), [fault(FaultKind.LINK_CUT, "gateway-1", lasts_s=2.0)])
    early = fault(FaultKind.LINK_CUT, "gateway-0", at_s=1.0, lasts_s=2.0)
    assert not is_explained(cut, question(by_proxy=True), [early])
    assert is_explained(cut, question(), [fault(KILL, "gateway-0")])
    assert not is_explained(cut, question(), [fault(KILL, "gateway-1")])
    assert is_explained(cut, question(form=Form.RESUMABLE), [fault(KILL, "gateway-1")])
    assert not is_explained(cut, question(), [fault(KILL, "decode-0")])


def test_a_delete_explains_its_cancel() -> None:
    """And nothing else."""
    deleted = seen(End.FAILED, "cancelled")
    deleted.is_deleted = True
    assert is_explained(deleted, question(), [])
    deleted.code = "internal_error"
    assert not is_explained(deleted, question(), [])


def test_a_deadline_explains_the_end_of_its_time() -> None:
    """And none before."""
    late = seen(End.FAILED, "timeout")
    assert is_explained(late, question(timeout_s=1.9), [])
    assert not is_explained(late, question(timeout_s=3.0), [])
    assert not is_explained(late, question(), [])


def test_a_long_pause_explains_a_slow_client() -> None:
    """A reader that has come back in time is none."""
    slow = seen(End.FAILED, "slow_client")
    assert not is_explained(slow, question(), [])
    slow.paused_s = 0.5 * STALL_TIMEOUT_S
    assert not is_explained(slow, question(), [])
    slow.paused_s = 2 * STALL_TIMEOUT_S
    assert is_explained(slow, question(), [])


def test_a_delete_finds_what_its_scheduler_knew() -> None:
    """Only with the scheduler, or with Redis, it is forgotten how a request has ended."""
    assert may_be_unknown(seen(End.FINISHED), [fault(KILL, "scheduler-1")])
    assert not may_be_unknown(seen(End.FINISHED), [fault(KILL, "gateway-0"), fault(KILL, "decode-0")])
