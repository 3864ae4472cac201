"""The worker's side of `Scheduler.Session`: one stream to the active scheduler, dialled again while the worker lives.

Order on each stream: hello, the events not yet acknowledged, the inventory, then heartbeats and new events; commands
come down. What a worker holds does not depend on this stream: a broken one ends nothing. What a command means is the
handler's business.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
from structlog.typing import FilteringBoundLogger

from shared.aio.backoff import Backoff
from shared.aio.scope import spawn
from shared.domain.clock import Clock
from shared.domain.errors import ServingError
from shared.domain.ids import Epoch, Incarnation, WorkerId
from shared.domain.refusals import RefusedKind
from shared.domain.request import Role
from shared.obs.metrics import Metrics
from shared.rpc.calls import end_call
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc

HEARTBEAT_S = 1.0  # a fifth of the silence after which a worker counts as lost
HEARTBEAT_SPACING_S = 0.02  # heartbeats asked for by events: a prefill step takes longer than this
REDIAL_INITIAL_S = 0.05
REDIAL_MAX_S = 1.0  # a restarted scheduler waits at most this long for its workers
# The active scheduler may be replaced without its sessions breaking: cut off from Redis alone. A new one waits 5 s for
# the workers of what it adopts.
LOOK_INTERVAL_S = 1.0
WELCOME_TIMEOUT_S = 5.0  # a scheduler that does not greet within the time after which we would be lost anyway
# Each attempt makes at most five events and a scheduler acknowledges at once, so thousands mean a scheduler that
# commands and never acknowledges: its session is closed and dialled again, and no further command taken from it.
MAX_UNACKNOWLEDGED_EVENTS = 4096

_ROLE_TO_WIRE = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What the hello says of this worker for as long as it lives."""

    role: Role
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    admin_url: str
    pid: int
    layout: common_pb2.KvLayout
    num_blocks: int
    max_sequences: int
    token_budget: int = 0


class SessionHandler(Protocol):
    """The worker's table, as the session sees it. All calls are synchronous and made in the event loop."""

    def handle_command(self, command: scheduler_pb2.Command, epoch: Epoch) -> None:
        """Apply it; answers come by `WorkerSession.post`."""
        ...

    def inventory(self) -> scheduler_pb2.Inventory:
        """All that is held, and the ends of the last 60 s."""
        ...

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """The counts now; the session fills in `commands_seen` and `draining`."""
        ...


class _SessionBroken(Exception):
    """The stream is over, with a reason for the log; the next one is dialled."""


