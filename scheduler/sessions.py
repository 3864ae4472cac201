"""The workers' side of the core: hellos, inventories, heartbeats, numbered reports, and the loss of a worker. Pure."""

from dataclasses import replace
from typing import assert_never

from scheduler.adoption import Adoption
from scheduler.fleet import Orphan, Worker
from scheduler.lives import Lives, worker_lost
from scheduler.messages import (
    AbortJob,
    AckEvents,
    AttemptFailedTold,
    CloseSession,
    HeartbeatTold,
    InventoryEntry,
    InventoryTold,
    KvCommittedTold,
    Noted,
    PreemptedTold,
    PrefillDoneTold,
    PrefillJob,
    Refused,
    ReleasedTold,
    ReleaseJob,
    ReportTold,
    ReservedTold,
    ReserveJob,
    ReserveRefusedTold,
    Resign,
    SequenceDoneTold,
    SessionClosed,
    SessionId,
    SessionOpened,
    Wasted,
    WelcomeWorker,
)
from scheduler.waste import wasted
from shared.domain import lifecycle_events as events
from shared.domain.errors import ServingError
from shared.domain.ids import Epoch, RequestKey
from shared.domain.lifecycle import RequestRecord, Verdict
from shared.domain.refusals import RefusedKind
from shared.domain.request import Role, SequenceState
from shared.domain.worker import NO_WORK, LossLimits, Work, WorkerChange, WorkerState

# Whatever a worker holds ends by itself within 45 s (decisions §1), and its tombstones after 60 s.
LOST_FORGOTTEN_S = 60.0
# An ended sequence of an earlier scheduler holds no blocks, and its gateway may still be reading the last tokens.
ORPHAN_GRACE_S = 5.0


