"""The life-cycle table: total, safe against late words, and left by a cancel from every state."""

from dataclasses import replace

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId, TransferId, WorkerId
from shared.domain.lifecycle import (
    IGNORED,
    PLACED_STATES,
    TABLE,
    IllegalTransition,
    RequestRecord,
    RetryRule,
    Step,
    Verdict,
    advance,
)
from shared.domain.lifecycle_events import (
    EVENT_TYPES,
    FENCED,
    Abort,
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
    Release,
    Released,
    Reserve,
    Reserved,
    ReserveRefused,
    SequenceDone,
    StartPrefill,
    TellOutcome,
    TellPlaced,
    TellRequeued,
    WorkerGone,
    WorkerLost,
    WriteStep,
)
from shared.domain.request import CancelReason, FinishReason, RequestSpec, RequestState, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import KvTarget, WorkerRef

P = WorkerRef(WorkerId("p"), Incarnation(1))
D = WorkerRef(WorkerId("d"), Incarnation(2))
SPEC = RequestSpec(request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=4, sampling=SamplingParams(seed=1))
TARGET = KvTarget(
    worker_id=D.worker_id, address="a:1", incarnation=D.incarnation, transfer_id=TransferId(1), transports=("grpc",)
)
LOST = ServingError(ErrorCode.WORKER_LOST, "lost")
BROKEN = ServingError(ErrorCode.INTERNAL, "broken")
NO_RETRY = RetryRule()


def events_of(attempt: int) -> dict[type[Event], Event]:
    """One event of each type for an attempt."""
    at = Attempt(attempt)
    made: list[Event] = [
        Admitted(spec=SPEC, gateway_incarnation=Incarnation(3), unix_ms=1),
        Adopted(spec=SPEC, gateway_incarnation=Incarnation(3), unix_ms=1, attempt=at, was_placed=True),
        GatewayBack(spec=SPEC, gateway_incarnation=Incarnation(3), last_attempt_seen=at),
        Inherited(attempt=at, worker=D, role=Role.DECODE, is_held=True, target=TARGET, attach_ticket=b"t"),
        PlacementChosen(attempt=at, prefill=P, decode=D),
        PlacementWritten(attempt=at),
        Reserved(attempt=at, target=TARGET, attach_ticket=b"t"),
        ReserveRefused(attempt=at),
        PrefillDone(attempt=at),
        KvCommitted(attempt=at),
        SequenceDone(attempt=at, finish_reason=FinishReason.STOP, completion_tokens=3),
        Delivered(closed_attempt=at, ids=(TokenId(7),)),
        AnswerComplete(closed_attempt=at, finish_reason=FinishReason.STOP, completion_tokens=3),
        Preempted(attempt=at),
        AttemptFailed(attempt=at, role=Role.DECODE, error=BROKEN),
        CancelRequested(reason=CancelReason.DELETE),
        DeadlinePassed(),
        CapacityLost(),
        Released(worker=D, released_attempt=at, blocks_freed=5),
        WorkerLost(worker=D),
        WorkerGone(worker=D),
    ]
    return {type(event): event for event in made}


PATH: dict[RequestState, tuple[type[Event], ...]] = {
    RequestState.QUEUED: (),
    RequestState.PLACING: (PlacementChosen, PlacementWritten),
    RequestState.PREFILLING: (PlacementChosen, PlacementWritten, Reserved),
    RequestState.TRANSFERRING: (PlacementChosen, PlacementWritten, Reserved, PrefillDone),
    RequestState.DECODING: (PlacementChosen, PlacementWritten, Reserved, KvCommitted),
    RequestState.ABORTING: (PlacementChosen, PlacementWritten, CancelRequested),
    RequestState.FINISHED: (PlacementChosen, PlacementWritten, Reserved, SequenceDone),
    RequestState.CANCELLED: (CancelRequested,),
    RequestState.FAILED: (DeadlinePassed,),
}


def record_in(state: RequestState) -> RequestRecord:
    """A record that came to a state by the shortest way."""
    record = advance(None, events_of(1)[Admitted], 10.0, NO_RETRY).record
    for kind in PATH[state]:
        record = advance(record, events_of(1)[kind], 11.0, NO_RETRY).record
    assert state is record.state
    return record


def run(record: RequestRecord, *events: Event, rule: RetryRule = NO_RETRY) -> Step:
    """The last step of several."""
    step = Step(record=record)
    for event in events:
        step = advance(step.record, event, 20.0, rule)
    return step


