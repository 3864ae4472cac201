"""Whatever is said in whatever order, the record stays sound and an end is reachable."""

from hypothesis import given
from hypothesis import strategies as st

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId, TransferId, WorkerId
from shared.domain.lifecycle import IllegalTransition, RequestRecord, RetryRule, advance
from shared.domain.lifecycle_events import (
    Admitted,
    Adopted,
    AnswerComplete,
    AttemptFailed,
    CancelRequested,
    CapacityLost,
    DeadlinePassed,
    Delivered,
    Event,
    GatewayBack,
    Inherited,
    KvCommitted,
    Persist,
    PlacementChosen,
    PlacementWritten,
    Preempted,
    PrefillDone,
    Released,
    Reserve,
    Reserved,
    ReserveRefused,
    SequenceDone,
    TellOutcome,
    WorkerGone,
    WorkerLost,
    WriteStep,
)
from shared.domain.request import CancelReason, FinishReason, RequestSpec, RequestState, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import KvTarget, WorkerRef

WORKERS = [WorkerRef(WorkerId(name), Incarnation(number)) for name in ("p", "d") for number in (1, 2)]
TARGET = KvTarget(
    worker_id=WorkerId("d"), address="a", incarnation=Incarnation(1), transfer_id=TransferId(1), transports=()
)
ADMITTED = Admitted(
    spec=RequestSpec(
        request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=1, sampling=SamplingParams(seed=1)
    ),
    gateway_incarnation=Incarnation(1),
    unix_ms=1,
)
ADOPTED = [
    Adopted(
        spec=ADMITTED.spec, gateway_incarnation=Incarnation(1), unix_ms=1, attempt=Attempt(number), was_placed=placed
    )
    for number in (1, 2)
    for placed in (False, True)
]
attempts = st.builds(Attempt, st.integers(1, 4))
workers = st.sampled_from(WORKERS)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        PlacementChosen, attempt=attempts, prefill=st.sampled_from(WORKERS[:2]), decode=st.sampled_from(WORKERS[2:])
    ),
    st.builds(PlacementWritten, attempt=attempts),
    st.builds(Reserved, attempt=attempts, target=st.just(TARGET), attach_ticket=st.just(b"")),
    st.builds(ReserveRefused, attempt=attempts),
    st.builds(PrefillDone, attempt=attempts),
    st.builds(KvCommitted, attempt=attempts),
    st.builds(SequenceDone, attempt=attempts, finish_reason=st.just(FinishReason.STOP), completion_tokens=st.just(1)),
    st.builds(Preempted, attempt=attempts),
    st.builds(Delivered, closed_attempt=attempts, ids=st.lists(st.just(TokenId(7)), max_size=3).map(tuple)),
    st.builds(
        AnswerComplete, closed_attempt=attempts, finish_reason=st.just(FinishReason.STOP), completion_tokens=st.just(1)
    ),
    st.builds(
        AttemptFailed,
        attempt=attempts,
        role=st.sampled_from([Role.PREFILL, Role.DECODE]),
        error=st.sampled_from([ServingError(code, "x") for code in (ErrorCode.WORKER_LOST, ErrorCode.INTERNAL)]),
    ),
    st.builds(CancelRequested, reason=st.sampled_from(CancelReason)),
    st.just(DeadlinePassed()),
    st.builds(
        GatewayBack,
        spec=st.just(ADMITTED.spec),
        gateway_incarnation=st.just(Incarnation(2)),
        last_attempt_seen=attempts,
    ),
    st.builds(
        Inherited,
        attempt=attempts,
        worker=st.sampled_from(WORKERS[2:]),
        role=st.just(Role.DECODE),
        is_held=st.booleans(),
        is_running=st.booleans(),
        target=st.just(TARGET),
    ),
    st.builds(
        Inherited,
        attempt=attempts,
        worker=st.sampled_from(WORKERS[:2]),
        role=st.just(Role.PREFILL),
        is_held=st.booleans(),
    ),
    st.just(CapacityLost()),
    st.builds(Released, worker=workers, released_attempt=attempts, blocks_freed=st.just(1)),
    st.builds(WorkerLost, worker=workers),
    st.builds(WorkerGone, worker=workers),
)


def check(record: RequestRecord) -> None:
    """What holds in every record."""
    ended = record.state.is_terminal
    assert (record.outcome is not None) == (ended or record.state is RequestState.ABORTING)
    if ended:
        assert record.outcome is not None
        assert record.state is record.outcome.state
        assert () == record.holds
    if record.state is RequestState.ABORTING:
        assert not all(hold.is_lost for hold in record.unreleased)
    assert all(hold.attempt == record.attempt for hold in record.holds)
    if record.awaits_delivered is not None:
        assert record.awaits_delivered == record.attempt - 1
        assert not record.holds  # nothing is placed before the gateway has answered
    keys = [hold.key for hold in (*record.holds, *record.unreleased)]
    assert len(keys) == len(set(keys))


@given(st.sampled_from([ADMITTED, *ADOPTED]), st.lists(events, max_size=40), st.integers(0, 2))
def test_any_history_keeps_the_record_sound(beginning: Event, history: list[Event], max_retries: int) -> None:
    """One outcome told, one outcome written, none after an end; a cancel and the releases then settle it."""
    rule = RetryRule(max_retries=max_retries)
    record = advance(None, beginning, 0.0, rule).record
    told = written = 0
    ending: list[Event] = [CancelRequested(reason=CancelReason.DELETE)]
    for event in (*history, *ending):
        before = record
        try:
            step = advance(record, event, 1.0, rule)
        except IllegalTransition:
            continue
        record = step.record
        check(record)
        assert before.attempt <= record.attempt
        if record.delivered_ids != before.delivered_ids:
            assert isinstance(event, Delivered)
            assert before.awaits_delivered == event.closed_attempt
        if any(isinstance(effect, Reserve) for effect in step.effects):
            assert record.awaits_delivered is None
        assert not before.state.is_terminal or before.state is record.state
        told += sum(isinstance(effect, TellOutcome) for effect in step.effects)
        written += sum(effect == Persist(step=WriteStep.OUTCOME) for effect in step.effects)
    for hold in record.unreleased:
        step = advance(record, Released(worker=hold.worker, released_attempt=hold.attempt, blocks_freed=0), 2.0, rule)
        record = step.record
        written += sum(effect == Persist(step=WriteStep.OUTCOME) for effect in step.effects)
    assert record.is_settled
    assert (1, 1) == (told, written)
