"""Performs the core's effects over Serve streams, worker sessions and the record store, and feeds back their ends.

`step` is synchronous: the core moves, and every effect is performed or queued, before anyone else runs. What waits for
a write is decided in the core (nothing here does): a write's end is an event of its own. Writes of one request keep
their order, because a request always uses the same lane.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from structlog.typing import FilteringBoundLogger

from scheduler.core import SchedulerCore
from scheduler.messages import (
    AbortJob,
    AckEvents,
    CancelAsked,
    CloseSession,
    CloseStream,
    CommandBody,
    CoreEffect,
    CoreEvent,
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
    Resign,
    RewriteRecords,
    SendCommand,
    SessionClosed,
    SessionId,
    StateRewritten,
    StreamClosed,
    StreamId,
    Tell,
    Wasted,
    WelcomeWorker,
    Written,
)
from scheduler.transcript import Transcript
from shared.aio.channel import Channel
from shared.aio.scope import spawn
from shared.codec.kv import target_to_wire
from shared.codec.request import key_to_wire, outcome_to_wire, spec_to_wire, timeout_to_wire
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, RequestId
from shared.domain.lifecycle import RequestRecord
from shared.domain.lifecycle_events import WriteStep
from shared.domain.request import CancelReason, RequestState, StoredRequest
from shared.obs.metrics import Metrics
from shared.state.client import state_unavailable
from shared.state.requests import NewerEpoch
from shared.wire import scheduler_pb2

NUM_LANES = 8  # as many as the store has connections
MAX_LANE_ITEMS = 4096  # three writes for each request of a full queue, spread over eight lanes, and room to spare
MAX_STREAM_MESSAGES = 64  # a request is told a handful of things; a gateway that reads none of them has gone
MAX_SESSION_MESSAGES = 8192  # a full queue's commands at once; a worker that is further behind dials again


class RecordStore(Protocol):
    """What the driver needs of `shared.state.requests`. Methods raise ServingError."""

    async def admit(self, stored: StoredRequest) -> None: ...

    async def place(self, stored: StoredRequest) -> None: ...

    async def finish(self, stored: StoredRequest) -> None: ...

    async def rewrite(self, stored: StoredRequest) -> None: ...


class CancelMarks(Protocol):
    """What the driver needs of `shared.state.cancellation`. Methods raise ServingError."""

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None: ...

    async def clear(self, request_id: RequestId, key_hash: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Releases:
    """Who waits for the release of one request."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0


