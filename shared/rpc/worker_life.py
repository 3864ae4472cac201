"""From ready to stopped: what prefill and decode workers have in common around their session."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from shared.domain.clock import Clock
from shared.rpc.server import RunningServer
from shared.rpc.worker_session import WorkerSession
from shared.settings import ServiceSettings
from shared.state.client import StateClient
from shared.state.leadership import Leadership
from shared.state.locate import SchedulerLocator

# A worker whose engine died says so on /healthz for this long, and lets its last events be acknowledged; then it ends,
# so that it is restarted also where nobody asks /healthz.
DEAD_LINGER_S = 10.0
_FLUSH_S = 2.0  # for the last events of a drained worker, and the answers that they call for
# What has not ended by itself is given to others while there is time left: for its events, and for what they let go of.
_HAND_OVER_S = 5.0
_POLL_S = 0.05


class EngineDied(Exception):
    """The engine's thread has ended by an exception; a new process is needed."""


class WorkerReadiness(Protocol):
    """The part of `shared.process.Readiness` that is used here."""

    def set(self, ready: bool, reason: str = "") -> None: ...


class WorkerProcess(Protocol):
    """The part of `shared.process.Process` that is used here."""

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> FilteringBoundLogger: ...

    @property
    def stopping(self) -> asyncio.Event: ...

    @property
    def readiness(self) -> WorkerReadiness: ...

    def set_dead(self, reason: str) -> None: ...


class WorkerTable(Protocol):
    """The worker's table, as far as its life matters."""

    is_draining: bool

    @property
    def is_idle(self) -> bool: ...

    def hand_over(self) -> None: ...

    def on_engine_dead(self) -> None: ...


class WorkerLife:
    """`on_engine_dead` goes to the step loop; `run` is the main of the worker once everything is connected."""

    def __init__(self, process: WorkerProcess, table: WorkerTable, *, drain_timeout_s: float) -> None:
        self._process = process
        self._table = table
        self._drain_timeout_s = drain_timeout_s
        self._engine_died = asyncio.Event()

    def on_engine_dead(self, error: BaseException) -> None:
        """Not ready and not alive at once; what runs is reported as failed."""
        self._process.log.error("engine died", exc_info=error)
        self._process.set_dead("the engine thread has died")
        self._engine_died.set()
        self._table.on_engine_dead()

    async def run(self, session: WorkerSession, server: RunningServer) -> bool:
        """Ready while a scheduler has greeted us. True when drained, False a while after the engine died."""
        process = self._process
        was_ready = False
        while not (process.stopping.is_set() or self._engine_died.is_set()):
            is_ready = session.is_established
            if is_ready is not was_ready:
                was_ready = is_ready
                process.readiness.set(is_ready, "" if is_ready else "no scheduler")
                await server.set_serving(is_ready)
            await asyncio.sleep(_POLL_S)
        await server.set_serving(False)
        if self._engine_died.is_set():
            await self._wait(process.stopping.is_set, DEAD_LINGER_S)
            return False
        process.readiness.set(False, "draining")
        self._table.is_draining = True
        session.drain()
        # A short limit is shared by both.
        own_s = max(self._drain_timeout_s - _HAND_OVER_S, self._drain_timeout_s / 2)
        await self._wait(lambda: self._table.is_idle or self._engine_died.is_set(), own_s)
        if not self._table.is_idle:
            process.log.info("handing over what has not ended")
            self._table.hand_over()
            await self._wait(lambda: self._table.is_idle or self._engine_died.is_set(), _FLUSH_S)
        # The last heartbeat says that nothing is held: the end of the session is then no loss.
        session.heartbeat_soon()
        await self._wait(lambda: session.num_unacknowledged == 0 and session.is_told, _FLUSH_S)
        process.log.info("drained", is_idle=self._table.is_idle, unacknowledged=session.num_unacknowledged)
        return not self._engine_died.is_set()

    async def _wait(self, is_met: Callable[[], bool], at_most_s: float) -> None:
        """Asks now and then: what is waited for are counts of tables, which know of nobody who waits."""
        until = self._process.clock.monotonic() + at_most_s
        while not is_met():
            if self._process.clock.monotonic() >= until:
                return
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def scheduler_locator(config: ServiceSettings, clock: Clock) -> AsyncGenerator[SchedulerLocator]:
    """Where the scheduler is: the address of the settings, or the lease record in Redis."""
    if config.scheduler is not None:
        yield SchedulerLocator(None, config.scheduler)
        return
    client = StateClient(config.redis_url, timeout_s=config.redis_timeout_s)
    try:
        yield SchedulerLocator(Leadership(client, clock), None)
    finally:
        await client.close()
