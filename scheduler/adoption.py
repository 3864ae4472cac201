"""Taking over the requests of an earlier scheduler: records, the workers' inventories and the gateways decide. Pure.

What the store knows of a request comes with `begin`; its spec only with its gateway, which dials by itself. Until then
it waits in the ledger like one whose gateway's stream has just broken, and the same grace ends it. A request past
QUEUED goes on where a worker's inventory shows it; where none does, once its workers have spoken or the time is up, its
attempt has failed. A queued one keeps its place, and for a moment those behind it wait for its gateway, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.fleet import Worker
from scheduler.ledger import Entry
from scheduler.lives import Lives
from scheduler.messages import InventoryEntry, Noted, PersistRecord, StartReceived
from scheduler.waiting import Waiter
from shared.domain import lifecycle_events as events
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.lifecycle import PLACED_STATES, Verdict
from shared.domain.lifecycle_events import WriteStep
from shared.domain.request import CancelReason, RequestSpec, RequestState, Role, SequenceState, StoredRequest
from shared.domain.sampling import SamplingParams
from shared.domain.worker import KvTarget

# Workers and gateways dial again within a second; after five a worker counts as lost anyway (decisions §3).
WORKERS_WAIT_S = 5.0
# So long the queue keeps still for those in front whose gateways have not dialled yet: each does so within a second.
ORDER_WAIT_S = 2.0


@dataclass(slots=True, kw_only=True)
class _Adoptee:
    """One request that is not settled yet: its workers or its gateway have not spoken."""

    entry: Entry
    attempt: Attempt
    """The one that the names are about."""
    prefill: WorkerId | None
    decode: WorkerId | None
    has_prefill: bool = False
    """The inventory of a prefill worker names the present attempt, running or sent."""
    has_gateway: bool = False
    is_placed: bool = False
    """Where the present attempt runs is known, and told to the gateway if it is there."""


class Adoption:
    """Owner of what is not settled."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._adoptees: dict[RequestId, _Adoptee] = {}
        self._began_at: float | None = None
        self._front = 0
        """The lowest order that was given: whoever is found later was under way, and goes before all of the queue."""

    def begin(self, records: Iterable[StoredRequest], now: float) -> None:
        """Once, before anyone else speaks. Oldest first."""
        self._began_at = now
        found = tuple(records)
        self._front = -len(found)
        for order, stored in enumerate(found, start=self._front):
            spec = RequestSpec(  # stands for what only the gateway knows
                request_id=stored.request_id,
                prompt_ids=(TokenId(0),),
                max_tokens=1,
                sampling=SamplingParams(seed=stored.seed),
            )
            adopted = events.Adopted(
                spec=spec,
                gateway_incarnation=stored.gateway_incarnation,
                unix_ms=stored.admitted_unix_ms,
                attempt=stored.attempt,
                was_placed=stored.state is not RequestState.QUEUED,
            )
            adoptee = self._add(adopted, order, stored, now)
            if stored.state is RequestState.ABORTING:  # its client has been told
                self._lives.advance(adoptee.entry, events.CancelRequested(reason=CancelReason.GATEWAY_LOST), now)
        self._lives.emit(Noted(what="requests adopted", reason=f"{len(found)} of an earlier scheduler"))

    def is_open(self, now: float) -> bool:
        """Whether what nobody knows may still be an earlier scheduler's."""
        return self._began_at is not None and now - self._began_at < WORKERS_WAIT_S

    @property
    def ends_at(self) -> float:
        """What a worker holds and no gateway has asked for by then is asked back."""
        return (self._began_at or 0.0) + WORKERS_WAIT_S

    def excuse(self, pause_s: float) -> None:
        """For so long this process did not run."""
        if self._began_at is not None:
            self._began_at += pause_s

    # ---- gateways

    def take_start(self, start: StartReceived, now: float) -> None:
        """Adopts a request that the store did not know, but its gateway or a worker does."""
        request_id = start.spec.request_id
        if self._lives.ledger.get(request_id) is not None:
            return
        orphans = [
            (worker, worker.orphans[key].entry)
            for worker in self._lives.fleet
            for key in worker.orphans
            if key.request_id == request_id
        ]
        if not self.is_open(now) or not (start.last_attempt_seen or orphans):
            return
        adopted = events.Adopted(
            spec=start.spec,
            gateway_incarnation=start.gateway_incarnation,
            unix_ms=start.unix_ms,
            attempt=Attempt(max(1, start.last_attempt_seen)),
            was_placed=True,
        )
        self._front -= 1
        entry = self._add(adopted, self._front, None, now).entry
        entry.deadline, entry.key_hash = start.deadline, start.key_hash
        self.gateway_back(entry, start, now)
        self._lives.emit(PersistRecord(stored=self._lives.ledger.stored(entry), step=WriteStep.ADMITTED))
        for worker, told in orphans:
            worker.orphans.pop(told.key, None)
            self.inherit(worker, told, now)
        self.check(now)

    def gateway_back(self, entry: Entry, start: StartReceived, now: float) -> None:
        """Its gateway dialled: now it is known what was asked. Nothing happens for any but an adopted request."""
        adoptee = self._adoptees.get(entry.request_id)
        if adoptee is None or adoptee.has_gateway:
            return
        adoptee.has_gateway = True
        back = events.GatewayBack(
            spec=start.spec, gateway_incarnation=start.gateway_incarnation, last_attempt_seen=start.last_attempt_seen
        )
        before = entry.record.attempt
        self._lives.advance(entry, back, now)
        if entry.record.attempt != before:
            adoptee.has_prefill = adoptee.is_placed = False
        self._lives.spec_known(entry)
        record = entry.record
        if record.state in PLACED_STATES and start.last_attempt_closed >= record.attempt:
            self._fail(adoptee, Role.DECODE, "its gateway was told that the attempt has ended", now)

    def tells_later(self, entry: Entry) -> bool:
        """Where the present attempt runs is not known yet: its gateway is told when it is."""
        adoptee = self._adoptees.get(entry.request_id)
        return adoptee is not None and self._is_open_question(adoptee)

    # ---- workers

    def inherit(self, worker: Worker, told: InventoryEntry, now: float) -> bool:
        """One entry of an inventory; False where it is not about the present attempt of an adopted request."""
        adoptee = self._adoptees.get(told.key.request_id) or self._admitted_anew(told, now)
        if adoptee is None:
            return False
        entry, role = adoptee.entry, worker.facts.role
        is_held = told.is_held and told.state is not SequenceState.PREEMPTED
        before = entry.record.attempt
        inherited = events.Inherited(
            attempt=told.key.attempt,
            worker=worker.ref,
            role=role,
            is_held=is_held,
            is_running=role is Role.DECODE and told.state is not SequenceState.WAITING_KV,
            target=_target(worker),
            attach_ticket=told.attach_ticket,
        )
        if self._lives.advance(entry, inherited, now) is not Verdict.TAKEN:
            return False
        if entry.record.attempt != before:
            adoptee.has_prefill = adoptee.is_placed = False
        if role is Role.PREFILL:
            adoptee.has_prefill = True
        elif not is_held:
            adoptee.attempt, adoptee.decode = entry.record.attempt, worker.worker_id  # and it has it no more
        if is_held:
            worker.inherit(told.key, entry.record.spec)
        if told.finish_reason is not None:
            done = events.SequenceDone(
                attempt=told.key.attempt, finish_reason=told.finish_reason, completion_tokens=told.last_index
            )
            self._lives.advance(entry, done, now)
        return True

    def hear(self, worker: Worker, key: RequestKey, now: float) -> None:
        """A report comes before its worker's inventory, and proves that what the store calls queued was placed."""
        adoptee = self._adoptees.get(key.request_id)
        if adoptee is None:
            return
        record = adoptee.entry.record
        if record.state is RequestState.QUEUED and key.attempt >= record.attempt:
            was_there = events.Inherited(attempt=key.attempt, worker=worker.ref, role=worker.facts.role, is_held=False)
            self._lives.advance(adoptee.entry, was_there, now)
            adoptee.has_prefill = adoptee.is_placed = False

    def check(self, now: float) -> None:
        """After each inventory and with time: what is known by now is settled."""
        for request_id, adoptee in tuple(self._adoptees.items()):
            if self._is_open_question(adoptee):
                role = self._missing(adoptee, now)
                if role is not None:
                    self._fail(adoptee, role, f"no {role.value} worker holds the attempt any more", now)
            if not self._is_open_question(adoptee) and not adoptee.is_placed:
                adoptee.is_placed = True
                if adoptee.has_gateway and adoptee.entry.record.state in PLACED_STATES:
                    self._lives.tell_placed(adoptee.entry)
            is_over = adoptee.entry.record.outcome is not None
            if is_over or (adoptee.has_gateway and adoptee.is_placed and not self.is_open(now)):
                del self._adoptees[request_id]

    # ---- inside

    def _admitted_anew(self, told: InventoryEntry, now: float) -> _Adoptee | None:
        """A store that forgot, a gateway that had not been told of the attempt: admitted as new, and yet it is not."""
        entry = self._lives.ledger.get(told.key.request_id)
        if entry is None or not self.is_open(now):
            return None
        if entry.record.state is not RequestState.QUEUED or told.key.attempt < entry.record.attempt:
            return None
        adoptee = _Adoptee(entry=entry, attempt=entry.record.attempt, prefill=None, decode=None, has_gateway=True)
        self._adoptees[entry.request_id] = adoptee
        entry.is_written = True
        self._lives.spec_known(entry)
        return adoptee

    def _add(self, adopted: events.Adopted, order: int, stored: StoredRequest | None, now: float) -> _Adoptee:
        waiter = Waiter(
            request_id=adopted.spec.request_id,
            num_prompt_tokens=adopted.spec.num_prompt_tokens,
            max_total_tokens=adopted.spec.max_total_tokens,
            order=order,
            awaited_until=now + ORDER_WAIT_S,
        )
        entry = self._lives.adopt(adopted, waiter, now)
        if stored is not None:
            entry.session, entry.key_hash = stored.session, stored.key_hash
        adoptee = _Adoptee(
            entry=entry,
            attempt=adopted.attempt,
            prefill=None if stored is None else stored.prefill_worker,
            decode=None if stored is None else stored.decode_worker,
        )
        self._adoptees[entry.request_id] = adoptee
        return adoptee

    def _is_open_question(self, adoptee: _Adoptee) -> bool:
        record = adoptee.entry.record
        if record.state not in PLACED_STATES or not record.is_adopted:
            return False
        return record.decode is None or (record.state is not RequestState.DECODING and not adoptee.has_prefill)

    def _missing(self, adoptee: _Adoptee, now: float) -> Role | None:
        """Whose worker has spoken without naming the attempt, or has not spoken in time."""
        record = adoptee.entry.record
        is_named = record.attempt == adoptee.attempt
        role, name = (Role.DECODE, adoptee.decode) if record.decode is None else (Role.PREFILL, adoptee.prefill)
        worker = None if name is None or not is_named else self._lives.fleet.by_id(name)
        has_spoken = worker is not None and worker.has_told_inventory
        return role if has_spoken or not self.is_open(now) else None

    def _fail(self, adoptee: _Adoptee, role: Role, why: str, now: float) -> None:
        error = ServingError(ErrorCode.WORKER_LOST, why)
        attempt = adoptee.entry.record.attempt
        self._lives.advance(adoptee.entry, events.AttemptFailed(attempt=attempt, role=role, error=error), now)


def _target(worker: Worker) -> KvTarget | None:
    """Where the gateway finds the tokens; prefill has the transfer's number already."""
    if worker.facts.role is Role.PREFILL:
        return None
    return KvTarget(
        worker_id=worker.worker_id,
        address=worker.facts.address,
        incarnation=worker.ref.incarnation,
        transfer_id=TransferId(0),
        transports=(),
    )
