"""What of an attempt's work is in vain, by the end of its request."""

from dataclasses import replace

import pytest

from scheduler.waste import Waste, WasteCause, WasteStage, wasted
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId
from shared.domain.lifecycle import RequestRecord
from shared.domain.request import FinishReason, Outcome, RequestSpec, RequestState, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import NO_WORK, Work

RECORD = RequestRecord(
    spec=RequestSpec(
        request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=9, sampling=SamplingParams(seed=1)
    ),
    state=RequestState.FINISHED,
    attempt=Attempt(2),
    gateway_incarnation=Incarnation(1),
    admitted_at=0.0,
    admitted_unix_ms=0,
    entered_at=0.0,
    outcome=Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.STOP),
)
WORK = Work(computed_tokens=20, replayed_tokens=5, undelivered_tokens=3)
REPLAYED = (WasteCause.REQUEUED, WasteStage.REPLAY, 5)


def told(record: RequestRecord | None, attempt: int, role: Role, work: Work = WORK) -> tuple[tuple[str, str, int], ...]:
    """As plain tuples."""
    return tuple((each.cause, each.stage, each.num_tokens) for each in wasted(record, Attempt(attempt), role, work))


def ended(code: ErrorCode) -> RequestRecord:
    """The record of a request that ended with this error."""
    outcome = Outcome(state=RequestState.FAILED, error=ServingError(code, "as told"))
    return replace(RECORD, state=RequestState.ABORTING, outcome=outcome)


def test_the_last_attempt_of_a_finished_answer() -> None:
    """Its prompt is used; of its tokens those behind the end are not, and what was fed again is not."""
    assert () == told(RECORD, 2, Role.PREFILL, Work(computed_tokens=20))
    assert ((WasteCause.OVERRUN, WasteStage.DECODE, 3), REPLAYED) == told(RECORD, 2, Role.DECODE)
    assert () == told(RECORD, 2, Role.DECODE, Work(computed_tokens=20))


def test_a_closed_attempt() -> None:
    """The KV of its prompt is lost, its tokens are not but for those that nobody was sent."""
    prompt = (WasteCause.REQUEUED, WasteStage.PREFILL, 20)
    assert (prompt,) == told(RECORD, 1, Role.PREFILL, Work(computed_tokens=20))
    assert ((WasteCause.REQUEUED, WasteStage.DECODE, 3), REPLAYED) == told(RECORD, 1, Role.DECODE)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (ErrorCode.CANCELLED, WasteCause.CANCELLED),
        (ErrorCode.SLOW_CLIENT, WasteCause.SLOW_CLIENT),
        (ErrorCode.DEADLINE_EXCEEDED, WasteCause.DEADLINE),
        (ErrorCode.WORKER_LOST, WasteCause.FAILED),
    ],
)
def test_an_answer_that_came_to_nothing(code: ErrorCode, cause: WasteCause) -> None:
    """All that was computed, read or not."""
    assert ((cause, WasteStage.PREFILL, 20),) == told(ended(code), 2, Role.PREFILL, Work(computed_tokens=20))
    assert ((cause, WasteStage.DECODE, 20), REPLAYED) == told(ended(code), 2, Role.DECODE)


def test_a_request_that_is_not_known() -> None:
    """An earlier scheduler's; and where nothing was done nothing is told."""
    assert (Waste(cause=WasteCause.ORPHANED, stage=WasteStage.PREFILL, num_tokens=20),) == wasted(
        None, Attempt(1), Role.PREFILL, Work(computed_tokens=20)
    )
    assert () == wasted(None, Attempt(1), Role.DECODE, NO_WORK)
