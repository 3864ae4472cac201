"""The fleet: every worker as it last spoke, what it was commanded since, and what it has not answered.

Pure bookkeeping. What a lost worker means for requests is decided in `scheduler.core`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.messages import (
    AbortJob,
    CommandBody,
    InventoryEntry,
    PrefillJob,
    ReleaseJob,
    ReserveJob,
    SendCommand,
    SessionId,
)
from shared.domain.ids import RequestKey, WorkerId
from shared.domain.request import RequestSpec, Role
from shared.domain.worker import (
    Capacity,
    LossLimits,
    WorkerChange,
    WorkerFacts,
    WorkerRef,
    WorkerSigns,
    WorkerState,
    advance_worker,
    lost_reason,
    num_tokens_at_start,
)


@dataclass(slots=True, kw_only=True)
class Job:
    """What one attempt takes of a worker, from its placement until the worker says Released."""

    num_blocks: int
    tokens_left: int
    """Prompt tokens that prefill has not reported as computed."""
    computed_tokens: int = 0
    """Prompt tokens that it has reported."""
    sent_number: int | None = None
    """Number of its command in this session; None while the command waits for a write or a reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """What a worker has of an attempt that nobody here knows, and when it is asked back."""

    entry: InventoryEntry
    ends_at: float


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One worker start. Mutable; owned by the Fleet."""

    facts: WorkerFacts
    heard_at: float
    state: WorkerState = WorkerState.STARTING
    session: SessionId | None = None
    session_broken_at: float | None = None
    lost_at: float | None = None
    has_told_inventory: bool = False
    capacity: Capacity | None = None
    capacity_at: float = 0.0
    jobs: dict[RequestKey, Job] = field(default_factory=dict[RequestKey, Job])
    pending: dict[RequestKey, CommandBody] = field(default_factory=dict[RequestKey, CommandBody])
    """The last command of each attempt, while unanswered: sent again in every new session."""
    owed: set[RequestKey] = field(default_factory=set[RequestKey])
    """Attempts that it must release before it gets new work."""
    orphans: dict[RequestKey, Orphan] = field(default_factory=dict[RequestKey, Orphan])
    """Attempts of an earlier scheduler whose gateways may come back."""
    last_event: int = 0
    events_in_write: set[int] = field(default_factory=set[int])
    """Taken, but not to be acknowledged before a write came to its end."""
    acked: int = 0
    _last_number: int = 0

    @property
    def ref(self) -> WorkerRef:
        return self.facts.ref

    @property
    def worker_id(self) -> WorkerId:
        return self.facts.ref.worker_id

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY and self.session is not None

    @property
    def is_expected(self) -> bool:
        """Ready, or about to be: a session that broke a moment ago is no reason to refuse requests."""
        return self.state in (WorkerState.READY, WorkerState.STARTING)

    def change(self, change: WorkerChange) -> None:
        self.state = advance_worker(self.state, change)

    # ---- capacity

    @property
    def free_blocks(self) -> int:
        """As told, cached ones too, less what was commanded later; before the first heartbeat what our books leave."""
        told = self.facts.num_blocks if self.capacity is None else self.capacity.available_blocks
        return max(0, told - sum(job.num_blocks for job in self._jobs_unseen()))

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens not computed: as told plus what was commanded later, at most what our own books say."""
        by_books = sum(job.tokens_left for job in self.jobs.values())
        if self.capacity is None:
            return by_books
        unseen = sum(job.tokens_left for job in self._jobs_unseen())
        return min(by_books, self.capacity.queued_prompt_tokens + unseen)

    @property
    def has_place(self) -> bool:
        """Room for one more sequence."""
        num_sequences = len(self.jobs)
        if self.capacity is not None:
            num_sequences = min(num_sequences, self.capacity.num_under_way + len(self._jobs_unseen()))
        return num_sequences < self.facts.max_sequences

    @property
    def has_let_go(self) -> bool:
        """It holds nothing that is under way, by our books or by its own word."""
        if not self.jobs:
            return True
        told = self.capacity
        return told is not None and told.queued_prompt_tokens == 0 and told.num_under_way == 0

    def book(self, key: RequestKey, spec: RequestSpec, num_delivered: int) -> None:
        """Count an attempt before its command is sent."""
        self.jobs[key] = _job(self.facts, spec, num_delivered)

    def inherit(self, key: RequestKey, spec: RequestSpec) -> None:
        """Count an attempt that an earlier scheduler commanded; again where more is known of it."""
        self.book(key, spec, 0)
        self.jobs[key].sent_number = 0

    def unbook(self, key: RequestKey) -> None:
        """Forget an attempt whose command was never sent."""
        job = self.jobs.get(key)
        if job is not None and job.sent_number is None and key not in self.pending:
            del self.jobs[key]

    def _jobs_unseen(self) -> list[Job]:
        if self.capacity is None:
            return list(self.jobs.values())
        seen = self.capacity.commands_seen
        return [job for job in self.jobs.values() if job.sent_number is None or job.sent_number > seen]

    # ---- commands

    def command(self, key: RequestKey, body: CommandBody) -> SendCommand | None:
        """Remember until answered; the command to send now, or None until the session is ready for it."""
        self.pending[key] = body
        if isinstance(body, ReserveJob) and key not in self.jobs:
            self.book(key, body.spec, len(body.delivered_ids))
        elif isinstance(body, PrefillJob) and key not in self.jobs:
            self.book(key, body.spec, body.num_delivered)
        return self._number(key, body)

    def commands_again(self) -> list[SendCommand]:
        """Every unanswered command, in order, for a new session."""
        again = [self._number(key, body) for key, body in self.pending.items()]
        return [command for command in again if command is not None]

    def commanded(self) -> list[RequestKey]:
        """Attempts whose commands were sent and are all answered; one that is only booked is not among them."""
        return [key for key, job in self.jobs.items() if job.sent_number is not None and key not in self.pending]

    def answered(self, key: RequestKey, *kinds: type[CommandBody]) -> None:
        """Forget the pending command of an attempt if it is one of `kinds`."""
        if isinstance(self.pending.get(key), kinds):
            del self.pending[key]

    def released(self, key: RequestKey) -> None:
        """The worker let go of an attempt."""
        self.answered(key, ReserveJob, PrefillJob, AbortJob, ReleaseJob)
        self.jobs.pop(key, None)
        self.owed.discard(key)

    def _number(self, key: RequestKey, body: CommandBody) -> SendCommand | None:
        if self.session is None or not self.has_told_inventory:
            return None
        self._last_number += 1
        job = self.jobs.get(key)
        if job is not None and isinstance(body, ReserveJob | PrefillJob):
            job.sent_number = self._last_number
        return SendCommand(session=self.session, worker_id=self.worker_id, number=self._last_number, key=key, body=body)

    # ---- session and events

    def open_session(self, session: SessionId, facts: WorkerFacts, now: float) -> None:
        """A hello of this incarnation. Commands wait for the inventory."""
        self.facts = facts
        self.session = session
        self.session_broken_at = None
        self.lost_at = None
        self.heard_at = now
        self.has_told_inventory = False
        self.capacity = None
        self._last_number = 0
        for job in self.jobs.values():
            # Whatever was commanded in an earlier session is in the first heartbeat or comes again.
            job.sent_number = 0 if job.sent_number is not None else None
        self.change(WorkerChange.SAID_HELLO)

    def take_event(self, number: int) -> bool:
        """Whether the event is new. Numbers grow by one per incarnation; the first one may be any."""
        if number <= self.last_event:
            return False
        self.last_event = number
        return True

    def ack_due(self) -> int | None:
        """The number up to which all events are taken and written, if it has grown since it was last asked."""
        upto = min(self.events_in_write) - 1 if self.events_in_write else self.last_event
        if upto <= self.acked:
            return None
        self.acked = upto
        return upto

    def signs(self) -> WorkerSigns:
        return WorkerSigns(
            heard_at=self.heard_at,
            session_broken_at=self.session_broken_at,
            last_step_age_s=0.0 if self.capacity is None else self.capacity.last_step_age_s,
            is_busy=self.capacity is not None and self.capacity.is_busy,
        )

    def lost_reason(self, now: float, limits: LossLimits) -> str | None:
        if self.state in (WorkerState.LOST, WorkerState.STOPPED):
            return None
        return lost_reason(self.signs(), now, limits)


