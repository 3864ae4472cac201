"""The core against simulated workers, gateways and a store that do everything in any order."""

from collections import deque
from typing import assert_never

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import (
    AbortJob,
    AckEvents,
    AttemptFailedTold,
    CancelAsked,
    CloseSession,
    CloseStream,
    CommandBody,
    CoreEffect,
    CoreEvent,
    HeartbeatTold,
    InventoryTold,
    KvCommittedTold,
    Noted,
    OutcomeTold,
    PersistRecord,
    PrefillDoneTold,
    PrefillJob,
    QueuedTold,
    Refused,
    ReleasedTold,
    ReleaseJob,
    ReportTold,
    RequestEnded,
    RequestReleased,
    ReservedTold,
    ReserveJob,
    ReserveRefusedTold,
    Resign,
    RewriteRecords,
    SendCommand,
    SequenceDoneTold,
    SessionId,
    SessionOpened,
    StartReceived,
    StreamId,
    Tell,
    Ticked,
    WelcomeWorker,
    WorkerReport,
    Written,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.request import CancelReason, FinishReason, RequestSpec, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import Capacity, KvTarget, LossLimits, WorkerFacts, WorkerRef

LIMITS = CoreLimits(
    max_queued_requests=5, max_queued_prompt_tokens=400, loss=LossLimits(), gateway_grace_s=5.0, max_ends_kept=100
)


class SimWorker:
    """Takes commands in order, holds blocks, reports what a worker would."""

    def __init__(self, role: Role, name: str, session: int, num_blocks: int) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(session))
        self.role = role
        self.session = SessionId(session)
        self.num_blocks = num_blocks
        self.inbox: deque[SendCommand] = deque()
        self.held: dict[RequestKey, int] = {}
        self.seen = 0
        self.number = 0

    @property
    def free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            role=self.role,
            ref=self.ref,
            address="a",
            admin_url="",
            pid=1,
            layout=b"l",
            block_size=16,
            num_blocks=self.num_blocks,
            max_sequences=4,
            token_budget=32,
        )

    def heartbeat(self) -> CoreEvent:
        capacity = Capacity(
            commands_seen=self.seen,
            blocks={"free": self.free},
            sequences={"running": len(self.held)},
            queued_prompt_tokens=0,
        )
        return HeartbeatTold(session=self.session, capacity=capacity)

    def report(self, key: RequestKey, report: WorkerReport) -> CoreEvent:
        self.number += 1
        return ReportTold(session=self.session, number=self.number, key=key, report=report)

    def take(self) -> CoreEvent | None:
        """Applies the next command; its answer."""
        command = self.inbox.popleft()
        self.seen = command.number
        key, body = command.key, command.body
        match body:
            case ReserveJob():
                needed = -(-body.spec.max_total_tokens // 16)
                if needed > self.free:
                    return self.report(key, ReserveRefusedTold(free_blocks=self.free))
                self.held[key] = needed
                return self.report(key, ReservedTold(target=target(self), attach_ticket=b"t"))
            case PrefillJob():
                self.held[key] = -(-body.spec.num_prompt_tokens // 16)
                return None
            case AbortJob() | ReleaseJob():
                return self.report(key, ReleasedTold(blocks_freed=self.held.pop(key, 0)))
            case _:
                assert_never(body)


def target(worker: SimWorker) -> KvTarget:
    """Of a decode worker."""
    return KvTarget(
        worker_id=worker.ref.worker_id,
        address="a",
        incarnation=worker.ref.incarnation,
        transfer_id=TransferId(1),
        transports=(),
    )


class World:
    """The core and everyone around it; time stands still unless told."""

    def __init__(self) -> None:
        self.core = SchedulerCore(LIMITS, Epoch(1))
        self.now = 0.0
        self.workers = [
            SimWorker(Role.PREFILL, "p0", 1, 8),
            SimWorker(Role.DECODE, "d0", 2, 8),
            SimWorker(Role.DECODE, "d1", 3, 4),
        ]
        self.writes: deque[PersistRecord] = deque()
        self.outcomes: dict[StreamId, int] = {}
        self.ended: list[RequestId] = []
        self.released: list[RequestId] = []
        self.num_started = 0
        for worker in self.workers:
            self.step(SessionOpened(session=worker.session, facts=worker.facts(), epoch_seen=Epoch(0)))
            self.step(InventoryTold(session=worker.session, entries=()))

    def step(self, event: CoreEvent) -> None:
        for effect in self.core.step(event, self.now):
            self.perform(effect)
        self.core.waiting.check()

    def perform(self, effect: CoreEffect) -> None:
        match effect:
            case Tell():
                assert effect.stream not in self.outcomes, "nothing after an outcome"
                if isinstance(effect.message, OutcomeTold):
                    self.outcomes[effect.stream] = 1
                elif isinstance(effect.message, QueuedTold):
                    assert 0 <= effect.message.position < LIMITS.max_queued_requests
            case SendCommand():
                worker = next(each for each in self.workers if each.session == effect.session)
                check_body(worker, effect.body)
                worker.inbox.append(effect)
            case PersistRecord():
                self.writes.append(effect)
            case RequestEnded():
                self.ended.append(effect.record.request_id)
            case RequestReleased():
                self.released.append(effect.request_id)
            case Refused():
                assert effect.kind not in ("illegal_event", "old_session"), effect.kind
            case WelcomeWorker() | AckEvents() | Noted():
                pass
            case CloseStream() | CloseSession() | RewriteRecords() | Resign():
                raise AssertionError(effect)
            case _:
                assert_never(effect)

    def start(self, prompt: int, max_tokens: int) -> None:
        self.num_started += 1
        spec = RequestSpec(
            request_id=RequestId(f"r{self.num_started}"),
            prompt_ids=tuple(TokenId(n) for n in range(prompt)),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=1),
        )
        self.step(
            StartReceived(
                stream=StreamId(self.num_started),
                spec=spec,
                gateway_incarnation=Incarnation(1),
                last_attempt_seen=Attempt(0),
                epoch_seen=Epoch(0),
                unix_ms=1,
            )
        )

    def write(self) -> None:
        if self.writes:
            effect = self.writes.popleft()
            stored = effect.stored
            self.step(Written(request_id=stored.request_id, attempt=stored.attempt, step=effect.step))

    def take(self, index: int) -> None:
        worker = self.workers[index % len(self.workers)]
        if worker.inbox:
            answer = worker.take()
            if answer is not None:
                self.step(answer)

    def progress(self, index: int, what: int) -> None:
        """A worker says something true about one of its attempts."""
        worker = self.workers[index % len(self.workers)]
        for key in list(worker.held)[:1]:
            entry = self.core.ledger.get(key.request_id)
            if entry is None or not entry.record.holds:
                return
            if worker.role is Role.PREFILL:
                self.step(worker.report(key, PrefillDoneTold()))
            elif len(entry.record.holds) < 2:
                return  # no KV before Prefill was sent
            elif what == 0:
                self.step(worker.report(key, KvCommittedTold()))
            elif what == 1:
                done = SequenceDoneTold(finish_reason=FinishReason.STOP, completion_tokens=1)
                self.step(worker.report(key, done))
            else:
                failed = AttemptFailedTold(error=ServingError(ErrorCode.KV_TRANSFER_FAILED, "x"))
                self.step(worker.report(key, failed))

    def settle(self) -> None:
        """Everyone does what is due until nothing is: then every request has ended and nothing is held."""
        for _ in range(60):
            self.now += 0.25
            while self.writes:
                self.write()
            for index, worker in enumerate(self.workers):
                while worker.inbox:
                    self.take(index)
                self.step(worker.heartbeat())
                self.progress(index, 1)
            self.step(Ticked())


def check_body(worker: SimWorker, body: CommandBody) -> None:
    """Each role is sent its own commands only."""
    if isinstance(body, ReserveJob):
        assert Role.DECODE is worker.role
    if isinstance(body, PrefillJob):
        assert Role.PREFILL is worker.role


actions = st.one_of(
    st.tuples(st.just("start"), st.integers(1, 100), st.integers(1, 60)),
    st.tuples(st.just("cancel"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("write"), st.just(0), st.just(0)),
    st.tuples(st.just("take"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("progress"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("heartbeat"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("tick"), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=60))
def test_every_request_ends_once_and_everything_is_released(history: list[tuple[str, int, int]]) -> None:
    """Whatever happens in whatever order: one outcome on each stream, no illegal event, no block left, no debt."""
    world = World()
    for kind, first, second in history:
        match kind:
            case "start":
                world.start(first, second)
            case "cancel":
                world.step(CancelAsked(request_id=RequestId(f"r{first}"), reason=CancelReason.DELETE))
            case "write":
                world.write()
            case "take":
                world.take(first)
            case "progress":
                world.progress(first, second)
            case "heartbeat":
                world.step(world.workers[first].heartbeat())
            case _:
                world.now += 0.3
                for worker in world.workers:
                    world.step(worker.heartbeat())
                world.step(Ticked())
    world.settle()
    assert 0 == world.core.ledger.num_live()
    assert world.num_started == len(world.outcomes)
    assert len(world.ended) == len(set(world.ended))
    assert sorted(world.ended) == sorted(world.released)
    assert 0 == world.core.ledger.num_unreleased()
    for worker in world.workers:
        assert worker.num_blocks == worker.free
    for seen in world.core.fleet:
        assert ({}, {}, set()) == (seen.jobs, seen.pending, seen.owed)
