"""The life-cycle table: which failed attempts are tried again, and which request is taken for the cause."""

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.lifecycle import RequestRecord, RetryRule, Step, advance
from shared.domain.lifecycle_events import (
    Admitted,
    AttemptFailed,
    DeadlinePassed,
    Event,
    PlacementChosen,
    PlacementWritten,
)
from shared.domain.request import RequestSpec, RequestState, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import WorkerRef

P = WorkerRef(WorkerId("p"), Incarnation(1))
D = WorkerRef(WorkerId("d"), Incarnation(2))
SPEC = RequestSpec(request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=4, sampling=SamplingParams(seed=1))
RULE = RetryRule(max_retries=2, max_workers_lost=2)


def placed(attempt: int) -> tuple[Event, ...]:
    """Decode is commanded."""
    at = Attempt(attempt)
    return PlacementChosen(attempt=at, prefill=P, decode=D), PlacementWritten(attempt=at)


def failed(attempt: int, code: ErrorCode, *, has_lost_holder: bool = False) -> AttemptFailed:
    """By its decode worker, or with it."""
    return AttemptFailed(
        attempt=Attempt(attempt),
        role=Role.DECODE,
        error=ServingError(code, "x"),
        has_lost_holder=has_lost_holder,
    )


def run(*events: Event, rule: RetryRule = RULE, record: RequestRecord | None = None) -> Step:
    """From admission on; the last step."""
    if record is None:
        record = advance(None, Admitted(spec=SPEC, gateway_incarnation=Incarnation(3), unix_ms=1), 0.0, rule).record
    step = Step(record=record)
    for event in events:
        step = advance(step.record, event, 1.0, rule)
    return step


def code_of(record: RequestRecord) -> ErrorCode | None:
    """Why it failed."""
    error = None if record.outcome is None else record.outcome.error
    return None if error is None else error.code


def test_the_second_worker_that_is_lost_with_it_ends_a_request() -> None:
    """However many retries are left: the next worker might be the next victim."""
    first = run(*placed(1), failed(1, ErrorCode.WORKER_LOST, has_lost_holder=True)).record
    assert (RequestState.QUEUED, 1) == (first.state, first.num_workers_lost)
    second = run(*placed(2), failed(2, ErrorCode.WORKER_LOST, has_lost_holder=True), record=first).record
    assert (RequestState.ABORTING, ErrorCode.REQUEST_POISONED) == (second.state, code_of(second))


def test_a_lost_worker_that_held_nothing_of_it_says_nothing_of_it() -> None:
    """It was placed there, and not commanded yet: it costs a retry as before."""
    record = run(*placed(1), failed(1, ErrorCode.WORKER_LOST)).record
    assert (RequestState.QUEUED, 1, 0) == (record.state, record.num_retries, record.num_workers_lost)


def test_a_worker_that_is_being_stopped_costs_no_retry() -> None:
    """It is as if the request had not been placed there, also where nothing is left to spend."""
    rule = RetryRule(max_retries=0, has_budget=False)
    record = run(*placed(1), failed(1, ErrorCode.DRAINING), rule=rule).record
    assert (RequestState.QUEUED, 2, 0) == (record.state, record.attempt, record.num_retries)


def test_without_a_budget_only_lost_workers_are_made_up_for() -> None:
    """Other failures are final then, with their own error."""
    rule = RetryRule(max_retries=2, has_budget=False)
    lost = run(*placed(1), failed(1, ErrorCode.WORKER_LOST, has_lost_holder=True), rule=rule).record
    assert RequestState.QUEUED is lost.state
    broken = run(*placed(1), failed(1, ErrorCode.KV_TRANSFER_FAILED), rule=rule).record
    assert ErrorCode.KV_TRANSFER_FAILED is code_of(broken)


def test_a_worker_may_see_the_deadline_first() -> None:
    """The same end as by the scheduler's clock."""
    by_worker = run(*placed(1), failed(1, ErrorCode.DEADLINE_EXCEEDED)).record
    by_clock = run(*placed(1), DeadlinePassed()).record
    assert [(RequestState.ABORTING, ErrorCode.DEADLINE_EXCEEDED)] * 2 == [
        (record.state, code_of(record)) for record in (by_worker, by_clock)
    ]
