"""The scheduler's brain: `SchedulerCore.step(event, now)` returns what is to be done, in order, and does none of it.

No loop, clock, random number, log, socket or store is in here. What must follow a write follows its `Written` event:
Queued after ADMITTED, Reserve after PLACED (written or owed). Transitions are `shared.domain.lifecycle`'s, what follows
from them is `scheduler.lives`', workers are `scheduler.sessions`'.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from scheduler import placement
from scheduler.adoption import Adoption
from scheduler.fleet import Fleet
from scheduler.ledger import Entry, Ledger
from scheduler.lives import Lives
from scheduler.lobby import Lobby
from scheduler.messages import (
    CancelAsked,
    CloseStream,
    CoreEffect,
    CoreEvent,
    DeliveredTold,
    DrainStarted,
    HeartbeatTold,
    InventoryTold,
    Noted,
    OutcomeTold,
    PersistRecord,
    RecordsFound,
    Refused,
    ReportTold,
    Resign,
    RewriteRecords,
    SessionClosed,
    SessionOpened,
    StartReceived,
    StateBack,
    StateLost,
    StateRewritten,
    StreamClosed,
    Tell,
    Ticked,
    Written,
)
from scheduler.retry_budget import RetryBudget
from scheduler.sessions import WorkerSessions
from scheduler.waiting import Waiter, Waiting
from shared.domain import lifecycle_events as events
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, RequestId
from shared.domain.lifecycle import PLACED_STATES, RetryRule, deadline_exceeded
from shared.domain.lifecycle_events import WriteStep
from shared.domain.refusals import RefusedKind
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState, Role, StoredRequest
from shared.domain.worker import LossLimits

# Several ticks: after longer this process did not run (it was stopped, or its machine slept), whatever others did.
MAX_TICK_GAP_S = 1.0
NOT_KNOWN = "the request is not known any more"
NO_ANSWER = "the record store does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """All bounds of the core."""

    max_queued_requests: int
    max_queued_prompt_tokens: int
    loss: LossLimits
    gateway_grace_s: float
    resumable_grace_s: float = 30.0
    max_retries: int = 2
    max_workers_lost: int = 2
    retry_share: float = 0.2
    retry_floor: int = 10
    retry_window_s: float = 60.0
    retry_wait_s: float = 30.0
    delivered_wait_s: float = 90.0
    startup_hold_s: float = 10.0  # as long as a gateway waits for a scheduler, workers included
    store_hold_s: float = 5.0  # of these: a Redis that is away for longer is not just busy with all who dial
    ends_kept_s: float = 60.0  # longer than the grace of a gateway that comes back
    max_ends_kept: int = 4096  # a minute of 68 requests a second; each holds its prompt
    max_outcomes_owed: int = 4096


class SchedulerCore:
    """All requests, the one queue and the fleet. One caller at a time."""

    def __init__(self, limits: CoreLimits, epoch: Epoch) -> None:
        self.epoch = epoch
        self.fleet = Fleet()
        self.waiting = Waiting(
            max_requests=limits.max_queued_requests, max_prompt_tokens=limits.max_queued_prompt_tokens
        )
        self.ledger = Ledger(epoch=epoch, ends_kept_s=limits.ends_kept_s, max_ends_kept=limits.max_ends_kept)
        self.is_state_ready = True
        self.is_draining = False
        self.lobby = Lobby(hold_s=limits.startup_hold_s, max_requests=limits.max_queued_requests)
        self._limits = limits
        self._owed_admissions: set[RequestId] = set()
        self._owed_outcomes: dict[RequestId, StoredRequest] = {}
        self._owed_placements: set[RequestId] = set()
        self._out: list[CoreEffect] = []
        self._ticked_at: float | None = None
        self._lives = Lives(
            ledger=self.ledger,
            waiting=self.waiting,
            fleet=self.fleet,
            rule=RetryRule(max_retries=limits.max_retries, max_workers_lost=limits.max_workers_lost),
            budget=RetryBudget(share=limits.retry_share, floor=limits.retry_floor, window_s=limits.retry_window_s),
            emit=self._emit,
        )
        self._adoption = Adoption(self._lives)
        self._sessions = WorkerSessions(self._lives, self._adoption, epoch, limits.loss)

    def step(self, event: CoreEvent, now: float) -> tuple[CoreEffect, ...]:
        """Take one event; the effects, in the order in which they are to be performed."""
        match event:
            case StartReceived() | CancelAsked() | DeliveredTold() | StreamClosed() | DrainStarted():
                self._step_gateway(event, now)
            case SessionOpened() | InventoryTold() | HeartbeatTold() | ReportTold() | SessionClosed():
                self._step_worker(event, now)
            case RecordsFound() | Written() | StateLost() | StateBack() | StateRewritten():
                self._step_store(event, now)
            case Ticked():
                self._tick(now)
            case _:
                assert_never(event)
        out, self._out = tuple(self._out), []
        return out

    def key_hash_of(self, request_id: RequestId) -> str | None:
        """Whose request it is; None where there is none with exactly this id, live or ended a while ago."""
        found = self.ledger.get(request_id) or self.lobby.get(request_id)
        return None if found is None else found.key_hash

    def _emit(self, effect: CoreEffect) -> None:
        self._out.append(effect)

    # ---- gateways

    def _step_gateway(
        self, event: StartReceived | CancelAsked | DeliveredTold | StreamClosed | DrainStarted, now: float
    ) -> None:
        match event:
            case StartReceived():
                self._start(event, now)
            case CancelAsked():
                self._cancel(event, now)
            case DeliveredTold():
                self._delivered(event, now)
            case StreamClosed():
                self._stream_closed(event, now)
            case DrainStarted():
                self.is_draining = True
                self._open_lobby(now)
            case _:
                assert_never(event)

    def _start(self, event: StartReceived, now: float) -> None:
        if event.epoch_seen > self.epoch:
            self._emit(Resign(epoch_seen=event.epoch_seen, reason="a gateway has seen a higher epoch"))
            return
        self._adoption.take_start(event, now)
        entry = self.ledger.get(event.spec.request_id)
        if entry is not None:
            self.lobby.take(entry.request_id)  # adopted out of it
            if event.session < entry.session:
                self._lives.refuse(event.stream, ServingError(ErrorCode.SUPERSEDED, "a newer reader took over"))
                return
            entry.session = event.session
            entry.key_hash = entry.key_hash or event.key_hash
            if entry.deadline is None:  # of an earlier scheduler's
                entry.deadline = event.deadline
            self._adoption.gateway_back(entry, event, now)
            old = self.ledger.attach(entry, event.stream)
            if old is not None and old != event.stream:
                self._emit(CloseStream(stream=old))
            record = entry.record
            if record.state in PLACED_STATES and event.last_attempt_closed >= record.attempt:
                # What its gateway lacks of the tokens is not held there any more.
                error = ServingError(ErrorCode.WORKER_LOST, "the gateway cannot go on with the attempt")
                failed = events.AttemptFailed(attempt=record.attempt, role=Role.DECODE, error=error)
                self._lives.advance(entry, failed, now)
            elif not self._adoption.tells_later(entry):
                self._lives.tell_present_state(entry)
            self._lives.place(now)
            return
        waiter = Waiter(
            request_id=event.spec.request_id,
            num_prompt_tokens=event.spec.num_prompt_tokens,
            max_total_tokens=event.spec.max_total_tokens,
        )
        error = self._admission_error(event, waiter, now)
        if error is not None:
            held = self.lobby.take(waiter.request_id)
            if held is not None and held.stream != event.stream:
                self._emit(CloseStream(stream=held.stream))
            if error.code is ErrorCode.STATE_UNAVAILABLE and not event.last_attempt_seen:
                may_wait = self._may_wait_for_store(now)
            else:
                may_wait = error.code is ErrorCode.NO_CAPACITY and self.lobby.is_open(now)
            if not may_wait or not self.lobby.hold(event):
                self._lives.refuse(event.stream, error)
            return
        self.lobby.take(waiter.request_id)
        admitted = events.Admitted(
            spec=event.spec, gateway_incarnation=event.gateway_incarnation, unix_ms=event.unix_ms
        )
        self._lives.admit(admitted, waiter, event, now)

    def _may_wait_for_store(self, now: float) -> bool:
        """Whom an earlier scheduler had in its queue comes as a new one: he need not suffer from what passes soon."""
        return self.lobby.age_s(now) < self._limits.store_hold_s

    def _open_lobby(self, now: float) -> None:
        """Whoever can be admitted or refused by now is."""
        self.lobby.is_open(now)  # its time runs from the first event of this scheduler on
        for start in self.lobby:
            self._start(start, now)

    def _admission_error(self, event: StartReceived, waiter: Waiter, now: float) -> ServingError | None:
        if not waiter.request_id:
            return ServingError(ErrorCode.INVALID_REQUEST, "request id must not be empty")
        if event.last_attempt_seen > 0:
            return ServingError(ErrorCode.STATE_UNAVAILABLE, NOT_KNOWN)
        if event.deadline is not None and now >= event.deadline:
            return deadline_exceeded()
        if self.is_draining:
            return ServingError(ErrorCode.DRAINING, "the scheduler takes no new requests")
        if not self.is_state_ready:
            return ServingError(ErrorCode.STATE_UNAVAILABLE, NO_ANSWER)
        error = placement.refusal(waiter, self.fleet.of_role(Role.PREFILL), self.fleet.of_role(Role.DECODE))
        if error is None and not self.waiting.can_admit(waiter.num_prompt_tokens):
            return ServingError(ErrorCode.OVERLOADED, "the queue is full")
        return error

    def _cancel(self, event: CancelAsked, now: float) -> None:
        entry = self.ledger.get(event.request_id)
        is_late = event.reason is CancelReason.DEADLINE  # by the gateway's clock
        if entry is not None:
            asked = events.DeadlinePassed() if is_late else events.CancelRequested(reason=event.reason)
            self._lives.advance(entry, asked, now)
            self._lives.place(now)
            return
        held = self.lobby.take(event.request_id)
        if held is not None:
            outcome = Outcome(
                state=RequestState.CANCELLED,
                error=ServingError(ErrorCode.CANCELLED, "cancelled before it was admitted"),
            )
            if is_late:
                outcome = Outcome(state=RequestState.FAILED, error=deadline_exceeded())
            self._emit(Tell(stream=held.stream, message=OutcomeTold(outcome=outcome)))

    def _delivered(self, event: DeliveredTold, now: float) -> None:
        entry = self.ledger.get(event.request_id)
        if entry is None:
            return
        reason = event.complete
        if reason is None and len(event.ids) >= entry.record.spec.max_tokens:
            reason = FinishReason.LENGTH  # nothing is left to be computed
        if reason is None:
            told: events.Event = events.Delivered(closed_attempt=event.closed_attempt, ids=event.ids)
        else:
            told = events.AnswerComplete(
                closed_attempt=event.closed_attempt, finish_reason=reason, completion_tokens=len(event.ids)
            )
        self._lives.feed(entry, told, now)
        self._lives.place(now)

    def _stream_closed(self, event: StreamClosed, now: float) -> None:
        self.lobby.drop(event.stream)
        entry = self.ledger.by_stream(event.stream)
        if entry is not None:
            self.ledger.detach(entry)
            entry.stream_broken_at = now

    # ---- workers

    def _step_worker(
        self, event: SessionOpened | InventoryTold | HeartbeatTold | ReportTold | SessionClosed, now: float
    ) -> None:
        match event:
            case SessionOpened():
                self._sessions.opened(event, now)
            case InventoryTold():
                self._sessions.inventory(event, now)
            case HeartbeatTold():
                self._sessions.heartbeat(event, now)
            case ReportTold():
                self._sessions.report(event, now)
            case SessionClosed():
                self._sessions.closed(event, now)
            case _:
                assert_never(event)
        if self.is_state_ready or isinstance(event, InventoryTold):  # which may show that some are not new
            self._open_lobby(now)

    # ---- the record store

    def _step_store(self, event: RecordsFound | Written | StateLost | StateBack | StateRewritten, now: float) -> None:
        match event:
            case RecordsFound(records=records):
                self._adoption.begin(records, now)
            case Written():
                self._written(event, now)
            case StateLost():
                self.is_state_ready = False
            case StateBack():
                self._owed_placements.clear()
                self._rewrite(entry for entry in self.ledger.live() if entry.is_written)
            case StateRewritten():
                self._rewritten(event)
                if self.is_state_ready:
                    self._admit_owed(now)
            case _:
                assert_never(event)

    def _written(self, event: Written, now: float) -> None:
        if event.error is ErrorCode.STATE_UNAVAILABLE:
            self.is_state_ready = False
        entry = self.ledger.get(event.request_id)
        if entry is None:
            return
        match event.step:
            case WriteStep.ADMITTED:
                self._admission_written(entry, event, now)
            case WriteStep.PLACED:
                if event.is_newer:  # nothing is commanded behind a newer scheduler's back
                    self._emit(Resign(epoch_seen=self.epoch, reason="a newer scheduler has written the record"))
                    return
                if event.error is not None:
                    self._owed_placements.add(entry.request_id)
                self._lives.feed(entry, events.PlacementWritten(attempt=event.attempt), now)
            case WriteStep.OUTCOME:
                self._outcome_written(entry, event)
            case _:
                assert_never(event.step)

    def _admission_written(self, entry: Entry, event: Written, now: float) -> None:
        waiter = self.waiting.get(entry.request_id)
        if waiter is None or entry.is_written:
            return  # cancelled in the meantime, its outcome is the next write; or an adopted one
        if event.error is ErrorCode.STATE_UNAVAILABLE:
            if self._may_wait_for_store(now):
                self._owed_admissions.add(entry.request_id)
            else:
                self._refuse_unwritten(entry)
            return
        if event.error is not None:
            # Its record of an earlier scheduler has ended: its gateway has dialled again in vain.
            self._take_back(entry, NOT_KNOWN)
            return
        waiter.is_written = True
        entry.is_written = True
        self._lives.tell_queued(entry)
        self._lives.place(now)

    def _refuse_unwritten(self, entry: Entry) -> None:
        """Not answered is not "not done": a Redis that was only slow may write it yet. So the refusal is owed."""
        code = ErrorCode.STATE_UNAVAILABLE
        self._owe(replace(self.ledger.stored(entry), state=RequestState.FAILED, error_code=code.value))
        self._take_back(entry, NO_ANSWER)

    def _take_back(self, entry: Entry, message: str) -> None:
        stream = entry.stream
        self._lives.forget(entry)
        if stream is not None:
            self._lives.refuse(stream, ServingError(ErrorCode.STATE_UNAVAILABLE, message))

    def _owed_entries(self) -> list[Entry]:
        """Those in the queue whose record could not be written: they are asked for once."""
        owed, self._owed_admissions = self._owed_admissions, set()
        entries = [self.ledger.get(waiter.request_id) for waiter in self.waiting if waiter.request_id in owed]
        return [entry for entry in entries if entry is not None and not entry.is_written]

    def _admit_owed(self, now: float) -> None:
        """Redis is back in time."""
        for entry in self._owed_entries():
            self._emit(PersistRecord(stored=self.ledger.stored(entry), step=WriteStep.ADMITTED))
        self._open_lobby(now)

    def _outcome_written(self, entry: Entry, event: Written) -> None:
        if event.error is None:
            self._owed_outcomes.pop(entry.request_id, None)
        else:
            self._owe(self.ledger.stored(entry))
        if entry.done_event is not None:
            ref, number = entry.done_event
            entry.done_event = None
            worker = self.fleet.by_ref(ref)
            if worker is not None:
                worker.events_in_write.discard(number)
                self._sessions.ack(worker)

    def _owe(self, stored: StoredRequest) -> None:
        """Keep an outcome for when Redis is back. With too many the oldest goes: its record expires without one."""
        self._owed_outcomes[stored.request_id] = stored
        if len(self._owed_outcomes) > self._limits.max_outcomes_owed:
            del self._owed_outcomes[next(iter(self._owed_outcomes))]
            self._emit(Refused(kind=RefusedKind.OUTCOME_WRITE))

    def _rewritten(self, event: StateRewritten) -> None:
        for request_id in event.outcomes:
            self._owed_outcomes.pop(request_id, None)
        if not event.is_complete:
            return  # away again: the next StateBack starts anew
        if self._owed_placements or self._owed_outcomes:
            # Changed while the others were written: these, too, before anything is admitted.
            owed = [self.ledger.get(request_id) for request_id in sorted(self._owed_placements)]
            self._owed_placements.clear()
            self._rewrite(entry for entry in owed if entry is not None and not entry.record.state.is_terminal)
            return
        self.is_state_ready = True

    def _rewrite(self, entries: Iterable[Entry]) -> None:
        records = tuple(self.ledger.stored(entry) for entry in entries)
        self._emit(RewriteRecords(records=(*records, *self._owed_outcomes.values())))

    # ---- time

    def _tick(self, now: float) -> None:
        self._excuse_own_pause(now)
        self._sessions.check(now)
        self._adoption.check(now)
        for entry in self.ledger.live():
            broken_at = entry.stream_broken_at
            grace_s = self._limits.resumable_grace_s if entry.session else self._limits.gateway_grace_s
            if broken_at is not None and now - broken_at >= grace_s:
                self._lives.advance(entry, events.CancelRequested(reason=CancelReason.GATEWAY_LOST), now)
            if entry.deadline is not None and now >= entry.deadline and entry.record.outcome is None:
                self._lives.advance(entry, events.DeadlinePassed(), now)
        self._give_up_waiting(now)
        self._open_lobby(now)
        if not self._may_wait_for_store(now):
            for entry in self._owed_entries():
                self._refuse_unwritten(entry)
        self._lives.place(now)
        self._tell_positions()
        self.ledger.forget_old_ends(now)

    def _excuse_own_pause(self, now: float) -> None:
        """Time in which this process did not run is nobody's silence: whatever measures one starts later by it."""
        pause_s = 0.0 if self._ticked_at is None else now - self._ticked_at - MAX_TICK_GAP_S
        self._ticked_at = now
        if pause_s <= 0.0:
            return
        self._emit(Noted(what="scheduler paused", reason=f"{pause_s + MAX_TICK_GAP_S:.1f} s between two ticks"))
        self._adoption.excuse(pause_s)
        for worker in self.fleet:
            worker.heard_at = min(worker.heard_at + pause_s, now)
            worker.session_broken_at = _later(worker.session_broken_at, pause_s, now)
        for entry in self.ledger.live():
            entry.stream_broken_at = _later(entry.stream_broken_at, pause_s, now)
        for waiter in self.waiting:
            waiter.unservable_since = _later(waiter.unservable_since, pause_s, now)
            waiter.asked_delivered_at = _later(waiter.asked_delivered_at, pause_s, now)

    def _give_up_waiting(self, now: float) -> None:
        """A request whose pool lost all its workers waits as long as for a lost worker; one that was under way waits
        until its deadline, or longer than others where it has none.

        What a gateway holds is waited for as long as a slow reader, and some.
        """
        prefills, decodes = self.fleet.of_role(Role.PREFILL), self.fleet.of_role(Role.DECODE)
        for waiter in self.waiting:
            entry = self.ledger.get(waiter.request_id)
            assert entry is not None, "a waiter has an entry"
            if waiter.awaited_until is not None:
                continue  # its gateway's grace runs
            asked_at = waiter.asked_delivered_at
            if asked_at is not None and now - asked_at >= self._limits.delivered_wait_s:
                self._lives.advance(entry, events.CancelRequested(reason=CancelReason.SLOW_CLIENT), now)
                continue
            if entry.record.attempt > 1 and entry.deadline is not None:
                continue
            wait_s = self._limits.loss.silence_s if entry.record.attempt == 1 else self._limits.retry_wait_s
            if placement.is_servable(waiter, prefills, decodes):
                waiter.unservable_since = None
            elif waiter.unservable_since is None:
                waiter.unservable_since = now
            elif now - waiter.unservable_since >= wait_s:
                self._lives.advance(entry, events.CapacityLost(), now)

    def _tell_positions(self) -> None:
        for position, waiter in enumerate(self.waiting):
            if waiter.is_written and waiter.told_position != position:
                entry = self.ledger.get(waiter.request_id)
                if entry is not None:
                    self._lives.tell_queued(entry)


def _later(since: float | None, by_s: float, now: float) -> float | None:
    """What began in or after the pause does not begin in the future."""
    return None if since is None else min(since + by_s, now)