def failed_attempt(attempt: int) -> Event:
    """The loss of its decode worker."""
    return AttemptFailed(attempt=Attempt(attempt), role=Role.DECODE, error=LOST)


def names(step: Step) -> list[str]:
    """Types of the effects, in order."""
    return [type(effect).__name__ for effect in step.effects]


def test_every_pair_is_a_row_an_ignored_name_or_illegal() -> None:
    """No pair is in two places; each row ends in one of the states it names; each illegal one changes nothing."""
    assert set() == TABLE.keys() & IGNORED.keys()
    assert set(EVENT_TYPES) == set(events_of(1))
    for state in RequestState:
        record = record_in(state)
        for kind, event in events_of(record.attempt).items():
            if (state, kind) in TABLE:
                step = advance(record, event, 20.0, NO_RETRY)
                is_taken = step.verdict is Verdict.TAKEN
                expected = TABLE[state, kind].nexts if is_taken else (state,)
                assert step.record.state in expected, (state, kind)
            elif (state, kind) in IGNORED:
                assert Step(record=record, verdict=Verdict.IGNORED) == advance(record, event, 20.0, NO_RETRY)
            else:
                with pytest.raises(IllegalTransition):
                    advance(record, event, 20.0, NO_RETRY)


def test_everything_but_admitted_and_adopted_is_illegal_before_it() -> None:
    """There is no record yet."""
    for kind, event in events_of(1).items():
        if kind not in (Admitted, Adopted):
            with pytest.raises(IllegalTransition):
                advance(None, event, 1.0, NO_RETRY)


@pytest.mark.parametrize("state", list(RequestState))
def test_a_stale_attempt_is_dropped_before_the_table(state: RequestState) -> None:
    """Whatever belongs to another attempt changes nothing, in any state."""
    record = record_in(state)
    for kind, event in events_of(record.attempt + 1).items():
        if issubclass(kind, FENCED):
            assert Step(record=record, verdict=Verdict.STALE) == advance(record, event, 20.0, NO_RETRY)


@pytest.mark.parametrize("state", list(RequestState))
def test_from_each_state_a_cancel_alone_leads_to_an_end(state: RequestState) -> None:
    """With nothing but the acknowledgements that it asks for, or the loss of those who owe them."""
    record = run(record_in(state), CancelRequested(reason=CancelReason.DELETE)).record
    answered = lost = record
    for hold in record.unreleased:
        released = Released(worker=hold.worker, released_attempt=hold.attempt, blocks_freed=1)
        answered = run(answered, released).record
        lost = run(lost, WorkerLost(worker=hold.worker)).record
    assert answered.is_settled
    assert lost.state.is_terminal


def test_the_straight_way_commands_in_order() -> None:
    """Each step's effects, from Admitted to the releases."""
    events = events_of(1)
    told: list[list[str]] = []
    record = None
    for kind in (Admitted, *PATH[RequestState.DECODING], SequenceDone):
        step = advance(record, events[kind], 1.0, NO_RETRY)
        record = step.record
        told.append(names(step))
    assert [
        ["Persist", "TellQueued"],
        ["Persist"],
        ["Reserve"],
        ["StartPrefill", "TellPlaced"],
        [],
        ["TellOutcome", "Persist", "Release", "Release"],
    ] == told
    assert record is not None
    assert {("d", 2, 1), ("p", 1, 1)} == {hold.key for hold in record.unreleased}
    assert 3 == record.completion_tokens


def test_only_whoever_was_commanded_is_aborted() -> None:
    """PLACING before its write: nobody, the end at once. After it: decode. After Reserved: both."""
    placing = run(record_in(RequestState.QUEUED), events_of(1)[PlacementChosen]).record
    cancel = CancelRequested(reason=CancelReason.DISCONNECT)
    at_once = run(placing, cancel)
    assert (RequestState.CANCELLED, ["TellOutcome", "Persist"]) == (at_once.record.state, names(at_once))
    assert ["Abort", "TellOutcome"] == names(run(record_in(RequestState.PLACING), cancel))
    assert ["Abort", "Abort", "TellOutcome"] == names(run(record_in(RequestState.PREFILLING), cancel))


def test_the_end_is_fixed_on_entry_to_aborting() -> None:
    """A failure that arrives after the cancel does not make it FAILED; freed blocks add up."""
    record = run(record_in(RequestState.DECODING), CancelRequested(reason=CancelReason.DELETE)).record
    step = run(
        record,
        AttemptFailed(attempt=record.attempt, role=Role.DECODE, error=BROKEN),
        Released(worker=D, released_attempt=record.attempt, blocks_freed=5),
        Released(worker=D, released_attempt=record.attempt, blocks_freed=5),
        Released(worker=P, released_attempt=record.attempt, blocks_freed=2),
    )
    assert (RequestState.CANCELLED, ["Persist"]) == (step.record.state, names(step))
    assert step.record.outcome is not None
    assert 7 == step.record.outcome.blocks_freed


