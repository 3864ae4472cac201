"""The servicer: what gateways and workers send becomes events of the core. Nothing is decided here.

Until this scheduler is the active one every call is refused without an error detail, so that callers look for the
active one instead of taking it for an answer.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from scheduler.driver import Driver
from scheduler.messages import (
    AttemptFailedTold,
    CancelAsked,
    DeliveredTold,
    HeartbeatTold,
    InventoryEntry,
    InventoryTold,
    KvCommittedTold,
    PreemptedTold,
    PrefillDoneTold,
    ReleasedTold,
    ReportTold,
    ReservedTold,
    ReserveRefusedTold,
    SequenceDoneTold,
    SessionId,
    SessionOpened,
    StartReceived,
    WorkerReport,
)
from scheduler.status import snapshot
from shared.aio.channel import Channel
from shared.aio.scope import cancel_and_wait, spawn
from shared.codec.errors import detail_to_error
from shared.codec.kv import target_from_wire
from shared.codec.request import (
    cancel_reason_from_wire,
    deadline_from_wire,
    finish_reason_from_wire,
    key_from_wire,
    outcome_to_wire,
    spec_from_wire,
)
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.request import CancelReason, FinishReason, Role, SequenceState
from shared.domain.worker import Capacity, Work, WorkerFacts, WorkerRef
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc

CANCEL_WAIT_S = 2.0  # decisions §8: DELETE waits at most 2 s for the release
FIRST_MESSAGE_TIMEOUT_S = 5.0  # Start and hello are written with the call itself

_ROLE_FROM_WIRE = {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE}

_Up = TypeVar("_Up")
ServeContext: TypeAlias = "grpc.aio.ServicerContext[scheduler_pb2.ServeUp, scheduler_pb2.ServeDown]"
SessionContext: TypeAlias = "grpc.aio.ServicerContext[scheduler_pb2.SessionUp, scheduler_pb2.SessionDown]"
CancelContext: TypeAlias = "grpc.aio.ServicerContext[scheduler_pb2.CancelRequest, scheduler_pb2.CancelReply]"
StatusContext: TypeAlias = "grpc.aio.ServicerContext[scheduler_pb2.StatusRequest, scheduler_pb2.StatusReply]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What Status says of the scheduler itself."""

    name: str
    pid: int
    address: str
    admin_url: str


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Serves the driver that `activate` hands in; refuses everyone before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._driver: Driver | None = None
        self._identity: Identity | None = None

    def activate(self, driver: Driver, identity: Identity) -> None:
        """From now on this is the active scheduler."""
        self._driver = driver
        self._identity = identity

    def deactivate(self) -> None:
        """From now on another one is, or soon will be."""
        self._driver = None

    # ---- gateways

    # A coroutine that reads and writes, not the generator of the stub: no task group around a yield.
    async def Serve(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: ServeContext
    ) -> None:
        """One request. The stream ends with its outcome."""
        driver = self._driver or await _refuse_standby(context)
        first = await _first(request_iterator)
        if first is None or first.WhichOneof("message") != "start":
            raise ServingError(ErrorCode.INVALID_REQUEST, "the first message must be Start")
        start = first.start
        spec = spec_from_wire(start.spec)
        stream, outgoing = driver.open_stream()
        try:
            driver.step(
                StartReceived(
                    stream=stream,
                    spec=spec,
                    gateway_incarnation=Incarnation(start.gateway_incarnation),
                    last_attempt_seen=Attempt(start.last_attempt_seen),
                    last_attempt_closed=Attempt(start.last_attempt_closed),
                    epoch_seen=Epoch(start.scheduler_epoch),
                    unix_ms=self._clock.unix_ms(),
                    deadline=deadline_from_wire(start.timeout_ms, self._clock.monotonic()),
                    session=start.session,
                    key_hash=start.key_hash,
                )
            )
            async with asyncio.TaskGroup() as group:
                reader = spawn(
                    group,
                    _read_gateway(driver, spec.request_id, request_iterator, outgoing),
                    name=f"serve {spec.request_id}",
                )
                async for message in outgoing:
                    await context.write(message)
                await cancel_and_wait(reader)
        finally:
            driver.close_stream(stream)

    async def Cancel(self, request: scheduler_pb2.CancelRequest, context: CancelContext) -> scheduler_pb2.CancelReply:
        """By id, of one's own request. Waits for the release, at most 2 s; again is a success."""
        driver = self._driver or await _refuse_standby(context)
        if not request.request_id:
            raise ServingError(ErrorCode.INVALID_REQUEST, "request id must not be empty")
        request_id = RequestId(request.request_id)
        if driver.core.key_hash_of(request_id) != request.key_hash:
            raise ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request")
        entry = driver.core.ledger.get(request_id)
        driver.step(
            CancelAsked(request_id=request_id, reason=cancel_reason_from_wire(request.reason, CancelReason.DELETE))
        )
        if entry is None:  # it was not admitted: nothing of it is anywhere
            return scheduler_pb2.CancelReply(released=True, outcome=scheduler_pb2.OUTCOME_KIND_CANCELLED)
        is_released = await driver.wait_released(request_id, CANCEL_WAIT_S)
        outcome = entry.record.outcome
        if outcome is None:  # its admission came to nothing in the meantime
            raise ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request")
        return scheduler_pb2.CancelReply(
            released=is_released, outcome=outcome_to_wire(outcome).kind, blocks_freed=outcome.blocks_freed
        )

    async def Status(self, request: scheduler_pb2.StatusRequest, context: StatusContext) -> scheduler_pb2.StatusReply:
        """The fleet and the queue now."""
        driver = self._driver or await _refuse_standby(context)
        assert self._identity is not None
        identity, seen = self._identity, snapshot(driver.core)
        services = [
            scheduler_pb2.ServiceStatus(
                role=Role.SCHEDULER.value,
                id=identity.name,
                pid=identity.pid,
                address=identity.address,
                admin_url=identity.admin_url,
                ready=not driver.core.is_draining,
            )
        ]
        services.extend(
            scheduler_pb2.ServiceStatus(
                role=worker.facts.role.value,
                id=worker.worker_id,
                pid=worker.facts.pid,
                address=worker.facts.address,
                admin_url=worker.facts.admin_url,
                ready=worker.is_ready,
            )
            for worker in driver.core.fleet
        )
        return scheduler_pb2.StatusReply(
            scheduler_epoch=driver.core.epoch,
            services=services,
            queue=len(driver.core.waiting),
            requests=seen.requests,
            blocks=[scheduler_pb2.RoleBlocks(role=role.value, states=counts) for role, counts in seen.blocks.items()],
            redis_ready=driver.core.is_state_ready,
            unreleased=seen.num_unreleased,
            sequences=seen.sequences,
            max_request_tokens=seen.max_request_tokens,
        )

    # ---- workers

    # A coroutine that reads and writes, not the generator of the stub: no task group around a yield.
    async def Session(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionUp], context: SessionContext
    ) -> None:
        """One worker's connection. Its end ends nothing by itself."""
        driver = self._driver or await _refuse_standby(context)
        first = await _first(request_iterator)
        if first is None or first.WhichOneof("message") != "hello":
            raise ServingError(ErrorCode.INVALID_REQUEST, "the first message must be hello")
        facts = _facts_from_wire(first.hello)
        session, outgoing = driver.open_session()
        try:
            driver.step(SessionOpened(session=session, facts=facts, epoch_seen=Epoch(first.hello.scheduler_epoch)))
            async with asyncio.TaskGroup() as group:
                reader = spawn(
                    group,
                    _read_worker(driver, session, request_iterator, outgoing),
                    name=f"session {facts.ref.worker_id}",
                )
                async for message in outgoing:
                    await context.write(message)
                await cancel_and_wait(reader)
        finally:
            driver.close_session(session)