class WorkerSessions:
    """What workers say, and what silence means."""

    def __init__(self, lives: Lives, adoption: Adoption, epoch: Epoch, limits: LossLimits) -> None:
        self._lives = lives
        self._adoption = adoption
        self._fleet = lives.fleet
        self._ledger = lives.ledger
        self._epoch = epoch
        self._limits = limits

    def check(self, now: float) -> None:
        """Give up whoever is silent or stalled; forget whoever has been away for long."""
        for worker in self._fleet:
            reason = worker.lost_reason(now, self._limits)
            if reason is not None:
                self.lose(worker, reason, now)
                continue
            for key in [key for key, orphan in worker.orphans.items() if now >= orphan.ends_at]:
                del worker.orphans[key]
                self._ask_back(worker, key)
            if worker.lost_at is not None and now - worker.lost_at >= LOST_FORGOTTEN_S:
                self.forget(worker, "away too long", now)

    def opened(self, event: SessionOpened, now: float) -> None:
        if event.epoch_seen > self._epoch:
            self._lives.emit(Resign(epoch_seen=event.epoch_seen, reason="a worker has seen a higher epoch"))
            return
        worker = self._fleet.by_id(event.facts.ref.worker_id)
        if worker is not None:
            self._close_session(worker, "a newer session")
            if worker.ref != event.facts.ref:
                self.forget(worker, "another incarnation said hello", now)
                worker = None
        if worker is None:
            worker = Worker(facts=event.facts, heard_at=now)
            self._fleet.add(worker)
        worker.open_session(event.session, event.facts, now)
        self._fleet.attach(worker, event.session)
        if event.facts.is_draining:
            worker.change(WorkerChange.STARTED_DRAINING)
        self._lives.emit(WelcomeWorker(session=event.session))
        self._lives.emit(Noted(what="worker connected", worker_id=worker.worker_id))
        self._note_unlike(worker)

    def inventory(self, event: InventoryTold, now: float) -> None:
        worker = self._heard(event.session, now)
        if worker is None:
            return
        told = {each.key for each in event.entries}
        worker.orphans.clear()
        for each in sorted(event.entries, key=lambda each: str(each.key)):
            if not self._adoption.inherit(worker, each, now):
                self._look_at(worker, each, now)
        worker.has_told_inventory = True  # what followed from it so far is sent now, once
        for key, body in worker.pending.items():
            if isinstance(body, AbortJob | ReleaseJob):
                worker.owed.add(key)
        for command in worker.commands_again():
            self._lives.emit(command)
        self._adoption.check(now)
        if worker.facts.role is Role.DECODE:
            for key in [key for key in worker.commanded() if key not in told]:
                # Its Reserve was answered and it holds it no more: the attempt is over, whatever ended it.
                self._attempt_failed(worker, key, worker_lost(worker), now)
        self._settle_worker(worker, now)

    def _look_at(self, worker: Worker, told: InventoryEntry, now: float) -> None:
        """What nobody here knows waits for its gateway; what is known and not held here any more is asked back."""
        key, is_known = told.key, self._ledger.get(told.key.request_id) is not None
        if told.state is SequenceState.DONE and not is_known:
            worker.orphans[key] = Orphan(entry=told, ends_at=now + ORPHAN_GRACE_S)
        elif told.is_held and not is_known and self._adoption.is_open(now):
            worker.orphans[key] = Orphan(entry=told, ends_at=self._adoption.ends_at)
        elif told.is_held and not self._is_held(worker, key):
            worker.owed.add(key)
            worker.pending[key] = AbortJob()

    def _note_unlike(self, worker: Worker) -> None:
        """A pair with unlike KV layouts or numerics is never used: told here, once, and not by failing requests."""
        other_role = Role.DECODE if worker.facts.role is Role.PREFILL else Role.PREFILL
        for other in self._fleet.of_role(other_role):
            if other.is_expected and other.facts.layout != worker.facts.layout:
                self._lives.emit(Refused(kind=RefusedKind.UNLIKE_LAYOUT))
                reason = f"never paired with {other.worker_id}"
                self._lives.emit(Noted(what="unlike KV layout", worker_id=worker.worker_id, reason=reason))

    def _ask_back(self, worker: Worker, key: RequestKey) -> None:
        worker.owed.add(key)
        command = worker.command(key, AbortJob())
        if command is not None:
            self._lives.emit(command)

    def _is_held(self, worker: Worker, key: RequestKey) -> bool:
        entry = self._ledger.get(key.request_id)
        if entry is None:
            return False
        holds = (*entry.record.holds, *entry.record.unreleased)
        return any(hold.worker == worker.ref and hold.attempt == key.attempt for hold in holds)

    def _settle_worker(self, worker: Worker, now: float) -> None:
        """New work only after the inventory was told and everything owed is released."""
        if worker.state is WorkerState.STARTING and worker.has_told_inventory and not worker.owed:
            worker.change(WorkerChange.SETTLED)
            self._lives.emit(Noted(what="worker ready", worker_id=worker.worker_id))
            self._lives.place(now)

    def heartbeat(self, event: HeartbeatTold, now: float) -> None:
        worker = self._heard(event.session, now)
        if worker is None:
            return
        worker.capacity = event.capacity
        worker.capacity_at = now
        if event.capacity.is_draining:
            worker.change(WorkerChange.STARTED_DRAINING)
        self._lives.place(now)

    def report(self, event: ReportTold, now: float) -> None:
        worker = self._heard(event.session, now)
        if worker is None:
            return
        if worker.take_event(event.number):
            self._take_report(worker, event, now)
        else:
            self._lives.emit(Refused(kind=RefusedKind.DUPLICATE_EVENT))
            worker.acked = min(worker.acked, event.number - 1)  # the acknowledgement was lost: say it again
        self.ack(worker)

    def _take_report(self, worker: Worker, event: ReportTold, now: float) -> None:
        key, report, attempt = event.key, event.report, event.key.attempt
        entry = self._ledger.get(key.request_id)
        self._adoption.hear(worker, key, now)
        match report:
            case ReservedTold():
                worker.answered(key, ReserveJob)
                self._lives.feed(
                    entry,
                    events.Reserved(attempt=attempt, target=report.target, attach_ticket=report.attach_ticket),
                    now,
                )
            case ReserveRefusedTold():
                worker.answered(key, ReserveJob)
                worker.jobs.pop(key, None)
                self._lives.remember_refusal(key.request_id, worker, report.free_blocks, now)
                if entry is None or not entry.record.is_adopted:  # of an adopted one the inventory says the same
                    self._lives.feed(entry, events.ReserveRefused(attempt=attempt), now)
            case PrefillDoneTold():
                worker.answered(key, PrefillJob)
                if key in worker.jobs:
                    worker.jobs[key].tokens_left = 0
                    worker.jobs[key].computed_tokens = report.computed_tokens
                self._lives.feed(entry, events.PrefillDone(attempt=attempt), now)
            case KvCommittedTold():
                self._lives.feed(entry, events.KvCommitted(attempt=attempt), now)
            case SequenceDoneTold():
                done = events.SequenceDone(
                    attempt=attempt,
                    finish_reason=report.finish_reason,
                    completion_tokens=report.completion_tokens,
                )
                if self._lives.feed(entry, done, now) is Verdict.TAKEN and entry is not None:
                    entry.done_event = (worker.ref, event.number)
                    worker.events_in_write.add(event.number)
            case PreemptedTold():
                worker.answered(key, ReserveJob)
                self._lives.feed(entry, events.Preempted(attempt=attempt), now)
            case AttemptFailedTold():
                worker.answered(key, ReserveJob, PrefillJob)
                self._attempt_failed(worker, key, report.error, now)
            case ReleasedTold():
                self._released(worker, key, report, now)
            case _:
                assert_never(report)
        self._lives.place(now)

    def _released(self, worker: Worker, key: RequestKey, report: ReleasedTold, now: float) -> None:
        entry = self._ledger.get(key.request_id)
        is_orphan = entry is None and key in worker.owed
        if is_orphan or self._is_held(worker, key):  # not said before
            self._count_waste(None if entry is None else entry.record, worker, key, report.work)
        worker.released(key)
        released = events.Released(worker=worker.ref, released_attempt=key.attempt, blocks_freed=report.blocks_freed)
        if not is_orphan:
            self._lives.feed(entry, released, now)
        self._settle_worker(worker, now)

    def _count_waste(self, record: RequestRecord | None, worker: Worker, key: RequestKey, work: Work) -> None:
        """The attempt is over on this worker, which says what it did for it; or cannot, and its reports must do."""
        job = worker.jobs.get(key)
        if job is not None and job.computed_tokens > work.computed_tokens:  # the worker has forgotten it
            work = replace(work, computed_tokens=job.computed_tokens)
        for waste in wasted(record, key.attempt, worker.facts.role, work):
            self._lives.emit(Wasted(waste=waste))

    def _attempt_failed(self, worker: Worker, key: RequestKey, error: ServingError, now: float) -> None:
        entry = self._ledger.get(key.request_id)
        failed = events.AttemptFailed(attempt=key.attempt, role=worker.facts.role, error=error)
        if entry is not None and entry.record.attempt == key.attempt:
            self._lives.remember_failure(key.request_id, worker.ref)
        self._lives.feed(entry, failed, now)

    def ack(self, worker: Worker) -> None:
        upto = worker.ack_due()
        if upto is not None and worker.session is not None:
            self._lives.emit(AckEvents(session=worker.session, upto=upto))

    def closed(self, event: SessionClosed, now: float) -> None:
        worker = self._fleet.by_session(event.session)
        if worker is None:
            return
        self._fleet.detach(worker)
        worker.session_broken_at = now
        if worker.state is WorkerState.DRAINING and worker.has_let_go:
            worker.change(WorkerChange.LEFT)
            self.forget(worker, "drained", now)

    def _heard(self, session: SessionId, now: float) -> Worker | None:
        """The worker of a session that counts, now heard of. None for an older session, whose input is dropped."""
        worker = self._fleet.by_session(session)
        if worker is None:
            self._lives.emit(Refused(kind=RefusedKind.OLD_SESSION))
            return None
        worker.heard_at = now
        return worker

    def _close_session(self, worker: Worker, reason: str) -> None:
        session = self._fleet.detach(worker)
        if session is not None:
            self._lives.emit(CloseSession(session=session, reason=reason))

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """Give a worker up. It may come back: what it still holds is then asked back before it gets new work."""
        worker.change(WorkerChange.LOST)
        worker.lost_at = now
        self._close_session(worker, reason)
        self._lives.emit(Noted(what="worker lost", worker_id=worker.worker_id, reason=reason))
        for entry in self._ledger:
            self._lives.lose_holder(entry, worker, events.WorkerLost(worker=worker.ref), now)

    def forget(self, worker: Worker, reason: str, now: float) -> None:
        """A worker start is over, and with it all that it held."""
        self._lives.emit(Noted(what="worker gone", worker_id=worker.worker_id, reason=reason))
        self._fleet.remove(worker)
        for entry in self._ledger:
            holds = (*entry.record.holds, *entry.record.unreleased)
            self._lives.lose_holder(entry, worker, events.WorkerGone(worker=worker.ref), now)
            for hold in holds:
                if hold.worker == worker.ref:  # by what has become of the request
                    self._count_waste(entry.record, worker, RequestKey(entry.request_id, hold.attempt), NO_WORK)