def test_a_refusal_goes_back_to_the_queue_under_a_new_number_and_holds_nothing() -> None:
    """It costs no retry."""
    step = run(record_in(RequestState.PLACING), ReserveRefused(attempt=Attempt(1)))
    assert (RequestState.QUEUED, 2, 0, (), ()) == (
        step.record.state,
        step.record.attempt,
        step.record.num_retries,
        step.record.holds,
        step.record.unreleased,
    )


@pytest.mark.parametrize("state", PLACED_STATES)
def test_a_retryable_failure_is_requeued_while_the_budget_lasts(state: RequestState) -> None:
    """The old attempt is aborted and still owed; the next failure is final."""
    failed = AttemptFailed(attempt=Attempt(1), role=Role.DECODE, error=LOST)
    rule = RetryRule(max_retries=1)
    requeued = run(record_in(state), failed, rule=rule).record
    assert (RequestState.QUEUED, 2, 1) == (requeued.state, requeued.attempt, requeued.num_retries)
    assert requeued.unreleased
    again = run(
        requeued,
        Delivered(closed_attempt=Attempt(1), ids=()),
        PlacementChosen(attempt=Attempt(2), prefill=P, decode=D),
        AttemptFailed(attempt=Attempt(2), role=Role.DECODE, error=LOST),
        rule=rule,
    ).record
    assert RequestState.FAILED is again.state
    assert RequestState.ABORTING is run(record_in(state), failed).record.state


def test_after_wrong_kv_no_attempt_trusts_the_cache() -> None:
    """Nor does a later one; other failures say nothing against it."""
    corrupt = ServingError(ErrorCode.KV_CORRUPT, "wrong digest")
    rule = RetryRule(max_retries=2)
    before = record_in(RequestState.PREFILLING)
    lost = run(before, AttemptFailed(attempt=Attempt(1), role=Role.DECODE, error=LOST), rule=rule).record
    closed = run(before, AttemptFailed(attempt=Attempt(1), role=Role.DECODE, error=corrupt), rule=rule).record
    again = run(
        closed,
        Delivered(closed_attempt=Attempt(1), ids=()),
        PlacementChosen(attempt=Attempt(2), prefill=P, decode=D),
        AttemptFailed(attempt=Attempt(2), role=Role.DECODE, error=LOST),
        rule=rule,
    ).record
    assert (False, True, True) == (lost.distrusts_cache, closed.distrusts_cache, again.distrusts_cache)


def test_a_failure_that_is_not_retryable_ends_at_once() -> None:
    """Budget or not."""
    failed = AttemptFailed(attempt=Attempt(1), role=Role.DECODE, error=BROKEN)
    step = run(record_in(RequestState.DECODING), failed, rule=RetryRule(max_retries=5))
    assert RequestState.ABORTING is step.record.state


def test_prefill_may_fail_once_decode_has_all() -> None:
    """Ignored in DECODING, counted before."""
    failed = AttemptFailed(attempt=Attempt(1), role=Role.PREFILL, error=LOST)
    assert Verdict.IGNORED is run(record_in(RequestState.DECODING), failed).verdict
    assert RequestState.ABORTING is run(record_in(RequestState.PREFILLING), failed).record.state


def test_a_lost_worker_settles_aborting_and_keeps_its_debt() -> None:
    """The debt goes with the incarnation or with its answer."""
    record = run(record_in(RequestState.PREFILLING), CancelRequested(reason=CancelReason.DELETE)).record
    record = run(record, Released(worker=P, released_attempt=Attempt(1), blocks_freed=1)).record
    lost = run(record, WorkerLost(worker=D)).record
    assert (RequestState.CANCELLED, False) == (lost.state, lost.is_settled)
    assert run(lost, WorkerGone(worker=D)).record.is_settled
    assert run(lost, Released(worker=D, released_attempt=Attempt(1), blocks_freed=1)).record.is_settled


def test_late_words_of_an_older_attempt_settle_its_debt_only() -> None:
    """Released is not fenced: it names the attempt that it is about."""
    failed = AttemptFailed(attempt=Attempt(1), role=Role.DECODE, error=LOST)
    requeued = run(record_in(RequestState.PREFILLING), failed, rule=RetryRule(max_retries=1)).record
    step = run(requeued, Released(worker=D, released_attempt=Attempt(1), blocks_freed=1))
    assert (RequestState.QUEUED, [P]) == (step.record.state, [hold.worker for hold in step.record.unreleased])


