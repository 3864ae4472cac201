"""How a session ends: what counts of several words about it."""

import pytest

from gateway.ending import Ending
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState

LOST = ServingError(ErrorCode.WORKER_LOST, "lost")
LATE = ServingError(ErrorCode.DEADLINE_EXCEEDED, "late")


def test_the_first_error_counts() -> None:
    """What breaks an answer off that is broken off changes nothing."""
    ending = Ending()
    assert not ending.broken_off.is_set()
    ending.break_off(LOST)
    ending.break_off(LATE)
    assert (LOST, True) == (ending.error, ending.broken_off.is_set())


def test_a_complete_answer_is_not_broken_off() -> None:
    """Whatever comes behind its end."""
    ending = Ending()
    ending.is_answered = True
    ending.break_off(LOST)
    assert (None, False) == (ending.error, ending.broken_off.is_set())


def test_the_first_reason_to_cancel_counts() -> None:
    """And is asked for once."""
    ending = Ending()
    asked = [ending.ask_cancel(reason) for reason in (CancelReason.DELETE, CancelReason.DISCONNECT)]
    assert ([True, False], CancelReason.DELETE) == (asked, ending.cancel_reason)
    assert ending.cancel_asked.is_set()


@pytest.mark.parametrize(
    ("is_answered", "cancel_reason", "has_left", "outcome", "expected"),
    [
        (True, None, False, None, RequestState.FINISHED),
        (False, None, False, None, RequestState.FAILED),
        (False, CancelReason.DELETE, False, None, RequestState.CANCELLED),
        (False, CancelReason.DEADLINE, False, None, RequestState.FAILED),
        (False, None, True, None, RequestState.CANCELLED),
        (True, None, True, None, RequestState.FINISHED),
        (False, CancelReason.DELETE, False, RequestState.FAILED, RequestState.FAILED),
        (True, None, False, RequestState.FAILED, RequestState.FINISHED),
        (True, CancelReason.SHUTDOWN, False, RequestState.FINISHED, RequestState.FINISHED),
        (True, CancelReason.SLOW_CLIENT, False, RequestState.CANCELLED, RequestState.CANCELLED),
    ],
)
def test_what_the_log_line_says(
    is_answered: bool,
    cancel_reason: CancelReason | None,
    has_left: bool,
    outcome: RequestState | None,
    expected: RequestState,
) -> None:
    """An answer that its client has is finished; else the scheduler's word counts, and without it what was asked."""
    ending = Ending()
    ending.is_answered = is_answered
    if cancel_reason is not None:
        ending.ask_cancel(cancel_reason)
    if has_left:
        ending.left.set()
    if outcome is not None:
        error = None if outcome is RequestState.FINISHED else LOST
        ending.learn(Outcome(state=outcome, error=error, finish_reason=FinishReason.STOP))
        assert ending.has_outcome.is_set()
    assert expected is ending.state
