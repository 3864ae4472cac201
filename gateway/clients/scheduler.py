"""The gateway's view of the scheduler: control streams, cancel by id, status. Wire messages stop here."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from grpc.aio import EOF, AioRpcError, StreamStreamCall

from gateway.clients.link import CALL_ERRORS, LinkBroken, broken_where_cancelled, failure_of, failure_of_call
from shared.codec.request import finish_reason_to_wire, outcome_from_wire, outcome_state_from_wire, spec_to_wire
from shared.domain.clock import Clock
from shared.domain.errors import ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.refusals import RefusedKind
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, RequestState
from shared.obs.metrics import Metrics
from shared.rpc.calls import end_call
from shared.rpc.channels import ChannelPool
from shared.wire import scheduler_pb2, scheduler_pb2_grpc

_CANCEL_TIMEOUT_S = 3.0  # the scheduler waits up to 2 s for the release
# The active scheduler may be cut off from Redis alone: no call to it breaks, another takes its place, and cancels what
# has no gateway for 5 s. Looked for beside the calls: while Redis is away each lookup costs its timeout, and running
# work must not feel that.
_LOOK_INTERVAL_S = 1.0
# A scheduler ends a late request by itself, and its word is worth more than the end of the call: gRPC's own deadline
# comes behind it, for a peer that keeps a call open and does nothing.
_DEADLINE_SLACK_S = 30.0
_WRITE_TIMEOUT_S = 5.0  # one small message; flow control holds it up only when the peer is stuck

ServeCall: TypeAlias = "StreamStreamCall[scheduler_pb2.ServeUp, scheduler_pb2.ServeDown]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Admitted; `position` requests are in front."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """The attempt is closed: nothing more of it counts. The scheduler waits for `Delivered`."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The answer to Requeued: every token that is held, in sequence; with `complete` the answer had ended so."""

    attempt: Attempt
    ids: tuple[TokenId, ...]
    cached_tokens: int
    complete: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Two workers are at work; the tokens are to be had at the decode worker."""

    attempt: Attempt
    decode_worker: WorkerId
    decode_address: str
    decode_incarnation: Incarnation
    attach_ticket: bytes
    prefill_worker: WorkerId


ControlEvent: TypeAlias = Queued | Requeued | Placed | Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What each control stream of a request begins with."""

    spec: RequestSpec
    last_attempt_seen: int
    tokens_held: int
    last_attempt_closed: int = 0
    session: int = 0
    """Of a resumable answer: grows with each reader."""
    timeout_ms: int = 0
    """What is left of the client's time; 0 = no end."""
    key_hash: str = ""
    """Of the client's key: who may cancel it by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAnswer:
    """`is_released` False: cancelled, but a release is still owed."""

    is_released: bool
    state: RequestState | None
    blocks_freed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """One process, as the scheduler sees it."""

    role: str
    id: str
    pid: int
    address: str
    admin_url: str
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The scheduler's answer about everything at once. `max_request_tokens` 0 = no workers."""

    services: tuple[ServiceInfo, ...]
    queue: int
    requests: Mapping[str, int]
    blocks: Mapping[str, Mapping[str, int]]
    sequences: Mapping[str, int]
    is_redis_ready: bool
    unreleased: int
    max_request_tokens: int


class ControlStream:
    """One `Serve` call, begun. Raises ServingError where the scheduler said why, LinkBroken where the line broke."""

    def __init__(self, call: ServeCall, accept_epoch: Callable[[int], bool]) -> None:
        self._call = call
        self._accept_epoch = accept_epoch
        self._writing = asyncio.Lock()  # grpc takes one message at a time

    async def read(self) -> ControlEvent:
        """The next event. A scheduler of an older epoch is not listened to: that counts as a broken line."""
        while True:
            try:
                with broken_where_cancelled():
                    message = await self._call.read()
            except AioRpcError as error:
                raise failure_of(error) from None
            if message is EOF:
                raise LinkBroken("ended")
            down = cast("scheduler_pb2.ServeDown", message)
            if not self._accept_epoch(down.scheduler_epoch):
                raise LinkBroken("stale epoch")
            match down.WhichOneof("message"):
                case "queued":
                    return Queued(position=down.queued.position)
                case "requeued":
                    return Requeued(attempt=Attempt(down.requeued.attempt), reason=down.requeued.reason)
                case "placed":
                    return _placed_from_wire(down.placed)
                case "outcome":
                    return outcome_from_wire(down.outcome)
                case None:
                    continue  # a newer scheduler says something that we do not know

    async def ask_cancel(self, reason: CancelReason) -> None:
        await self._write(scheduler_pb2.ServeUp(cancel=scheduler_pb2.CancelAsked(reason=reason.value)))

    async def tell_delivered(self, delivered: Delivered) -> None:
        told = scheduler_pb2.Delivered(
            attempt=delivered.attempt,
            ids=delivered.ids,
            complete=delivered.complete is not None,
            cached_tokens=delivered.cached_tokens,
        )
        if delivered.complete is not None:
            told.finish_reason = finish_reason_to_wire(delivered.complete)
        await self._write(scheduler_pb2.ServeUp(delivered=told))

    async def start(self, message: scheduler_pb2.ServeUp) -> None:
        await self._write(message)

    def close(self) -> None:
        """Always to be called: leaving the reading does not end a call."""
        end_call(self._call)

    async def _write(self, message: scheduler_pb2.ServeUp) -> None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S), self._writing:
                with broken_where_cancelled():
                    await self._call.write(message)
        except CALL_ERRORS:
            raise await failure_of_call(self._call) from None
        except TimeoutError:
            raise LinkBroken("write timeout") from None