class WorkerSession:
    """Runs until cancelled. `post` and `heartbeat_soon` may be called at any time, with or without a stream."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        handler: SessionHandler,
        locate: Callable[[], Awaitable[str]],
        channel_for: Callable[[str], grpc.aio.Channel],
        backoff: Backoff,
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._identity = identity
        self._handler = handler
        self._locate = locate
        self._channel_for = channel_for
        self._backoff = backoff
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._events: deque[scheduler_pb2.WorkerEvent] = deque()
        self._last_number = 0
        self._highest_epoch = Epoch(0)
        self._wake = asyncio.Event()
        self._is_established = False
        self._is_draining = False
        self._heartbeat_at = 0.0
        self._heartbeat_asked = False
        self._sent_upto = 0  # number of the last event written to the present stream
        self._commands_seen = 0

    @property
    def is_established(self) -> bool:
        """A scheduler has greeted us on the present stream."""
        return self._is_established

    @property
    def highest_epoch(self) -> Epoch:
        return self._highest_epoch

    @property
    def num_unacknowledged(self) -> int:
        return len(self._events)

    @property
    def is_told(self) -> bool:
        """The last heartbeat that was asked for has been written, or there is nobody to write it to."""
        return not self._heartbeat_asked or not self._is_established

    def post(self, event: scheduler_pb2.WorkerEvent) -> None:
        """Numbers the event and keeps it until the scheduler has acknowledged it."""
        self._last_number += 1
        event.number = self._last_number
        self._events.append(event)
        self._log.debug(
            "reported", what=event.WhichOneof("event"), request_id=event.key.request_id, attempt=event.key.attempt
        )
        self._wake.set()

    def heartbeat_soon(self) -> None:
        """Capacity has changed for the better: tell it now, not at the next second."""
        self._heartbeat_asked = True
        self._wake.set()

    def drain(self) -> None:
        """From now on the scheduler is told to place nothing here."""
        self._is_draining = True
        self.heartbeat_soon()

    async def run(self) -> None:
        """Dials, holds the stream, dials again after a growing delay.

        Each try is a task of its own: a group that fails in the moment of its cancel tells of the failure alone (until
        Python 3.13), and a loop in the same task would go on for good.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.wait({spawn(group, self._try_one(), name="session try")})
                self._is_established = False
                await asyncio.sleep(self._backoff.next_delay())

    async def _try_one(self) -> None:
        """To the end of one stream, however it ends."""
        reason = ""
        try:
            await self._hold_one()
        except* _SessionBroken as broken:
            reason = str(broken.exceptions[0])
        except* ServingError as no_address:
            reason = str(no_address.exceptions[0])
        except* grpc.aio.AioRpcError as failed:
            reason = _describe(failed.exceptions[0])
        except* asyncio.InvalidStateError:  # what grpc raises for a write to a call that has ended
            reason = "the stream has ended"
        self._log.debug("session ended", reason=reason)

    async def _hold_one(self) -> None:
        address = await self._locate()
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel_for(address))
        call = stub.Session()
        try:
            self._sent_upto = 0
            self._commands_seen = 0
            async with asyncio.TaskGroup() as group:
                spawn(group, self._read(call, address), name="session reader")
                spawn(group, self._write(call), name="session writer")
                spawn(group, self._watch_place(address), name="session watch")
        finally:
            end_call(call)

    async def _watch_place(self, address: str) -> None:
        """Raises _SessionBroken where another scheduler is the active one."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            with contextlib.suppress(ServingError):  # nobody knows: that is no reason to leave this one
                found = await self._locate()
                if found != address:
                    raise _SessionBroken(f"the active scheduler is at {found}")

    def _hello(self) -> scheduler_pb2.WorkerHello:
        identity = self._identity
        return scheduler_pb2.WorkerHello(
            role=_ROLE_TO_WIRE[identity.role],
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            admin_url=identity.admin_url,
            pid=identity.pid,
            layout=identity.layout,
            num_blocks=identity.num_blocks,
            max_sequences=identity.max_sequences,
            token_budget=identity.token_budget,
            scheduler_epoch=self._highest_epoch,
            draining=self._is_draining,
        )

    async def _read(self, call: "_SessionCall", address: str) -> None:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                down = self._check(await call.read())
        except TimeoutError as error:
            raise _SessionBroken("no welcome") from error
        if down.WhichOneof("message") != "welcome":
            raise _SessionBroken("the first message is no welcome")
        self._is_established = True
        self._backoff.reset()
        self._log.info("session established", scheduler=address, epoch=self._highest_epoch)
        while True:
            down = self._check(await call.read())
            match down.WhichOneof("message"):
                case "ack":
                    self._acknowledge(down.ack.upto)
                case "command":
                    if len(self._events) >= MAX_UNACKNOWLEDGED_EVENTS:
                        raise _SessionBroken("the scheduler acknowledges nothing")
                    self._handler.handle_command(down.command, Epoch(down.scheduler_epoch))
                    self._commands_seen = max(self._commands_seen, down.command.number)
                case _:  # a second welcome says nothing new; what a newer scheduler may add is not ours to judge
                    pass

    def _check(self, down: object) -> scheduler_pb2.SessionDown:
        """Raises _SessionBroken at the end of the stream and for a scheduler that has been replaced."""
        if not isinstance(down, scheduler_pb2.SessionDown):
            raise _SessionBroken("the scheduler closed the stream")
        if down.scheduler_epoch < self._highest_epoch:
            self._metrics.refused(RefusedKind.STALE_EPOCH)
            raise _SessionBroken(f"epoch {down.scheduler_epoch} is below {self._highest_epoch}")
        self._highest_epoch = Epoch(down.scheduler_epoch)
        return down

    def _acknowledge(self, upto: int) -> None:
        """Of what was told on this stream: the rest is told first, whatever a scheduler says of it."""
        while self._events and self._events[0].number <= min(upto, self._sent_upto):
            self._events.popleft()

    async def _write(self, call: "_SessionCall") -> None:
        await call.write(scheduler_pb2.SessionUp(hello=self._hello()))
        await self._write_events(call)
        await call.write(scheduler_pb2.SessionUp(inventory=self._handler.inventory()))
        self._heartbeat_asked = True
        while True:
            self._wake.clear()
            await self._write_events(call)
            now = self._clock.monotonic()
            due_at = self._heartbeat_at + (HEARTBEAT_SPACING_S if self._heartbeat_asked else HEARTBEAT_S)
            if now >= due_at:
                self._heartbeat_at = now
                self._heartbeat_asked = False
                await call.write(scheduler_pb2.SessionUp(heartbeat=self._heartbeat()))
                continue
            try:
                async with asyncio.timeout(due_at - now):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the heartbeat is due

    async def _write_events(self, call: "_SessionCall") -> None:
        while True:
            unsent = [event for event in self._events if event.number > self._sent_upto]
            if not unsent:
                return
            for event in unsent:
                self._sent_upto = event.number
                await call.write(scheduler_pb2.SessionUp(event=event))

    def _heartbeat(self) -> scheduler_pb2.Heartbeat:
        heartbeat = self._handler.heartbeat()
        heartbeat.commands_seen = self._commands_seen
        heartbeat.draining = heartbeat.draining or self._is_draining
        return heartbeat


class _SessionCall(Protocol):
    """The part of a grpc.aio call that is used here."""

    async def read(self) -> object: ...

    async def write(self, request: scheduler_pb2.SessionUp) -> None: ...


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details() or ''}"
    return str(error)