class Driver:
    """Around one core. `run` serves the lanes until cancelled."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        store: RecordStore,
        marks: CancelMarks,
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
        transcript: Transcript | None = None,
    ) -> None:
        self.core = core
        self.resigned = asyncio.Event()
        self.epoch_seen = Epoch(0)
        """The highest that made it resign."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self._store = store
        self._marks = marks
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._transcript = transcript
        self._events: deque[CoreEvent] = deque()
        self._is_stepping = False
        self._num_unwritten = 0
        self.written = asyncio.Event()
        """Set while no record waits to be written."""
        self.written.set()
        self._lanes = [Channel[PersistRecord](MAX_LANE_ITEMS) for _ in range(NUM_LANES)]
        self._rewrites = Channel[RewriteRecords](4)
        self._streams: dict[StreamId, Channel[scheduler_pb2.ServeDown]] = {}
        self._sessions: dict[SessionId, Channel[scheduler_pb2.SessionDown]] = {}
        self._last_id = 0
        self._releases: dict[RequestId, _Releases] = {}

    async def run(self) -> None:
        """Perform writes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number, lane in enumerate(self._lanes):
                spawn(group, self._write_lane(lane), name=f"record writes {number}")
            spawn(group, self._rewrite_all(), name="record rewrites")

    def step(self, event: CoreEvent) -> None:
        """Let the core take an event and perform what follows. Called while performing, it waits its turn."""
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                event, now = self._events.popleft(), self._clock.monotonic()
                effects = self.core.step(event, now)
                if self._transcript is not None:
                    self._transcript.add(event, now, effects)
                for effect in effects:
                    self._perform(effect)
        finally:
            self._is_stepping = False
        if self.core.ledger.num_live() == 0:
            self.idle.set()
        else:
            self.idle.clear()

    def hang_up(self) -> None:
        """Ends every stream and session, so that gateways and workers dial the next scheduler at once."""
        for channel in (*self._streams.values(), *self._sessions.values()):
            channel.close()

    # ---- streams and sessions

    def open_stream(self) -> tuple[StreamId, Channel[scheduler_pb2.ServeDown]]:
        """A Serve call's place. What is to be written comes out of the channel, which ends with the stream."""
        self._last_id += 1
        stream, channel = StreamId(self._last_id), Channel[scheduler_pb2.ServeDown](MAX_STREAM_MESSAGES)
        self._streams[stream] = channel
        return stream, channel

    def close_stream(self, stream: StreamId) -> None:
        """The call is over, whoever ended it."""
        channel = self._streams.pop(stream, None)
        if channel is not None:
            channel.close()
        self.step(StreamClosed(stream=stream))

    def open_session(self) -> tuple[SessionId, Channel[scheduler_pb2.SessionDown]]:
        """Like `open_stream`, for a worker."""
        self._last_id += 1
        session, channel = SessionId(self._last_id), Channel[scheduler_pb2.SessionDown](MAX_SESSION_MESSAGES)
        self._sessions[session] = channel
        return session, channel

    def close_session(self, session: SessionId) -> None:
        """The call is over, whoever ended it."""
        channel = self._sessions.pop(session, None)
        if channel is not None:
            channel.close()
        self.step(SessionClosed(session=session))

    async def wait_released(self, request_id: RequestId, timeout_s: float) -> bool:
        """Whether nothing of the request is held any more, now or within the time."""
        entry = self.core.ledger.get(request_id)
        if entry is None or entry.record.is_settled:
            return True
        releases = self._releases.setdefault(request_id, _Releases())
        releases.num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await releases.event.wait()
            return entry.record.is_settled
        finally:
            releases.num_waiting -= 1
            if releases.num_waiting == 0:
                self._releases.pop(request_id, None)

    # ---- effects

    def _perform(self, effect: CoreEffect) -> None:
        match effect:
            case Tell() | CloseStream():
                self._perform_stream(effect)
            case SendCommand() | WelcomeWorker() | AckEvents() | CloseSession():
                self._perform_session(effect)
            case PersistRecord():
                lane = self._lanes[hash(effect.stored.request_id) % NUM_LANES]
                if lane.try_put(effect):
                    self._num_unwritten += 1
                    self.written.clear()
                else:
                    self.step(_written(effect, state_unavailable()))
            case RewriteRecords():
                if not self._rewrites.try_put(effect):
                    self.step(StateRewritten(outcomes=frozenset(), is_complete=False))
            case RequestEnded() | RequestReleased() | RequestRequeued() | Refused() | Wasted() | Noted() | Resign():
                self._perform_note(effect)
            case _:
                assert_never(effect)

    def _perform_stream(self, effect: Tell | CloseStream) -> None:
        channel = self._streams.get(effect.stream)
        if channel is None:
            return
        if isinstance(effect, CloseStream):
            del self._streams[effect.stream]
            channel.close()
            return
        is_put = channel.try_put(self._serve_down(effect))
        if isinstance(effect.message, OutcomeTold) or not is_put:
            # A gateway that does not read is as good as gone: it dials again or runs out of its grace.
            del self._streams[effect.stream]
            channel.close()
            if not is_put:
                self.step(StreamClosed(stream=effect.stream))

    def _perform_session(self, effect: SendCommand | WelcomeWorker | AckEvents | CloseSession) -> None:
        channel = self._sessions.get(effect.session)
        if channel is None:
            return
        if isinstance(effect, CloseSession):
            self._log.info("session closed", reason=effect.reason)
            del self._sessions[effect.session]
            channel.close()
            return
        if not channel.try_put(self._session_down(effect)):
            self._log.warning("session closed", reason="the worker does not read")
            del self._sessions[effect.session]
            channel.close()
            self.step(SessionClosed(session=effect.session))

    def _perform_note(
        self, effect: RequestEnded | RequestReleased | RequestRequeued | Refused | Wasted | Noted | Resign
    ) -> None:
        match effect:
            case RequestEnded():
                self._metrics.requests_total.add(effect.record.state.value)
                self._log_ended(effect.record)
            case RequestReleased():
                if effect.cancel_release_s is not None:
                    self._metrics.cancel_release_seconds.record(effect.cancel_release_s)
                releases = self._releases.get(effect.request_id)
                if releases is not None:
                    releases.event.set()
            case RequestRequeued():
                self._metrics.requeues_total.add(effect.reason)
                key = effect.key
                self._log.info("requeued", request_id=key.request_id, attempt=key.attempt, reason=effect.reason)
            case Refused():
                self._metrics.refused(effect.kind)
            case Wasted(waste=waste):
                self._metrics.wasted_tokens.add(waste.num_tokens, cause=waste.cause.value, stage=waste.stage.value)
            case Noted():
                fields = {"worker": effect.worker_id, "request_id": effect.request_id, "reason": effect.reason}
                self._log.info("noted", what=effect.what, **{name: value for name, value in fields.items() if value})
            case Resign():
                self._log.error("not the active scheduler any more", reason=effect.reason)
                self.epoch_seen = max(self.epoch_seen, effect.epoch_seen)
                self.resigned.set()
            case _:
                assert_never(effect)

    def _log_ended(self, record: RequestRecord) -> None:
        outcome = record.outcome
        self._log.info(
            "request ended",
            request_id=record.request_id,
            outcome=record.state.value,
            code=None if outcome is None or outcome.error is None else outcome.error.code.value,
            finish_reason=None if outcome is None else outcome.finish_reason,
            attempts=record.attempt,
            prompt_tokens=record.spec.num_prompt_tokens,
            completion_tokens=record.completion_tokens,
            prefill=None if record.prefill is None else record.prefill.worker_id,
            decode=None if record.decode is None else record.decode.worker_id,
            total_ms=round((record.entered_at - record.admitted_at) * 1000),
        )

    # ---- the record store

    async def _write_lane(self, lane: Channel[PersistRecord]) -> None:
        async for effect in lane:
            error = await self._write(effect)
            self._num_unwritten -= 1
            if self._num_unwritten == 0:
                self.written.set()
            self.step(_written(effect, error))
            if error is None:
                await self._look_at_mark(effect)

    async def _write(self, effect: PersistRecord) -> ServingError | None:
        if not self.core.is_state_ready:
            return state_unavailable()  # known to be away: nobody waits for a timeout again
        try:
            match effect.step:
                case WriteStep.ADMITTED:
                    await self._store.admit(effect.stored)
                case WriteStep.PLACED:
                    await self._store.place(effect.stored)
                case WriteStep.OUTCOME:
                    await self._store.finish(effect.stored)
                case _:
                    assert_never(effect.step)
        except ServingError as error:
            self._log.warning("record not written", step=effect.step.value, code=error.code.value)
            return error
        return None

    async def _look_at_mark(self, effect: PersistRecord) -> None:
        """A cancel may have been marked before the request was known here; the mark goes with its request."""
        request_id, key_hash = effect.stored.request_id, effect.stored.key_hash
        with contextlib.suppress(ServingError):  # away again: the watch reads every mark when Redis is back
            if effect.step is WriteStep.ADMITTED:
                reason = await self._marks.read(request_id, key_hash)
                if reason is not None:
                    self.step(CancelAsked(request_id=request_id, reason=reason))
            elif effect.step is WriteStep.OUTCOME and effect.stored.state is RequestState.CANCELLED:
                await self._marks.clear(request_id, key_hash)

    async def _rewrite_all(self) -> None:
        async for effect in self._rewrites:
            written: set[RequestId] = set()
            is_complete = True
            for stored in effect.records:
                try:
                    await self._store.rewrite(stored)
                except ServingError as error:
                    if error.code is ErrorCode.STATE_UNAVAILABLE:
                        is_complete = False
                        break
                if stored.state.is_terminal:  # refused as older than what is there: nothing is owed either
                    written.add(stored.request_id)
            self._log.info("records rewritten", count=len(written), complete=is_complete)
            self.step(StateRewritten(outcomes=frozenset(written), is_complete=is_complete))

    # ---- wire

    def _serve_down(self, effect: Tell) -> scheduler_pb2.ServeDown:
        down = scheduler_pb2.ServeDown(scheduler_epoch=self.core.epoch)
        match effect.message:
            case QueuedTold(position=position):
                down.queued.position = position
                down.queued.SetInParent()
            case RequeuedTold(attempt=attempt, reason=reason):
                down.requeued.CopyFrom(scheduler_pb2.Requeued(attempt=attempt, reason=reason))
            case PlacedTold() as placed:
                down.placed.CopyFrom(
                    scheduler_pb2.Placed(
                        attempt=placed.attempt,
                        decode_worker_id=placed.target.worker_id,
                        decode_address=placed.target.address,
                        decode_incarnation=placed.target.incarnation,
                        attach_ticket=placed.attach_ticket,
                        prefill_worker_id=placed.prefill_worker,
                    )
                )
            case OutcomeTold(outcome=outcome):
                down.outcome.CopyFrom(outcome_to_wire(outcome))
            case _:
                assert_never(effect.message)
        return down

    def _session_down(self, effect: SendCommand | WelcomeWorker | AckEvents) -> scheduler_pb2.SessionDown:
        epoch = self.core.epoch
        match effect:
            case WelcomeWorker():
                return scheduler_pb2.SessionDown(scheduler_epoch=epoch, welcome=scheduler_pb2.Welcome())
            case AckEvents():
                return scheduler_pb2.SessionDown(scheduler_epoch=epoch, ack=scheduler_pb2.EventAck(upto=effect.upto))
            case SendCommand():
                command = _body_to_wire(effect.body, self._clock.monotonic())
                command.number = effect.number
                command.key.CopyFrom(key_to_wire(effect.key))
                return scheduler_pb2.SessionDown(scheduler_epoch=epoch, command=command)
            case _:
                assert_never(effect)


