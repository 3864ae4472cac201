"""The lives of all requests: feeds events to the life-cycle table, turns its effects into the core's, and places.

`scheduler.core` and `scheduler.sessions` say what happened; here is what follows. Pure.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import ge
from typing import assert_never

from scheduler import placement
from scheduler.fleet import Fleet, Worker
from scheduler.ledger import Entry, Ledger
from scheduler.messages import (
    AbortJob,
    CommandBody,
    CoreEffect,
    Noted,
    OutcomeTold,
    PersistRecord,
    PlacedTold,
    PrefillJob,
    QueuedTold,
    Refused,
    ReleaseJob,
    RequestEnded,
    RequestReleased,
    RequestRequeued,
    RequeuedTold,
    ReserveJob,
    StartReceived,
    StreamId,
    Tell,
)
from scheduler.retry_budget import RetryBudget
from scheduler.waiting import Waiter, Waiting
from shared.domain import lifecycle
from shared.domain import lifecycle_events as events
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, RequestKey, WorkerId
from shared.domain.lifecycle import PLACED_STATES, RetryRule, Verdict
from shared.domain.refusals import RefusedKind
from shared.domain.request import Outcome, RequestState, Role
from shared.domain.worker import KvTarget, WorkerRef, WorkerState


class Lives:
    """All requests in one place. `emit` takes each effect in the order in which it is to be performed."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        waiting: Waiting,
        fleet: Fleet,
        rule: RetryRule,
        budget: RetryBudget,
        emit: Callable[[CoreEffect], None],
    ) -> None:
        self.ledger = ledger
        self.waiting = waiting
        self.fleet = fleet
        self.emit = emit
        self._rule = rule
        self._budget = budget
        self._waiters: dict[RequestId, Waiter] = {}
        """Of every request that may go back to the queue: its place and what it remembers."""

    def admit(self, event: events.Admitted, waiter: Waiter, start: StartReceived, now: float) -> None:
        """Into the queue; it is not placed before its admitted record is written."""
        step = lifecycle.advance(None, event, now, self._rule)
        self._budget.admitted(now)
        entry = Entry(
            record=step.record,
            stream=start.stream,
            deadline=start.deadline,
            session=start.session,
            key_hash=start.key_hash,
        )
        self.ledger.add(entry)
        self._waiters[entry.request_id] = waiter
        self.waiting.admit(waiter)
        self._perform(entry, step.effects)

    def adopt(self, event: events.Adopted, waiter: Waiter, now: float) -> Entry:
        """Of an earlier scheduler, in its place; its gateway is not there, and is not known to come."""
        entry = Entry(
            record=lifecycle.advance(None, event, now, self._rule).record,
            stream=None,
            stream_broken_at=now,
            is_written=True,
        )
        self.ledger.add(entry)
        self._waiters[entry.request_id] = waiter
        if entry.record.state is RequestState.QUEUED:
            self.waiting.put_back(waiter)
        return entry

    def spec_known(self, entry: Entry) -> None:
        """The gateway of an adopted request has come: it may be placed, and its sizes are counted."""
        waiter, spec = self._waiters.get(entry.request_id), entry.record.spec
        if waiter is None:
            return
        is_waiting = self.waiting.remove(entry.request_id) is not None
        waiter.num_prompt_tokens, waiter.max_total_tokens = spec.num_prompt_tokens, spec.max_total_tokens
        waiter.is_written, waiter.awaited_until = True, None
        if is_waiting:
            self.waiting.put_back(waiter)
        for hold in entry.record.holds:
            worker = self.fleet.by_ref(hold.worker)
            if worker is not None:
                worker.inherit(RequestKey(entry.request_id, hold.attempt), spec)

    def forget(self, entry: Entry) -> None:
        """As if it had never been admitted."""
        self.waiting.remove(entry.request_id)
        self._waiters.pop(entry.request_id, None)
        self.ledger.forget(entry)

    def remember_refusal(self, request_id: RequestId, worker: Worker, free_blocks: int, now: float) -> None:
        """Until this worker reports more free blocks, the request is not offered to it again."""
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            waiter.refusals[worker.worker_id] = (free_blocks, now)

    def remember_failure(self, request_id: RequestId, ref: WorkerRef) -> None:
        """The next attempt goes elsewhere if it can."""
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            waiter.avoided.add(ref)

    def feed(self, entry: Entry | None, event: events.Event, now: float) -> Verdict:
        """What somebody says of a request that may be unknown: late and doubled words are counted and dropped."""
        if entry is None:
            self.emit(Refused(kind=RefusedKind.UNKNOWN_REQUEST))
            return Verdict.STALE
        verdict = self.advance(entry, event, now)
        if verdict is Verdict.IGNORED:
            self.emit(Refused(kind=RefusedKind.LATE_EVENT))
        return verdict

    def advance(self, entry: Entry, event: events.Event, now: float) -> Verdict:
        before = entry.record
        try:
            step = lifecycle.advance(before, event, now, self._rule_for(event, now))
        except lifecycle.IllegalTransition as illegal:
            # The bug of a peer must not end the scheduler, with everyone else's requests.
            self.emit(Noted(what="illegal event", request_id=before.request_id, reason=str(illegal)))
            self.emit(Refused(kind=RefusedKind.ILLEGAL_EVENT))
            return Verdict.STALE
        if step.verdict is Verdict.STALE:
            self.emit(Refused(kind=RefusedKind.STALE_ATTEMPT))
            return step.verdict
        entry.record = step.record
        if before.state is RequestState.QUEUED and step.record.state is not RequestState.QUEUED:
            self.waiting.remove(entry.request_id)
        elif before.state is not RequestState.QUEUED and step.record.state is RequestState.QUEUED:
            self.waiting.put_back(self._waiters[entry.request_id])
        if step.record.num_retries > before.num_retries and not _is_loss(event):
            self._budget.take(now)
        self._note_delivered(entry, now)
        self._perform(entry, step.effects)
        self._unbook(before, step.record)
        if step.record.state.is_terminal and not before.state.is_terminal:
            self._waiters.pop(entry.request_id, None)
            self.ledger.ended(entry, now)
            self.emit(RequestEnded(record=step.record))
        if step.record.is_settled and not before.is_settled:
            asked_at = step.record.cancel_asked_at
            self.emit(
                RequestReleased(
                    request_id=entry.request_id, cancel_release_s=None if asked_at is None else now - asked_at
                )
            )
        return step.verdict

    def _rule_for(self, event: events.Event, now: float) -> RetryRule:
        """With the word of the budget, where it counts."""
        if not isinstance(event, events.AttemptFailed) or _is_loss(event) or self._budget.has_room(now):
            return self._rule
        self.emit(Refused(kind=RefusedKind.RETRY_BUDGET))
        return replace(self._rule, has_budget=False)

    def _note_delivered(self, entry: Entry, now: float) -> None:
        """What placement must know of it stands with the waiter."""
        record, waiter = entry.record, self._waiters.get(entry.request_id)
        if waiter is None:
            return
        waiter.num_delivered = len(record.delivered_ids)
        if record.awaits_delivered is None:
            waiter.asked_delivered_at = None
        elif waiter.asked_delivered_at is None:
            waiter.asked_delivered_at = now

    def _unbook(self, before: lifecycle.RequestRecord, after: lifecycle.RequestRecord) -> None:
        """Give back what was booked for a placement that came to nothing before its commands were sent."""
        if before.state is not RequestState.PLACING or after.state in PLACED_STATES:
            return
        key = RequestKey(before.request_id, before.attempt)
        for ref in (before.prefill, before.decode):
            worker = None if ref is None else self.fleet.by_ref(ref)
            if worker is not None:
                worker.unbook(key)

    def _perform(self, entry: Entry, effects: tuple[events.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case events.Persist():
                    self.emit(PersistRecord(stored=self.ledger.stored(entry), step=effect.step))
                case events.Reserve():
                    key = RequestKey(entry.request_id, effect.attempt)
                    record = entry.record
                    job = ReserveJob(spec=record.spec, delivered_ids=record.delivered_ids, deadline=entry.deadline)
                    self.send(effect.worker, key, job)
                case events.StartPrefill():
                    key = RequestKey(entry.request_id, effect.attempt)
                    self.send(effect.worker, key, _prefill_job(entry, effect.target))
                case events.Abort():
                    self.send(effect.hold.worker, RequestKey(entry.request_id, effect.hold.attempt), AbortJob())
                case events.Release():
                    self.send(effect.hold.worker, RequestKey(entry.request_id, effect.hold.attempt), ReleaseJob())
                case events.TellQueued():
                    if entry.is_written:
                        self.tell_queued(entry)
                case events.TellRequeued():
                    record = entry.record
                    if record.awaits_delivered is not None:
                        key = RequestKey(record.request_id, record.awaits_delivered)
                        self.emit(RequestRequeued(key=key, reason=record.requeue_reason))
                    self.tell_requeued(entry)
                case events.TellPlaced():
                    self.tell_placed(entry)
                case events.TellOutcome():
                    self.tell_outcome(entry, effect.outcome)
                case _:
                    assert_never(effect)

    def send(self, ref: WorkerRef, key: RequestKey, body: CommandBody) -> None:
        worker = self.fleet.by_ref(ref)
        if worker is not None:
            command = worker.command(key, body)
            if command is not None:
                self.emit(command)

    def tell_queued(self, entry: Entry) -> None:
        position = self.waiting.position(entry.request_id)
        waiter = self.waiting.get(entry.request_id)
        if waiter is not None:
            waiter.told_position = position
        if entry.stream is not None:
            self.emit(Tell(stream=entry.stream, message=QueuedTold(position=position)))

    def tell_requeued(self, entry: Entry) -> None:
        record = entry.record
        if entry.stream is not None and record.awaits_delivered is not None:
            told = RequeuedTold(attempt=record.awaits_delivered, reason=record.requeue_reason)
            self.emit(Tell(stream=entry.stream, message=told))

    def tell_placed(self, entry: Entry) -> None:
        record = entry.record
        if entry.stream is None or record.target is None:
            return
        placed = PlacedTold(
            attempt=record.attempt,
            target=record.target,
            attach_ticket=record.attach_ticket,
            prefill_worker=WorkerId("") if record.prefill is None else record.prefill.worker_id,  # adopted without it
        )
        self.emit(Tell(stream=entry.stream, message=placed))

    def tell_outcome(self, entry: Entry, outcome: Outcome) -> None:
        stream = self.ledger.detach(entry)
        if stream is not None:
            self.emit(Tell(stream=stream, message=OutcomeTold(outcome=outcome)))

    def refuse(self, stream: StreamId, error: ServingError) -> None:
        self.emit(Refused(kind=error.code))
        self.emit(Tell(stream=stream, message=OutcomeTold(outcome=Outcome(state=RequestState.FAILED, error=error))))

    def tell_present_state(self, entry: Entry) -> None:
        record = entry.record
        if record.outcome is not None:
            self.tell_outcome(entry, record.outcome)
        elif record.awaits_delivered is not None:
            self.tell_requeued(entry)
        elif record.target is not None:
            self.tell_placed(entry)
        elif entry.is_written:
            self.tell_queued(entry)

    def lose_holder(
        self, entry: Entry, worker: Worker, change: events.WorkerLost | events.WorkerGone, now: float
    ) -> None:
        """A worker start is given up, or gone: so are its holds, and the attempt that is placed on it."""
        record = entry.record
        was_held = any(hold.worker == worker.ref and hold.attempt == record.attempt for hold in record.holds)
        self.advance(entry, change, now)
        record = entry.record
        if record.state in PLACED_STATES and worker.ref in (record.prefill, record.decode):
            # One that was being stopped did not die of what it held.
            is_drained = worker.state in (WorkerState.DRAINING, WorkerState.STOPPED)
            error = (
                ServingError(ErrorCode.DRAINING, "the worker has been stopped") if is_drained else worker_lost(worker)
            )
            failed = events.AttemptFailed(
                attempt=record.attempt,
                role=worker.facts.role,
                error=error,
                has_lost_holder=was_held and not is_drained,
            )
            self.remember_failure(entry.request_id, worker.ref)
            self.advance(entry, failed, now)

    # ---- placement

    def place(self, now: float) -> None:
        """Place whatever has room, oldest first; the rule is in `scheduler.placement`."""
        prefills = [worker for worker in self.fleet.of_role(Role.PREFILL) if worker.is_ready]
        decodes = [worker for worker in self.fleet.of_role(Role.DECODE) if worker.is_ready]
        kept: set[WorkerId] = set()
        skipped: list[Waiter] = []
        # What was sought in vain: in this pass room only shrinks, so whoever needs as much need not be tried.
        in_vain: list[tuple[int, int, int]] = []
        has_room = self._has_any_room(prefills, decodes, kept)
        for waiter in self.waiting:
            if not has_room:
                break
            if waiter.awaited_until is not None and now < waiter.awaited_until:
                break
            if not waiter.is_placeable:
                continue
            pair = None
            sizes = (waiter.num_prompt_tokens, waiter.num_tokens_at_start, waiter.max_total_tokens)
            if not any(all(map(ge, sizes, others)) for others in in_vain):
                pair = placement.choose(waiter, prefills, decodes, kept, now)
                if pair is None and not waiter.refusals and not waiter.avoided:
                    in_vain.append(sizes)
            if pair is None:
                if not kept and waiter.passed_over_at is not None:
                    kept |= self._keep_pair(waiter, prefills, decodes, now)
                    has_room = self._has_any_room(prefills, decodes, kept)
                skipped.append(waiter)
                continue
            for older in skipped:
                if older.passed_over_at is None:
                    older.passed_over_at = now
            entry = self.ledger.get(waiter.request_id)
            assert entry is not None, "a waiter has an entry"
            key = RequestKey(waiter.request_id, entry.record.attempt)
            for worker in (pair.prefill, pair.decode):
                worker.book(key, entry.record.spec, waiter.num_delivered)
            chosen = events.PlacementChosen(attempt=key.attempt, prefill=pair.prefill.ref, decode=pair.decode.ref)
            self.advance(entry, chosen, now)
            has_room = self._has_any_room(prefills, decodes, kept)

    @staticmethod
    def _has_any_room(prefills: list[Worker], decodes: list[Worker], kept: set[WorkerId]) -> bool:
        """Whether the smallest request could be placed: the end of a pass over a long queue."""
        return any(worker.worker_id not in kept and worker.free_blocks > 0 for worker in decodes) and any(
            worker.worker_id not in kept
            and worker.free_blocks > 0
            and worker.remaining_tokens < placement.PREFILL_BUDGETS_AHEAD * worker.facts.token_budget
            for worker in prefills
        )

    @staticmethod
    def _keep_pair(waiter: Waiter, prefills: list[Worker], decodes: list[Worker], now: float) -> set[WorkerId]:
        if waiter.passed_over_at is None or now - waiter.passed_over_at < placement.OVERTAKING_S:
            return set()
        pair = placement.pair_to_keep(waiter, prefills, decodes)
        if pair is None:
            return set()
        waiter.held_pair = (pair.prefill.worker_id, pair.decode.worker_id)
        return {pair.prefill.worker_id, pair.decode.worker_id}


def _is_loss(event: events.Event) -> bool:
    """Of a worker: its retries are not counted (see `scheduler.retry_budget`)."""
    return isinstance(event, events.AttemptFailed) and event.error.code is ErrorCode.WORKER_LOST


def _prefill_job(entry: Entry, target: KvTarget) -> PrefillJob:
    record = entry.record
    return PrefillJob(
        spec=record.spec,
        target=target,
        num_delivered=len(record.delivered_ids),
        deadline=entry.deadline,
        distrusts_cache=record.distrusts_cache,
    )


def worker_lost(worker: Worker) -> ServingError:
    """What a request fails with when one of its workers is given up."""
    return ServingError(ErrorCode.WORKER_LOST, f"the {worker.facts.role.value} worker of the request was lost")