class SchedulerClient:
    """Finds the active scheduler by itself. Remembers the highest epoch it has seen."""

    def __init__(
        self,
        *,
        locate: Callable[[], Awaitable[str]],
        pool: ChannelPool,
        incarnation: Incarnation,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`locate` gives the address, or raises ServingError STATE_UNAVAILABLE."""
        self._locate = locate
        self._pool = pool
        self._incarnation = incarnation
        self._metrics = metrics
        self._clock = clock
        self._epoch = Epoch(0)
        self._address: str | None = None
        self._is_located = False

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    def look_again(self) -> None:
        """A call broke: the next one asks where the scheduler is."""
        self._is_located = False

    async def watch_place(self) -> None:
        """Until cancelled: goes along where the active scheduler is replaced while no call to it breaks."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if self._address is not None:
                with contextlib.suppress(ServingError):  # nobody knows: that is no reason to leave this one
                    await self._move_to(await self._locate())

    async def serve(self, start: Start, *, on_leaving: Callable[[], None] = lambda: None) -> ControlStream:
        """A control stream whose Start is on its way. The caller closes it. Raises ServingError or LinkBroken.

        `on_leaving` is called when it begins to leave: the scheduler may have it before this returns.
        """
        stub = await self._stub()
        timeout_s = start.timeout_ms / 1000 + _DEADLINE_SLACK_S if start.timeout_ms else None
        stream = ControlStream(stub.Serve(timeout=timeout_s), self._accept_epoch)
        message = scheduler_pb2.ServeUp(
            start=scheduler_pb2.Start(
                spec=spec_to_wire(start.spec),
                gateway_incarnation=self._incarnation,
                last_attempt_seen=start.last_attempt_seen,
                tokens_held=start.tokens_held,
                last_attempt_closed=start.last_attempt_closed,
                session=start.session,
                timeout_ms=start.timeout_ms,
                key_hash=start.key_hash,
                scheduler_epoch=self._epoch,
            )
        )
        on_leaving()
        try:
            await stream.start(message)
        except BaseException:
            stream.close()
            raise
        return stream

    async def cancel(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> CancelAnswer:
        """For the client with this key. Raises ServingError (REQUEST_NOT_FOUND, also for another's) or LinkBroken."""
        stub = await self._stub()
        request = scheduler_pb2.CancelRequest(request_id=request_id, key_hash=key_hash, reason=reason.value)
        try:
            with broken_where_cancelled():
                reply = await stub.Cancel(request, timeout=_CANCEL_TIMEOUT_S)
        except AioRpcError as error:
            self.look_again()
            raise failure_of(error) from None
        return CancelAnswer(
            is_released=reply.released,
            state=outcome_state_from_wire(reply.outcome),
            blocks_freed=reply.blocks_freed,
        )

    async def status(self, timeout_s: float) -> FleetStatus:
        """Raises ServingError or LinkBroken, also when time runs out."""
        try:
            async with asyncio.timeout(timeout_s):
                stub = await self._stub()
                with broken_where_cancelled():
                    reply = await stub.Status(scheduler_pb2.StatusRequest(), timeout=timeout_s)
        except AioRpcError as error:
            self.look_again()
            raise failure_of(error) from None
        except TimeoutError:
            self.look_again()
            raise LinkBroken("timeout") from None
        if not self._accept_epoch(reply.scheduler_epoch):
            raise LinkBroken("stale epoch")
        return _status_from_wire(reply)

    async def _stub(self) -> "scheduler_pb2_grpc.SchedulerAsyncStub":
        """Looks the scheduler up unless it is known where it is."""
        if self._address is None or not self._is_located:
            try:
                address = await self._locate()
            except ServingError as error:
                raise LinkBroken("not located", error) from None
            self._is_located = True
            await self._move_to(address)
        assert self._address is not None
        return scheduler_pb2_grpc.SchedulerStub(self._pool.get(self._address))

    async def _move_to(self, address: str) -> None:
        before, self._address = self._address, address
        if before is not None and before != address:
            await self._pool.drop(before)  # its streams break, and are dialled again here

    def _accept_epoch(self, epoch: int) -> bool:
        if epoch < self._epoch:
            self._metrics.refused(RefusedKind.STALE_EPOCH)
            return False
        self._epoch = Epoch(epoch)
        return True


def _placed_from_wire(placed: scheduler_pb2.Placed) -> Placed:
    return Placed(
        attempt=Attempt(placed.attempt),
        decode_worker=WorkerId(placed.decode_worker_id),
        decode_address=placed.decode_address,
        decode_incarnation=Incarnation(placed.decode_incarnation),
        attach_ticket=placed.attach_ticket,
        prefill_worker=WorkerId(placed.prefill_worker_id),
    )


def _status_from_wire(reply: scheduler_pb2.StatusReply) -> FleetStatus:
    return FleetStatus(
        services=tuple(
            ServiceInfo(
                role=service.role,
                id=service.id,
                pid=service.pid,
                address=service.address,
                admin_url=service.admin_url,
                ready=service.ready,
            )
            for service in reply.services
        ),
        queue=reply.queue,
        requests=dict(reply.requests),
        blocks={entry.role: dict(entry.states) for entry in reply.blocks},
        sequences=dict(reply.sequences),
        is_redis_ready=reply.redis_ready,
        unreleased=reply.unreleased,
        max_request_tokens=reply.max_request_tokens,
    )