def _body_to_wire(body: CommandBody, now: float) -> scheduler_pb2.Command:
    match body:
        case ReserveJob():
            reserve = scheduler_pb2.Reserve(
                spec=spec_to_wire(body.spec),
                delivered_ids=body.delivered_ids,
                timeout_ms=timeout_to_wire(body.deadline, now),
            )
            return scheduler_pb2.Command(reserve=reserve)
        case PrefillJob():
            prefill = scheduler_pb2.Prefill(
                spec=spec_to_wire(body.spec),
                target=target_to_wire(body.target),
                num_delivered=body.num_delivered,
                distrust_cache=body.distrusts_cache,
                timeout_ms=timeout_to_wire(body.deadline, now),
            )
            return scheduler_pb2.Command(prefill=prefill)
        case AbortJob():
            return scheduler_pb2.Command(abort=scheduler_pb2.Abort())
        case ReleaseJob():
            return scheduler_pb2.Command(release=scheduler_pb2.Release())
        case _:
            assert_never(body)


def _written(effect: PersistRecord, error: ServingError | None) -> Written:
    stored = effect.stored
    return Written(
        request_id=stored.request_id,
        attempt=stored.attempt,
        step=effect.step,
        error=None if error is None else error.code,
        is_newer=isinstance(error, NewerEpoch),
    )
