"""The scheduler's core with simulated workers, gateways and a store around it, which do what a test says."""

from collections import deque
from dataclasses import replace
from typing import assert_never

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import (
    AckEvents,
    AttemptFailedTold,
    CancelAsked,
    CloseSession,
    CloseStream,
    CommandBody,
    CoreEffect,
    CoreEvent,
    DeliveredTold,
    InventoryTold,
    KvCommittedTold,
    Noted,
    OutcomeTold,
    PersistRecord,
    PlacedTold,
    PreemptedTold,
    PrefillDoneTold,
    PrefillJob,
    QueuedTold,
    RecordsFound,
    Refused,
    ReportTold,
    RequestEnded,
    RequestReleased,
    RequestRequeued,
    RequeuedTold,
    ReserveJob,
    Resign,
    RewriteRecords,
    SendCommand,
    SequenceDoneTold,
    SessionClosed,
    SessionId,
    SessionOpened,
    StartReceived,
    StateBack,
    StateLost,
    StateRewritten,
    StreamClosed,
    StreamId,
    Tell,
    Ticked,
    Wasted,
    WelcomeWorker,
    Written,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, TokenId
from shared.domain.refusals import RefusedKind
from shared.domain.request import CancelReason, FinishReason, RequestSpec, Role, SequenceState, StoredRequest
from shared.domain.sampling import SamplingParams
from shared.domain.worker import LossLimits
from tests.support.sim_worker import SimWorker

LIMITS = CoreLimits(
    max_queued_requests=5, max_queued_prompt_tokens=400, loss=LossLimits(), gateway_grace_s=5.0, max_ends_kept=100
)


class World:
    """The core and everyone around it; time stands still unless told."""

    def __init__(self) -> None:
        self.core = SchedulerCore(LIMITS, Epoch(1))
        self.now = 0.0
        self.workers = [
            SimWorker(Role.PREFILL, "p0", 8),
            SimWorker(Role.DECODE, "d0", 8),
            SimWorker(Role.DECODE, "d1", 4),
        ]
        self.store: dict[RequestId, StoredRequest] = {}
        self.writes: deque[PersistRecord] = deque()
        self.rewrites: deque[RewriteRecords] = deque()
        self.is_redis_away = False
        self.starts: dict[RequestId, StartReceived] = {}
        """The last Start of each request; its stream is the one that counts."""
        self.broken_streams: set[StreamId] = set()
        self.outcomes: dict[StreamId, OutcomeTold] = {}
        self.placed: dict[StreamId, Attempt] = {}
        self.requeued: dict[RequestId, Attempt] = {}
        """Closed attempts that a gateway has heard of and not answered."""
        self.closed: dict[RequestId, Attempt] = {}
        self.answers: dict[RequestId, int] = {}
        """How many tokens it said last that it holds."""
        self.ended: list[RequestId] = []
        self.released: list[RequestId] = []
        self.last_id = 0
        self.step(Ticked())
        for worker in self.workers:
            self.dial(worker)

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def step(self, event: CoreEvent) -> None:
        for effect in self.core.step(event, self.now):
            self.perform(effect)
        self.core.waiting.check()

    def perform(self, effect: CoreEffect) -> None:
        match effect:
            case Tell():
                self.hear(effect)
            case CloseStream():
                self.broken_streams.add(effect.stream)
            case SendCommand() | AckEvents() | CloseSession() | WelcomeWorker():
                self.perform_session(effect)
            case PersistRecord():
                self.writes.append(effect)
            case RewriteRecords():
                self.rewrites.append(effect)
            case RequestEnded():
                self.ended.append(effect.record.request_id)
            case RequestReleased():
                self.released.append(effect.request_id)
            case Refused():
                assert effect.kind not in (RefusedKind.ILLEGAL_EVENT, RefusedKind.OLD_SESSION), effect.kind
            case Noted() | RequestRequeued() | Wasted():
                pass
            case Resign():
                raise AssertionError(effect)
            case _:
                assert_never(effect)

    def hear(self, effect: Tell) -> None:
        """A gateway is told something."""
        assert effect.stream not in self.outcomes, "nothing after an outcome"
        assert effect.stream not in self.broken_streams, "nothing on a broken stream"
        match effect.message:
            case QueuedTold(position=position):
                assert 0 <= position < len(self.starts)
            case RequeuedTold(attempt=attempt):
                request_id = self.request_of(effect.stream)
                self.requeued[request_id] = self.closed[request_id] = attempt
            case PlacedTold(attempt=attempt):
                request_id = self.request_of(effect.stream)
                assert request_id not in self.requeued, "placed before Delivered"
                self.placed[effect.stream] = attempt
            case OutcomeTold():
                self.outcomes[effect.stream] = effect.message

    def request_of(self, stream: StreamId) -> RequestId:
        """The one whose gateway has this stream."""
        return next(request_id for request_id, start in self.starts.items() if start.stream == stream)

    def deliver(self, number: int, more: int) -> None:
        """A gateway answers Requeued: it holds so many tokens more than the last time, all of them at most."""
        request_id = RequestId(f"r{number}")
        start, attempt = self.starts.get(request_id), self.requeued.pop(request_id, None)
        if start is None or attempt is None or start.stream in self.broken_streams:
            return
        held = self.answers[request_id] = min(self.answers.get(request_id, 0) + more, start.spec.max_tokens)
        ids = tuple(TokenId(n) for n in range(held))
        complete = FinishReason.STOP if more % 7 == 6 else None
        self.step(DeliveredTold(request_id=request_id, closed_attempt=attempt, ids=ids, complete=complete))

    def perform_session(self, effect: SendCommand | AckEvents | CloseSession | WelcomeWorker) -> None:
        worker = next((each for each in self.workers if each.session == effect.session), None)
        if worker is None:
            return  # the session broke, and the core hears of it next
        match effect:
            case SendCommand():
                check_body(worker, effect.body)
                if isinstance(effect.body, ReserveJob):
                    assert self.answers.get(effect.key.request_id, 0) == len(effect.body.delivered_ids)
                worker.inbox.append(effect)
            case AckEvents(upto=upto):
                worker.unacked = [told for told in worker.unacked if told.number > upto]
            case CloseSession():
                worker.hang_up()
            case WelcomeWorker():
                pass

    # ---- gateways

    def start(self, prompt: int, max_tokens: int) -> None:
        request_id = RequestId(f"r{len(self.starts) + 1}")
        spec = RequestSpec(
            request_id=request_id,
            prompt_ids=tuple(TokenId(n) for n in range(prompt)),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=1),
        )
        self.starts[request_id] = StartReceived(
            stream=StreamId(self.next_id()),
            spec=spec,
            gateway_incarnation=Incarnation(1),
            last_attempt_seen=Attempt(0),
            last_attempt_closed=Attempt(0),
            epoch_seen=Epoch(0),
            unix_ms=1,
        )
        self.step(self.starts[request_id])

    def break_stream(self, number: int) -> None:
        start = self.starts.get(RequestId(f"r{number}"))
        if start is not None and start.stream not in self.broken_streams:
            self.broken_streams.add(start.stream)
            self.step(StreamClosed(stream=start.stream))

    def dial_stream(self, number: int) -> None:
        """A gateway dials again, perhaps before the scheduler sees that the old stream broke."""
        start = self.starts.get(RequestId(f"r{number}"))
        if start is None or start.stream in self.outcomes:
            return
        closed = self.closed.get(start.spec.request_id, Attempt(0))
        seen = max(closed, self.placed.get(start.stream, start.last_attempt_seen))
        again = replace(start, stream=StreamId(self.next_id()), last_attempt_seen=seen, last_attempt_closed=closed)
        self.starts[start.spec.request_id] = again
        self.step(again)
        if start.stream not in self.outcomes:
            assert self.core.ledger.by_stream(start.stream) is None, "the old stream counts no more"

    # ---- workers

    def dial(self, worker: SimWorker, *, is_restart: bool = False) -> None:
        """A new session, perhaps before the scheduler sees the end of the old one, perhaps of a new start."""
        worker.hang_up()
        if is_restart or worker.ref.incarnation == 0:
            worker.restart(self.next_id())
        worker.session = session = SessionId(self.next_id())
        self.step(SessionOpened(session=session, facts=worker.facts(), epoch_seen=Epoch(0)))
        for told in tuple(worker.unacked):
            self.step(replace(told, session=session))
        self.step(InventoryTold(session=session, entries=worker.inventory()))
        self.beat(worker)

    def dial_broken(self) -> None:
        for worker in self.workers:
            if worker.session is None:
                self.dial(worker)

    def break_session(self, worker: SimWorker) -> None:
        session = worker.session
        worker.hang_up()
        if session is not None:
            self.step(SessionClosed(session=session))

    def beat(self, worker: SimWorker) -> None:
        if worker.session is not None:
            self.step(worker.heartbeat(worker.session))

    def say(self, worker: SimWorker, told: ReportTold | None) -> None:
        """Without a session it is kept for the next one."""
        if told is not None and worker.session is not None:
            self.step(told)

    def take(self, worker: SimWorker) -> None:
        if worker.inbox:
            self.say(worker, worker.take())

    def progress(self, worker: SimWorker, what: int) -> None:
        """A worker says something true about one of its attempts."""
        for key in list(worker.held)[:1]:
            entry = self.core.ledger.get(key.request_id)
            if entry is None or not entry.record.holds:
                return
            if worker.role is Role.PREFILL:
                self.say(worker, worker.report(key, PrefillDoneTold()))
            elif worker.states[key] is SequenceState.WAITING_KV and len(entry.record.holds) < 2:
                if entry.record.is_adopted:  # the prefill worker has let go of it: the reservation's lease ends
                    worker.bury(key)
                    failed = AttemptFailedTold(error=ServingError(ErrorCode.KV_TRANSFER_FAILED, "no sign"))
                    self.say(worker, worker.report(key, failed))
                return  # no KV before Prefill was sent
            elif worker.states[key] is SequenceState.DONE:
                return  # told already
            elif what == 0:
                worker.states[key] = SequenceState.RUNNING
                self.say(worker, worker.report(key, KvCommittedTold()))
            elif what == 1:
                worker.states[key] = SequenceState.DONE
                done = SequenceDoneTold(finish_reason=FinishReason.STOP, completion_tokens=1)
                self.say(worker, worker.report(key, done))
            elif what == 2:
                worker.bury(key)
                self.say(worker, worker.report(key, PreemptedTold()))
            else:
                worker.bury(key)
                failed = AttemptFailedTold(error=ServingError(ErrorCode.KV_TRANSFER_FAILED, "x"))
                self.say(worker, worker.report(key, failed))

    # ---- the store

    def lose_redis(self) -> None:
        self.is_redis_away = True
        self.step(StateLost())

    def return_redis(self) -> None:
        self.is_redis_away = False
        if not self.core.is_state_ready:
            self.step(StateBack())

    def write(self) -> None:
        if self.writes:
            effect = self.writes.popleft()
            stored = effect.stored
            error = ErrorCode.STATE_UNAVAILABLE if self.is_redis_away else self.keep(stored)
            self.step(Written(request_id=stored.request_id, attempt=stored.attempt, step=effect.step, error=error))

    def rewrite(self) -> None:
        if self.rewrites:
            records = self.rewrites.popleft().records
            written = () if self.is_redis_away else records
            for stored in written:
                self.keep(stored)
            outcomes = frozenset(stored.request_id for stored in written if stored.state.is_terminal)
            self.step(StateRewritten(outcomes=outcomes, is_complete=not self.is_redis_away))

    def keep(self, stored: StoredRequest) -> ErrorCode | None:
        """As the store's script does: an end stands."""
        kept = self.store.get(stored.request_id)
        if kept is not None and kept.state.is_terminal:
            return None if stored.state.is_terminal else ErrorCode.STALE_ATTEMPT
        self.store[stored.request_id] = stored
        return None

    # ---- the scheduler's end

    def take_over(self, *, has_forgotten: bool) -> None:
        """The scheduler dies: writes and streams are lost with it. Another one takes over, once Redis can be reached."""
        self.is_redis_away = False
        self.writes.clear()
        self.rewrites.clear()
        self.broken_streams |= {start.stream for start in self.starts.values()} - self.outcomes.keys()
        for worker in self.workers:
            worker.hang_up()
        if has_forgotten:
            self.store.clear()
        live = [stored for stored in self.store.values() if not stored.state.is_terminal]
        live.sort(key=lambda stored: (stored.admitted_unix_ms, stored.request_id))
        self.core = SchedulerCore(LIMITS, Epoch(self.core.epoch + 1))
        records = tuple(replace(stored, epoch=self.core.epoch) for stored in live)
        self.store |= {stored.request_id: stored for stored in records}
        self.ended.clear()
        self.released.clear()
        self.step(RecordsFound(records=records))
        self.step(Ticked())

    def go_ahead(self) -> None:
        """Everything that was written or commanded so far is done."""
        for _ in range(3):
            while self.writes:
                self.write()
            for worker in self.workers:
                while worker.inbox:
                    self.take(worker)

    def take_over_at_once(self, *, has_forgotten: bool) -> None:
        """And everyone finds it, the youngest request's gateway first."""
        self.take_over(has_forgotten=has_forgotten)
        for number in range(len(self.starts), 0, -1):
            self.dial_stream(number)
        self.dial_broken()

    # ---- time

    def pass_time(self, seconds: float, silent: SimWorker | None = None) -> None:
        """With a tick every half second."""
        ends_at = self.now + seconds
        while self.now < ends_at:
            self.now = min(self.now + 0.5, ends_at)
            for worker in self.workers:
                if worker is not silent:
                    self.beat(worker)
            self.step(Ticked())

    def pause(self, seconds: float) -> None:
        """The scheduler itself does not run; until then everyone spoke."""
        for worker in self.workers:
            self.beat(worker)
        self.now += seconds
        self.step(Ticked())

    def settle(self) -> None:
        """Everyone does what is due until nothing is: then every request has ended and nothing is held."""
        for _ in range(60):
            self.return_redis()
            while self.writes or self.rewrites:
                self.write()
                self.rewrite()
            self.dial_broken()
            for number in range(1, len(self.starts) + 1):
                self.deliver(number, 1)
            for worker in self.workers:
                while worker.inbox:
                    self.take(worker)
                self.progress(worker, 1)
            self.pass_time(0.25)

    def act(self, kind: str, first: int, second: int) -> None:
        """One thing that happens."""
        worker = self.workers[first % len(self.workers)]
        match kind:
            case "start":
                self.start(first, second)
            case "cancel":
                self.step(CancelAsked(request_id=RequestId(f"r{first}"), reason=CancelReason.DELETE))
            case "deliver":
                self.deliver(first, second)
            case "break stream":
                self.break_stream(first)
            case "dial stream":
                self.dial_stream(first)
            case "take":
                self.take(worker)
            case "progress":
                self.progress(worker, second)
            case "heartbeat":
                self.beat(worker)
            case "break session":
                self.break_session(worker)
            case "dial":
                self.dial(worker)
            case "restart":
                self.dial(worker, is_restart=True)
            case "silence":
                self.pass_time(6.0, silent=worker)
            case "pause":
                self.pause(6.0)
            case _:
                {
                    "take over": lambda: self.take_over(has_forgotten=first == 2),
                    "take over at once": lambda: self.take_over_at_once(has_forgotten=first == 2),
                    "ahead": self.go_ahead,
                    "write": self.write,
                    "rewrite": self.rewrite,
                    "redis away": self.lose_redis,
                    "redis back": self.return_redis,
                    "tick": lambda: self.pass_time(0.3),
                }[kind]()

    def check_end(self) -> None:
        """Every request has ended once and is told so, and nothing is held, booked or owed anywhere."""
        assert 0 == self.core.ledger.num_live()
        for start in self.starts.values():
            assert start.stream in self.outcomes or start.stream in self.broken_streams
        assert len(self.ended) == len(set(self.ended))
        assert sorted(self.ended) == sorted(self.released)
        assert 0 == self.core.ledger.num_unreleased()
        for worker in self.workers:
            assert worker.num_blocks == worker.free
        for seen in self.core.fleet:
            assert ({}, {}, set()) == (seen.jobs, seen.pending, seen.owed)
        assert self.core.is_state_ready


def check_body(worker: SimWorker, body: CommandBody) -> None:
    """Each role is sent its own commands only."""
    if isinstance(body, ReserveJob):
        assert Role.DECODE is worker.role
    if isinstance(body, PrefillJob):
        assert Role.PREFILL is worker.role
