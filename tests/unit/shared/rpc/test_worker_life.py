"""Ready, draining, dead: what a worker's process shows and when it ends."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from structlog.typing import FilteringBoundLogger

from shared.domain.clock import Clock
from shared.obs.logs import get_logger
from shared.process import RealClock
from shared.rpc import worker_life
from shared.rpc.server import RunningServer
from shared.rpc.worker_life import WorkerLife
from shared.rpc.worker_session import WorkerSession
from shared.settings import ServiceSettings
from tests.support.hand_clock import HandClock


class FakeReadiness:
    """Keeps every change."""

    def __init__(self) -> None:
        self.changes: list[tuple[bool, str]] = []

    def set(self, ready: bool, reason: str = "") -> None:
        """Remember it."""
        self.changes.append((ready, reason))


class LookedAtClock(RealClock):
    """Ten milliseconds pass with each look at it, however long that takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Then."""
        self.now += 0.01
        return self.now


class FakeProcess:
    """A process around nothing."""

    def __init__(self) -> None:
        self.clock: Clock = RealClock()
        self.log: FilteringBoundLogger = get_logger("test")
        self.stopping = asyncio.Event()
        self.readiness = FakeReadiness()
        self.dead_reasons: list[str] = []

    def set_dead(self, reason: str) -> None:
        """Remember it."""
        self.dead_reasons.append(reason)


class FakeTable:
    """Idle when the test says so."""

    def __init__(self) -> None:
        self.is_draining = False
        self.is_idle = False
        self.num_deaths = 0
        self.num_hand_overs = 0
        self.is_idle_after_hand_over = True

    def hand_over(self) -> None:
        """Count it."""
        self.num_hand_overs += 1
        self.is_idle = self.is_idle_after_hand_over

    def on_engine_dead(self) -> None:
        """Count it."""
        self.num_deaths += 1


class FakeSession:
    """Established when the test says so."""

    def __init__(self) -> None:
        self.is_established = False
        self.num_unacknowledged = 0
        self.is_draining = False
        self.is_told = True
        self.num_heartbeats = 0

    def heartbeat_soon(self) -> None:
        """Count it."""
        self.num_heartbeats += 1

    def drain(self) -> None:
        """Remember it."""
        self.is_draining = True


class FakeServer:
    """Keeps what gRPC health says."""

    def __init__(self) -> None:
        self.changes: list[bool] = []

    async def set_serving(self, serving: bool) -> None:
        """Remember it."""
        self.changes.append(serving)


class Bench:
    """A life with everything around it replaced."""

    def __init__(self) -> None:
        self.process, self.table, self.session, self.server = FakeProcess(), FakeTable(), FakeSession(), FakeServer()
        self.life = WorkerLife(self.process, self.table, drain_timeout_s=0.2)

    async def run(self) -> bool:
        """To its end."""
        return await self.life.run(cast(WorkerSession, self.session), cast(RunningServer, self.server))

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Polls the fakes."""
        async with asyncio.timeout(30):
            while not is_met():
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_life, "_POLL_S", 0.005)
    monkeypatch.setattr(worker_life, "DEAD_LINGER_S", 0.05)


async def test_ready_only_while_a_scheduler_has_greeted_us() -> None:
    """/readyz and gRPC health follow the session."""
    bench = Bench()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.run())
        for established in (True, False):
            bench.session.is_established = established
            await bench.until(lambda established=established: bench.server.changes[-1:] == [established])
        bench.table.is_idle = True
        bench.process.stopping.set()

    assert task.result() is True
    assert bench.process.readiness.changes == [(True, ""), (False, "no scheduler"), (False, "draining")]


async def test_a_drain_waits_for_the_work_and_its_last_events() -> None:
    """Told to the scheduler and the table first; ends when nothing is held, and everything is acknowledged and told."""
    bench = Bench()
    bench.session.num_unacknowledged = 1
    bench.process.clock = HandClock()  # no limit ends a wait here, however late this test looks
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.run())
        bench.process.stopping.set()
        await bench.until(lambda: bench.session.is_draining and bench.table.is_draining)
        assert not task.done()
        bench.table.is_idle = True
        bench.session.is_told = False
        bench.session.num_unacknowledged = 0
        await bench.until(lambda: bench.session.num_heartbeats > 0)
        assert not task.done()
        bench.session.is_told = True

    assert task.result() is True
    assert 0 == bench.table.num_hand_overs


async def test_what_does_not_end_in_time_is_handed_over() -> None:
    """Within the limit of the drain, so that others can go on with it."""
    bench = Bench()
    bench.process.clock = clock = LookedAtClock()
    bench.process.stopping.set()
    assert await bench.run() is True
    assert 1 == bench.table.num_hand_overs
    assert 0.1 <= clock.now < 0.2


async def test_a_drain_is_bounded() -> None:
    """Work that cannot even be handed over is left."""
    bench = Bench()
    bench.table.is_idle_after_hand_over = False
    bench.process.stopping.set()
    async with asyncio.timeout(30):
        assert await bench.run() is True


async def test_a_dead_engine_ends_the_process_after_it_was_seen() -> None:
    """Dead at once for every probe, attempts failed at once; some time later the process ends, not as if drained."""
    bench = Bench()
    bench.session.is_established = True
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.run())
        await bench.until(lambda: bench.server.changes == [True])
        bench.life.on_engine_dead(MemoryError())

    assert task.result() is False
    assert bench.process.dead_reasons == ["the engine thread has died"]
    assert bench.table.num_deaths == 1
    assert bench.server.changes == [True, False]


@pytest.mark.parametrize(("scheduler", "expected"), [(None, [("redis://r:1", 3.0)]), ("s:7000", [])])
async def test_redis_has_the_time_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, scheduler: str | None, expected: list[tuple[str, float]]
) -> None:
    """Where the scheduler is looked up; a fixed address asks nobody."""
    made: list[tuple[str, float]] = []

    class FakeClient:
        def __init__(self, url: str, *, timeout_s: float) -> None:
            made.append((url, timeout_s))

        async def close(self) -> None:
            """Nothing."""

    monkeypatch.setattr(worker_life, "StateClient", FakeClient)
    config = ServiceSettings(redis_url="redis://r:1", redis_timeout_s=3.0, scheduler=scheduler)
    async with worker_life.scheduler_locator(config, RealClock()):
        assert expected == made