async def _read_gateway(
    driver: Driver,
    request_id: RequestId,
    messages: AsyncIterator[scheduler_pb2.ServeUp],
    outgoing: Channel[scheduler_pb2.ServeDown],
) -> None:
    """Until the gateway closes its side, which it keeps open until the outcome: its end is the stream's."""
    async for up in messages:
        if outgoing.is_closed:
            return  # a newer stream has taken over: what this one still says does not count
        match up.WhichOneof("message"):
            case "cancel":
                reason = cancel_reason_from_wire(up.cancel.reason, CancelReason.DISCONNECT)
                driver.step(CancelAsked(request_id=request_id, reason=reason))
            case "delivered":
                told = up.delivered
                driver.step(
                    DeliveredTold(
                        request_id=request_id,
                        closed_attempt=Attempt(told.attempt),
                        ids=tuple(map(TokenId, told.ids)),
                        complete=(finish_reason_from_wire(told.finish_reason) or FinishReason.STOP)
                        if told.complete
                        else None,
                    )
                )
            case _:
                pass  # Start is said once; what a newer gateway may add
    outgoing.close()


async def _read_worker(
    driver: Driver,
    session: SessionId,
    messages: AsyncIterator[scheduler_pb2.SessionUp],
    outgoing: Channel[scheduler_pb2.SessionDown],
) -> None:
    """Until the worker closes its side: then the session is over."""
    async for up in messages:
        match up.WhichOneof("message"):
            case "inventory":
                entries = tuple(
                    InventoryEntry(
                        key=key_from_wire(each.key),
                        state=_sequence_state_from_wire(each.sequence_state),
                        attach_ticket=each.attach_ticket,
                        last_index=each.last_index,
                        finish_reason=finish_reason_from_wire(each.finish_reason),
                    )
                    for each in up.inventory.entries
                )
                driver.step(InventoryTold(session=session, entries=entries))
            case "heartbeat":
                driver.step(HeartbeatTold(session=session, capacity=_capacity_from_wire(up.heartbeat)))
            case "event":
                report = _report_from_wire(up.event)
                if report is None:
                    continue  # of a newer worker, and of no use here; acknowledged with the next one that is
                driver.step(
                    ReportTold(session=session, number=up.event.number, key=key_from_wire(up.event.key), report=report)
                )
            case _:
                raise ServingError(ErrorCode.INVALID_REQUEST, "hello is said once")
    outgoing.close()