def test_a_slow_client_has_its_own_code() -> None:
    """So that the client is told why."""
    outcome = run(record_in(RequestState.DECODING), CancelRequested(reason=CancelReason.SLOW_CLIENT)).record.outcome
    assert outcome is not None
    assert outcome.error is not None
    assert ErrorCode.SLOW_CLIENT is outcome.error.code


def test_effects_carry_their_attempt_and_target() -> None:
    """What a driver needs is in the effect."""
    written = run(record_in(RequestState.QUEUED), events_of(1)[PlacementChosen], events_of(1)[PlacementWritten])
    assert (Reserve(worker=D, attempt=Attempt(1)),) == written.effects
    reserved = run(written.record, events_of(1)[Reserved])
    assert (StartPrefill(worker=P, attempt=Attempt(1), target=TARGET), TellPlaced()) == reserved.effects
    finished = run(reserved.record, events_of(1)[SequenceDone])
    assert finished.record.outcome is not None
    assert (
        TellOutcome(outcome=finished.record.outcome),
        Persist(step=WriteStep.OUTCOME),
        *(Release(hold=hold) for hold in finished.record.unreleased),
    ) == finished.effects
    preempted = run(record_in(RequestState.DECODING), events_of(1)[Preempted])
    assert (*(Abort(hold=hold) for hold in preempted.record.unreleased), TellRequeued()) == preempted.effects
    assert replace(preempted.record, entered_at=0.0).target is None


@pytest.mark.parametrize("state", PLACED_STATES[1:])
@pytest.mark.parametrize("reason", ["preempted", "worker_lost"])
def test_nothing_is_placed_before_delivered(state: RequestState, reason: str) -> None:
    """An attempt that the gateway was told of is asked about; what it holds goes with the next one."""
    lost = Preempted(attempt=Attempt(1)) if reason == "preempted" else failed_attempt(1)
    requeued = run(record_in(state), lost, rule=RetryRule(max_retries=1))
    assert "TellRequeued" == names(requeued)[-1]
    assert (1, reason) == (requeued.record.awaits_delivered, requeued.record.requeue_reason)
    chosen = PlacementChosen(attempt=Attempt(2), prefill=P, decode=D)
    with pytest.raises(IllegalTransition):
        run(requeued.record, chosen)

    delivered = run(requeued.record, Delivered(closed_attempt=Attempt(1), ids=(TokenId(7), TokenId(8))))
    assert (["TellQueued"], None, (7, 8)) == (
        names(delivered),
        delivered.record.awaits_delivered,
        delivered.record.delivered_ids,
    )
    assert RequestState.PLACING is run(delivered.record, chosen).record.state


def test_an_attempt_that_the_gateway_never_heard_of_is_closed_without_it() -> None:
    """What it held before still goes with the next one."""
    rule = RetryRule(max_retries=2)
    delivered = run(
        record_in(RequestState.DECODING),
        failed_attempt(1),
        Delivered(closed_attempt=Attempt(1), ids=(TokenId(7),)),
        rule=rule,
    ).record
    placing = run(
        delivered, PlacementChosen(attempt=Attempt(2), prefill=P, decode=D), PlacementWritten(attempt=Attempt(2))
    )
    requeued = run(placing.record, failed_attempt(2), rule=rule)
    assert (["Abort", "TellQueued"], None, (7,)) == (
        names(requeued),
        requeued.record.awaits_delivered,
        requeued.record.delivered_ids,
    )


def test_delivered_counts_once_and_for_its_attempt() -> None:
    """Said again on a new stream, or about an older attempt, it changes nothing."""
    requeued = run(record_in(RequestState.DECODING), Preempted(attempt=Attempt(1))).record
    assert Verdict.IGNORED is run(requeued, Delivered(closed_attempt=Attempt(2), ids=())).verdict
    delivered = run(requeued, Delivered(closed_attempt=Attempt(1), ids=(TokenId(7),))).record
    again = run(delivered, Delivered(closed_attempt=Attempt(1), ids=()))
    assert (delivered, Verdict.IGNORED) == (again.record, again.verdict)


