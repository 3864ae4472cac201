"""The life of a request: the record, the one table of transitions, and `advance`.

Everything about transitions is in this file. It imports nothing but `shared.domain`; time comes in as an argument.
`advance` returns the new record with an ordered tuple of effects and performs none. Every (state, event) pair is a row
of `TABLE`, a name in `IGNORED`, or raises `IllegalTransition` and changes nothing; `docs/lifecycle.md` shows them all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt
from shared.domain.lifecycle_events import (
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
    Effect,
    Event,
    GatewayBack,
    Hold,
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
    TellQueued,
    TellRequeued,
    WorkerGone,
    WorkerLost,
    WriteStep,
)
from shared.domain.lifecycle_record import RequestRecord
from shared.domain.request import TERMINAL_STATES, CancelReason, Outcome, RequestState, Role
from shared.domain.worker import WorkerRef

# ---- results


class Verdict(Enum):
    """What the table made of an event."""

    TAKEN = "taken"
    IGNORED = "ignored"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The record after an event, what is to be done now, and what became of the event."""

    record: RequestRecord
    effects: tuple[Effect, ...] = ()
    verdict: Verdict = Verdict.TAKEN


class IllegalTransition(Exception):
    """An event that cannot happen in this state: a bug of whoever sent it. Nothing was changed."""

    def __init__(self, state: RequestState | None, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in {state}")
        self.state = state
        self.event = event


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """When a failed attempt goes back to the queue. A guard, not a state."""

    max_retries: int = 0
    max_workers_lost: int = 2
    """One that so many workers did not survive ends: the next worker might be the next victim."""
    has_budget: bool = True
    """More attempts may be tried again now; see `scheduler.retry_budget`."""

    def can_retry(self, record: RequestRecord, event: AttemptFailed) -> bool:
        if event.error.code is ErrorCode.DRAINING:
            return True  # a worker that is being stopped refuses what was on its way: as good as not placed
        has_budget = self.has_budget or event.error.code is ErrorCode.WORKER_LOST
        return event.error.row.is_retryable and record.num_retries < self.max_retries and has_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: the states it may lead to, who reports the event, what it does."""

    nexts: tuple[RequestState, ...]
    reported_by: str
    apply: "Handler"


def advance(record: RequestRecord | None, event: Event, now: float, rule: RetryRule) -> Step:
    """The one way a record changes. `record` is None before Admitted. Raises IllegalTransition and changes nothing."""
    if record is None:
        if isinstance(event, Adopted):
            return _adopt(event, now)
        if not isinstance(event, Admitted):
            raise IllegalTransition(None, event)
        return _admit(event, now)
    if isinstance(event, FENCED) and event.attempt != record.attempt:
        return Step(record=record, verdict=Verdict.STALE)
    row = TABLE.get((record.state, type(event)))
    if row is not None:
        return row.apply(record, event, now, rule)
    if (record.state, type(event)) in IGNORED:
        return Step(record=record, verdict=Verdict.IGNORED)
    raise IllegalTransition(record.state, event)


def deadline_exceeded() -> ServingError:
    """What a request ends with whose time is over, whoever sees it first."""
    return ServingError(ErrorCode.DEADLINE_EXCEEDED, "the time for this request is over")


def _admit(event: Admitted, now: float) -> Step:
    record = RequestRecord(
        spec=event.spec,
        state=RequestState.QUEUED,
        attempt=Attempt(1),
        gateway_incarnation=event.gateway_incarnation,
        admitted_at=now,
        admitted_unix_ms=event.unix_ms,
        entered_at=now,
    )
    return Step(record=record, effects=(Persist(step=WriteStep.ADMITTED), TellQueued()))


def _adopt(event: Adopted, now: float) -> Step:
    """Placed = PREFILLING, the state that takes whatever its workers may say next; they tell which one it is."""
    record = RequestRecord(
        spec=event.spec,
        state=RequestState.PREFILLING if event.was_placed else RequestState.QUEUED,
        attempt=event.attempt,
        gateway_incarnation=event.gateway_incarnation,
        admitted_at=now,
        admitted_unix_ms=event.unix_ms,
        entered_at=now,
        is_adopted=True,
    )
    return Step(record=record)


def _gateway_back(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, GatewayBack)
    back = replace(record, spec=event.spec, gateway_incarnation=event.gateway_incarnation)
    is_later = event.last_attempt_seen > record.attempt
    if is_later or (event.last_attempt_seen == record.attempt and record.state is RequestState.QUEUED):
        return _raised(back, event.last_attempt_seen, now)
    if record.state is RequestState.QUEUED and event.last_attempt_seen and record.awaits_delivered is None:
        # It went back to the queue before: what it holds was known to the earlier scheduler alone.
        asking = replace(back, awaits_delivered=Attempt(record.attempt - 1), requeue_reason=ADOPTED)
        return Step(record=asking, effects=(TellRequeued(),))
    return Step(record=back)


def _inherited(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, Inherited)
    is_ours = not record.is_adopted and record.state is not RequestState.QUEUED
    if is_ours or event.attempt < record.attempt:
        return Step(record=record, verdict=Verdict.IGNORED)
    effects: tuple[Effect, ...] = ()
    if event.attempt > record.attempt or record.state is RequestState.QUEUED:
        raised = _raised(record, event.attempt, now)
        record, effects = raised.record, raised.effects
    if not event.is_held:
        return Step(record=record, effects=effects)
    hold = Hold(worker=event.worker, role=event.role, attempt=event.attempt)
    if hold.key not in {held.key for held in record.holds}:
        record = replace(record, holds=(*record.holds, hold))
    if event.role is Role.PREFILL:
        return Step(record=replace(record, prefill=event.worker), effects=effects)
    state = RequestState.DECODING if event.is_running else record.state
    held = replace(
        _enter(record, state, now, decode=event.worker), target=event.target, attach_ticket=event.attach_ticket
    )
    return Step(record=held, effects=effects)


def _raised(record: RequestRecord, attempt: Attempt, now: float) -> Step:
    """To a later attempt than the one that was known; whoever holds an earlier one lets go of it."""
    aborts = tuple(Abort(hold=hold) for hold in record.holds)
    raised = replace(
        _requeued(record, now),
        state=RequestState.PREFILLING,
        attempt=attempt,
        is_adopted=True,
        awaits_delivered=None,
        requeue_reason="",
        unreleased=(*record.unreleased, *record.holds),
        holds=(),
    )
    return Step(record=raised, effects=aborts)


def _placement_chosen(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, PlacementChosen)
    if record.awaits_delivered is not None:
        raise IllegalTransition(record.state, event)
    placed = _enter(record, RequestState.PLACING, now, prefill=event.prefill, decode=event.decode)
    return Step(record=replace(placed, is_adopted=False), effects=(Persist(step=WriteStep.PLACED),))


def _placement_written(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    if record.decode is None or record.holds:
        return Step(record=record, verdict=Verdict.IGNORED)  # said twice: Reserve is on its way
    hold = Hold(worker=record.decode, role=Role.DECODE, attempt=record.attempt)
    return Step(
        record=replace(record, holds=(*record.holds, hold)),
        effects=(Reserve(worker=record.decode, attempt=record.attempt),),
    )


def _reserved(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, Reserved)
    assert record.prefill is not None
    hold = Hold(worker=record.prefill, role=Role.PREFILL, attempt=record.attempt)
    reserved = replace(
        _enter(record, RequestState.PREFILLING, now),
        target=event.target,
        attach_ticket=event.attach_ticket,
        holds=(*record.holds, hold),
    )
    start = StartPrefill(worker=record.prefill, attempt=record.attempt, target=event.target)
    return Step(record=reserved, effects=(start, TellPlaced()))


def _reserve_refused(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    # Refused means that nothing was taken: there is nothing to release. It costs no retry.
    return Step(record=_requeued(replace(record, holds=()), now), effects=(TellQueued(),))


def _to(state: RequestState) -> "Handler":
    def enter(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
        return Step(record=_enter(record, state, now))

    return enter


def _finished(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, SequenceDone)
    return _finish(record, event, now)


def _delivered(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, Delivered)
    if event.closed_attempt != record.awaits_delivered:
        return Step(record=record, verdict=Verdict.IGNORED)  # said twice
    delivered = replace(record, awaits_delivered=None, requeue_reason="", delivered_ids=event.ids)
    return Step(record=delivered, effects=(TellQueued(),))


def _answer_complete(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, AnswerComplete)
    if event.closed_attempt != record.awaits_delivered:
        return Step(record=record, verdict=Verdict.IGNORED)
    return _finish(replace(record, awaits_delivered=None), event, now)


def _finish(record: RequestRecord, event: SequenceDone | AnswerComplete, now: float) -> Step:
    outcome = Outcome(state=RequestState.FINISHED, finish_reason=event.finish_reason)
    finished = replace(
        _enter(record, RequestState.FINISHED, now),
        outcome=outcome,
        completion_tokens=event.completion_tokens,
        unreleased=(*record.unreleased, *record.holds),
        holds=(),
    )
    releases = tuple(Release(hold=hold) for hold in record.holds)
    return Step(record=finished, effects=(TellOutcome(outcome=outcome), Persist(step=WriteStep.OUTCOME), *releases))


def _attempt_failed(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, AttemptFailed)
    if record.state is RequestState.DECODING and event.role is Role.PREFILL:
        return Step(record=record, verdict=Verdict.IGNORED)  # decode has all it needs
    if event.has_lost_holder:
        record = replace(record, num_workers_lost=record.num_workers_lost + 1)
        if record.num_workers_lost >= rule.max_workers_lost:
            error = ServingError(
                ErrorCode.REQUEST_POISONED, f"{record.num_workers_lost} workers were lost while they held the request"
            )
            return _end(record, Outcome(state=RequestState.FAILED, error=error), now)
    if rule.can_retry(record, event):
        if event.error.code is not ErrorCode.DRAINING:
            is_corrupt = record.distrusts_cache or event.error.code is ErrorCode.KV_CORRUPT
            record = replace(record, num_retries=record.num_retries + 1, distrusts_cache=is_corrupt)
        return _abort_and_requeue(record, event.error.code.value.lower(), now)
    return _end(record, Outcome(state=RequestState.FAILED, error=event.error), now)


def _preempted(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    return _abort_and_requeue(record, PREEMPTED, now)  # costs no retry


def _cancelled(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, CancelRequested)
    code = ErrorCode.SLOW_CLIENT if event.reason is CancelReason.SLOW_CLIENT else ErrorCode.CANCELLED
    outcome = Outcome(
        state=RequestState.CANCELLED, error=ServingError(code, f"the request was cancelled: {event.reason.value}")
    )
    return _end(replace(record, cancel_asked_at=now), outcome, now)


def _deadline_passed(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    return _end(record, Outcome(state=RequestState.FAILED, error=deadline_exceeded()), now)


def _capacity_lost(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    error = ServingError(ErrorCode.NO_CAPACITY, "no worker that could serve the request is ready")
    return _end(record, Outcome(state=RequestState.FAILED, error=error), now)


def _released(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, Released)
    key = (event.worker.worker_id, event.worker.incarnation, event.released_attempt)
    left = tuple(hold for hold in record.unreleased if hold.key != key)
    if len(left) == len(record.unreleased):
        return Step(record=record, verdict=Verdict.IGNORED)  # answered twice
    outcome = record.outcome
    if outcome is not None:
        outcome = replace(outcome, blocks_freed=outcome.blocks_freed + event.blocks_freed)
    return _settle(replace(record, unreleased=left, outcome=outcome), now)


def _worker_lost(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, WorkerLost)

    def marked(holds: tuple[Hold, ...]) -> tuple[Hold, ...]:
        return tuple(replace(hold, is_lost=True) if hold.worker == event.worker else hold for hold in holds)

    return _settle(replace(record, holds=marked(record.holds), unreleased=marked(record.unreleased)), now)


def _worker_gone(record: RequestRecord, event: Event, now: float, rule: RetryRule) -> Step:
    assert isinstance(event, WorkerGone)

    def kept(holds: tuple[Hold, ...]) -> tuple[Hold, ...]:
        return tuple(hold for hold in holds if hold.worker != event.worker)

    return _settle(replace(record, holds=kept(record.holds), unreleased=kept(record.unreleased)), now)


def _enter(
    record: RequestRecord,
    state: RequestState,
    now: float,
    *,
    prefill: WorkerRef | None = None,
    decode: WorkerRef | None = None,
) -> RequestRecord:
    return replace(
        record, state=state, entered_at=now, prefill=prefill or record.prefill, decode=decode or record.decode
    )


def _requeued(record: RequestRecord, now: float) -> RequestRecord:
    return replace(
        record,
        state=RequestState.QUEUED,
        attempt=Attempt(record.attempt + 1),
        entered_at=now,
        prefill=None,
        decode=None,
        target=None,
        attach_ticket=b"",
        is_adopted=False,
    )


def _abort_and_requeue(record: RequestRecord, reason: str, now: float) -> Step:
    """A gateway that was told of the attempt may hold tokens of it, and is asked before the next one is placed."""
    aborts = tuple(Abort(hold=hold) for hold in record.holds)
    requeued = replace(_requeued(record, now), unreleased=(*record.unreleased, *record.holds), holds=())
    if record.target is None and not record.is_adopted:
        return Step(record=requeued, effects=(*aborts, TellQueued()))
    asking = replace(requeued, awaits_delivered=record.attempt, requeue_reason=reason)
    return Step(record=asking, effects=(*aborts, TellRequeued()))


def _end(record: RequestRecord, outcome: Outcome, now: float) -> Step:
    """To ABORTING, or straight to the end where no living worker holds this attempt. The client is told at once."""
    if not record.holds:
        ended = replace(_enter(record, outcome.state, now), outcome=outcome)
        return Step(record=ended, effects=(TellOutcome(outcome=outcome), Persist(step=WriteStep.OUTCOME)))
    unreleased = (*record.unreleased, *record.holds)
    aborts = tuple(Abort(hold=hold) for hold in record.holds)
    aborting = replace(_enter(record, RequestState.ABORTING, now), outcome=outcome, unreleased=unreleased, holds=())
    settled = _settle(aborting, now)
    return Step(record=settled.record, effects=(*aborts, TellOutcome(outcome=outcome), *settled.effects))


def _settle(record: RequestRecord, now: float) -> Step:
    """ABORTING ends when every hold that is left is a lost worker's."""
    if record.state is not RequestState.ABORTING or not all(hold.is_lost for hold in record.unreleased):
        return Step(record=record)
    assert record.outcome is not None
    return Step(record=_enter(record, record.outcome.state, now), effects=(Persist(step=WriteStep.OUTCOME),))


Handler: TypeAlias = Callable[[RequestRecord, Event, float, RetryRule], Step]

_QUEUED, _PLACING, _PREFILLING = RequestState.QUEUED, RequestState.PLACING, RequestState.PREFILLING
_TRANSFERRING, _DECODING, _ABORTING = RequestState.TRANSFERRING, RequestState.DECODING, RequestState.ABORTING
_FINISHED, _CANCELLED, _FAILED = RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED
PREEMPTED, ADOPTED = "preempted", "adopted"
"""Reasons of a requeue that no error caused."""
PLACED_STATES = (_PLACING, _PREFILLING, _TRANSFERRING, _DECODING)
_DECODE, _SCHEDULER = "decode worker", "scheduler"


def _once(*states: RequestState) -> tuple[RequestState, ...]:
    return tuple(dict.fromkeys(states))


def _build_table() -> dict[tuple[RequestState, type[Event]], Row]:
    table: dict[tuple[RequestState, type[Event]], Row] = {
        (_QUEUED, PlacementChosen): Row(nexts=(_PLACING,), reported_by="placement", apply=_placement_chosen),
        (_QUEUED, Delivered): Row(nexts=(_QUEUED,), reported_by="gateway", apply=_delivered),
        (_QUEUED, AnswerComplete): Row(nexts=(_FINISHED,), reported_by="gateway", apply=_answer_complete),
        (_QUEUED, CancelRequested): Row(nexts=(_CANCELLED,), reported_by="gateway or Redis mark", apply=_cancelled),
        (_QUEUED, DeadlinePassed): Row(nexts=(_FAILED,), reported_by="clock", apply=_deadline_passed),
        (_QUEUED, CapacityLost): Row(nexts=(_FAILED,), reported_by="clock", apply=_capacity_lost),
        (_PLACING, PlacementWritten): Row(nexts=(_PLACING,), reported_by="record store", apply=_placement_written),
        (_PLACING, Reserved): Row(nexts=(_PREFILLING,), reported_by=_DECODE, apply=_reserved),
        (_PLACING, ReserveRefused): Row(nexts=(_QUEUED,), reported_by=_DECODE, apply=_reserve_refused),
        (_PREFILLING, PrefillDone): Row(nexts=(_TRANSFERRING,), reported_by="prefill worker", apply=_to(_TRANSFERRING)),
    }
    for state in (_PREFILLING, _TRANSFERRING):
        table[state, KvCommitted] = Row(nexts=(_DECODING,), reported_by=_DECODE, apply=_to(_DECODING))
    for state in (_PREFILLING, _TRANSFERRING, _DECODING):
        table[state, SequenceDone] = Row(nexts=(_FINISHED,), reported_by=_DECODE, apply=_finished)
        # A reservation too: an older sequence that runs needs its blocks.
        table[state, Preempted] = Row(nexts=(_QUEUED,), reported_by=_DECODE, apply=_preempted)
    for state in (_QUEUED, _PREFILLING, _TRANSFERRING, _DECODING):
        table[state, GatewayBack] = Row(nexts=_once(state, _PREFILLING), reported_by="gateway", apply=_gateway_back)
        nexts = _once(state, _PREFILLING, _DECODING)
        table[state, Inherited] = Row(nexts=nexts, reported_by="inventory of a worker", apply=_inherited)
    for state in PLACED_STATES:
        # Straight to the end where nothing was commanded yet or every holder is lost.
        table[state, CancelRequested] = Row(
            nexts=(_ABORTING, _CANCELLED), reported_by="gateway or Redis mark", apply=_cancelled
        )
        table[state, DeadlinePassed] = Row(nexts=(_ABORTING, _FAILED), reported_by="clock", apply=_deadline_passed)
        table[state, AttemptFailed] = Row(
            nexts=(_QUEUED, _ABORTING, _FAILED), reported_by="worker or lost session", apply=_attempt_failed
        )
    for state in RequestState:
        nexts = (_ABORTING, _CANCELLED, _FAILED) if state is _ABORTING else (state,)
        table[state, Released] = Row(nexts=nexts, reported_by="worker", apply=_released)
        table[state, WorkerLost] = Row(nexts=nexts, reported_by=_SCHEDULER, apply=_worker_lost)
        table[state, WorkerGone] = Row(nexts=nexts, reported_by=_SCHEDULER, apply=_worker_gone)
    return table


def _build_ignored() -> dict[tuple[RequestState, type[Event]], str]:
    ignored: dict[tuple[RequestState, type[Event]], str] = {
        (_DECODING, PrefillDone): "overtaken by KvCommitted",
        (_TRANSFERRING, PrefillDone): "said twice",
        (_DECODING, KvCommitted): "said twice",
        (_PLACING, GatewayBack): "it came before the placement",
        (_PLACING, Inherited): "placed in the meantime",
    }
    for state in (_PREFILLING, _TRANSFERRING, _DECODING):
        ignored[state, PlacementWritten] = "said twice"
        ignored[state, Reserved] = "said twice"
    said_earlier = (
        PlacementWritten, Reserved, ReserveRefused, PrefillDone, KvCommitted, SequenceDone, Preempted, AttemptFailed,
        Delivered, AnswerComplete, CancelRequested, DeadlinePassed, CapacityLost, GatewayBack, Inherited,
    )  # fmt: skip
    for state in (_ABORTING, *sorted(TERMINAL_STATES)):
        for event in said_earlier:
            ignored[state, event] = "the end is fixed; said before its reporter knew"
    for state in PLACED_STATES:
        ignored[state, CapacityLost] = "placed in the meantime"
        ignored[state, Delivered] = ignored[state, AnswerComplete] = "said twice"
    return ignored


TABLE = _build_table()
IGNORED = _build_ignored()