async def _first(messages: AsyncIterator[_Up]) -> _Up | None:
    """The first message, or None where the peer closed its side or said nothing in time."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            return await anext(messages, None)
    except TimeoutError:
        return None


async def _refuse_standby(context: "ServeContext | SessionContext | CancelContext | StatusContext") -> NoReturn:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "not the active scheduler")


def _facts_from_wire(hello: scheduler_pb2.WorkerHello) -> WorkerFacts:
    role = _ROLE_FROM_WIRE.get(hello.role)
    if role is None:
        raise ServingError(ErrorCode.INVALID_REQUEST, "hello: unknown role")
    try:
        return WorkerFacts(
            role=role,
            ref=WorkerRef(WorkerId(hello.worker_id), Incarnation(hello.incarnation)),
            address=hello.address,
            admin_url=hello.admin_url,
            pid=hello.pid,
            layout=hello.layout.SerializeToString(deterministic=True),
            block_size=hello.layout.block_size,
            num_blocks=hello.num_blocks,
            max_sequences=hello.max_sequences,
            token_budget=hello.token_budget,
            is_draining=hello.draining,
        )
    except ValueError as error:
        raise ServingError(ErrorCode.INVALID_REQUEST, f"hello: {error}") from error


def _sequence_state_from_wire(name: str) -> SequenceState:
    """What a newer worker may add holds something: the word for the least of it."""
    try:
        return SequenceState(name)
    except ValueError:
        return SequenceState.WAITING_KV


def _capacity_from_wire(heartbeat: scheduler_pb2.Heartbeat) -> Capacity:
    return Capacity(
        commands_seen=heartbeat.commands_seen,
        blocks=dict(heartbeat.blocks),
        sequences=dict(heartbeat.sequences),
        queued_prompt_tokens=heartbeat.queued_prompt_tokens,
        last_step_age_s=heartbeat.last_step_age_ms / 1000,
        is_busy=heartbeat.busy,
        is_draining=heartbeat.draining,
    )


def _report_from_wire(event: scheduler_pb2.WorkerEvent) -> WorkerReport | None:
    match event.WhichOneof("event"):
        case "reserved":
            return ReservedTold(
                target=target_from_wire(event.reserved.target), attach_ticket=event.reserved.attach_ticket
            )
        case "reserve_refused":
            return ReserveRefusedTold(free_blocks=event.reserve_refused.free_blocks)
        case "prefill_done":
            return PrefillDoneTold(computed_tokens=event.prefill_done.computed_tokens)
        case "kv_committed":
            return KvCommittedTold()
        case "sequence_done":
            done = event.sequence_done
            return SequenceDoneTold(
                finish_reason=finish_reason_from_wire(done.finish_reason) or FinishReason.STOP,
                completion_tokens=done.completion_tokens,
            )
        case "preempted":
            return PreemptedTold()
        case "attempt_failed":
            return AttemptFailedTold(error=detail_to_error(event.attempt_failed.error))
        case "released":
            released = event.released
            work = Work(
                computed_tokens=released.computed_tokens,
                replayed_tokens=released.replayed_tokens,
                undelivered_tokens=released.undelivered_tokens,
            )
            return ReleasedTold(blocks_freed=released.blocks_freed, work=work)
        case None:
            return None