def test_a_complete_answer_is_not_placed_again() -> None:
    """The worker that made it is gone, and the gateway has all of it: finished, with what it said."""
    requeued = run(record_in(RequestState.DECODING), failed_attempt(1), rule=RetryRule(max_retries=1)).record
    complete = AnswerComplete(closed_attempt=Attempt(1), finish_reason=FinishReason.LENGTH, completion_tokens=4)
    step = run(requeued, complete)
    assert (RequestState.FINISHED, 4, ["TellOutcome", "Persist"]) == (
        step.record.state,
        step.record.completion_tokens,
        names(step),
    )
    assert step.record.outcome is not None
    assert FinishReason.LENGTH is step.record.outcome.finish_reason
    assert Verdict.IGNORED is run(record_in(RequestState.QUEUED), complete).verdict


def adopted(attempt: int, *, was_placed: bool) -> RequestRecord:
    """A request of an earlier scheduler."""
    event = Adopted(
        spec=SPEC, gateway_incarnation=Incarnation(3), unix_ms=5, attempt=Attempt(attempt), was_placed=was_placed
    )
    step = advance(None, event, 10.0, NO_RETRY)
    assert () == step.effects
    return step.record


def inherited(attempt: int, role: Role = Role.DECODE, *, is_held: bool = True, is_running: bool = False) -> Inherited:
    """What a worker's inventory says of it."""
    worker, target = (D, TARGET) if role is Role.DECODE else (P, None)
    return Inherited(
        attempt=Attempt(attempt), worker=worker, role=role, is_held=is_held, is_running=is_running, target=target
    )


def test_inventories_say_where_an_adopted_request_stands() -> None:
    """Waiting for KV at decode and held by prefill = PREFILLING; running = DECODING; each holder becomes a hold."""
    record = adopted(2, was_placed=True)
    waiting = run(record, inherited(2), inherited(2, Role.PREFILL), inherited(2)).record
    running = run(record, inherited(2, is_running=True)).record

    assert (RequestState.PREFILLING, P, D, TARGET) == (waiting.state, waiting.prefill, waiting.decode, waiting.target)
    assert {("d", 2, 2), ("p", 1, 2)} == {hold.key for hold in waiting.holds}
    assert (RequestState.DECODING, None, D) == (running.state, running.prefill, running.decode)


def test_a_later_attempt_than_the_records_closes_the_earlier_one() -> None:
    """Its write was owed when the scheduler ended: whoever still holds the earlier one lets go of it."""
    record = run(adopted(1, was_placed=True), inherited(1), inherited(3, Role.PREFILL, is_held=False))

    assert (3, RequestState.PREFILLING, ()) == (record.record.attempt, record.record.state, record.record.holds)
    assert ["Abort"] == names(record)
    assert {("d", 2, 1)} == {hold.key for hold in record.record.unreleased}
    assert Verdict.IGNORED is run(record.record, inherited(1)).verdict


def test_a_gateway_knows_of_an_attempt_that_the_store_does_not() -> None:
    """Queued by its record and seen by its gateway: it was placed; not seen: it waits."""
    record = adopted(1, was_placed=False)
    spec = replace(SPEC, max_tokens=9)

    def back(seen: int) -> RequestRecord:
        event = GatewayBack(spec=spec, gateway_incarnation=Incarnation(4), last_attempt_seen=Attempt(seen))
        return run(record, event).record

    assert [(RequestState.QUEUED, 1), (RequestState.PREFILLING, 1), (RequestState.PREFILLING, 2)] == [
        (each.state, each.attempt) for each in map(back, (0, 1, 2))
    ]
    assert {(spec, 4)} == {(each.spec, each.gateway_incarnation) for each in map(back, (0, 1, 2))}


def test_an_adopted_attempt_that_nobody_holds_is_asked_about_before_the_next() -> None:
    """Its gateway may hold tokens of it, whatever is known here."""
    step = run(adopted(2, was_placed=True), failed_attempt(2), rule=RetryRule(max_retries=1))

    assert ["TellRequeued"] == names(step)
    assert (RequestState.QUEUED, 3, 2, False) == (
        step.record.state,
        step.record.attempt,
        step.record.awaits_delivered,
        step.record.is_adopted,
    )


def test_what_was_delivered_to_an_earlier_scheduler_is_asked_again() -> None:
    """Back in the queue by its record: its gateway has seen an attempt, and may hold tokens of it."""
    back = GatewayBack(spec=SPEC, gateway_incarnation=Incarnation(3), last_attempt_seen=Attempt(1))
    step = run(adopted(2, was_placed=False), back)

    assert ["TellRequeued"] == names(step)
    assert (RequestState.QUEUED, 2, 1) == (step.record.state, step.record.attempt, step.record.awaits_delivered)