def _job(facts: WorkerFacts, spec: RequestSpec, num_delivered: int) -> Job:
    if facts.role is Role.PREFILL:
        return Job(num_blocks=facts.num_blocks_for(spec.num_prompt_tokens), tokens_left=spec.num_prompt_tokens)
    tokens = num_tokens_at_start(spec.num_prompt_tokens, num_delivered)
    return Job(num_blocks=facts.num_blocks_at_start(tokens, spec.max_total_tokens), tokens_left=0)


class Fleet:
    """All workers by name. A name has one start at a time: another incarnation under it proves the end of the older."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self._by_session: dict[SessionId, Worker] = {}

    def add(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker

    def remove(self, worker: Worker) -> None:
        """Forget a start that is over."""
        self.detach(worker)
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]

    def attach(self, worker: Worker, session: SessionId) -> None:
        self._by_session[session] = worker

    def detach(self, worker: Worker) -> SessionId | None:
        """Input of its session is dropped from now on. The session, if there was one."""
        session, worker.session = worker.session, None
        if session is not None:
            self._by_session.pop(session, None)
        return session

    def by_session(self, session: SessionId) -> Worker | None:
        return self._by_session.get(session)

    def by_id(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def by_ref(self, ref: WorkerRef) -> Worker | None:
        """The worker, if it is still this start."""
        worker = self._workers.get(ref.worker_id)
        return worker if worker is not None and worker.ref == ref else None

    def of_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.facts.role is role]

    def __iter__(self) -> Iterator[Worker]:
        """Over a copy: taking out while iterating is fine."""
        return iter(tuple(self._workers.values()))
