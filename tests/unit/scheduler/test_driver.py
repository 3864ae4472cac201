"""Effects performed: order of writes, bounds of the outgoing channels, waiting for a release."""

import asyncio
from collections.abc import Callable

import pytest

from scheduler import driver as driver_module
from scheduler.core import CoreLimits, SchedulerCore
from scheduler.driver import Driver
from scheduler.messages import (
    CancelAsked,
    InventoryTold,
    PrefillDoneTold,
    ReportTold,
    SessionOpened,
    StartReceived,
    StateBack,
    StreamId,
    Ticked,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, WorkerId
from shared.domain.request import CancelReason, RequestState, Role, StoredRequest
from shared.domain.worker import LossLimits, WorkerFacts, WorkerRef
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from tests.support.scheduler_peers import ANSWER_S, make_spec


class Clock:
    """Stands still."""

    def monotonic(self) -> float:
        return 5.0

    def unix_ms(self) -> int:
        return 5


class SlowStore:
    """Each write waits until it is let through; some fail."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(0)
        self.is_away = False
        self.begun: list[tuple[str, RequestState]] = []

    async def _write(self, stored: StoredRequest) -> None:
        self.begun.append((stored.request_id, stored.state))
        await self.gate.acquire()
        if self.is_away:
            raise ServingError(ErrorCode.STATE_UNAVAILABLE, "away")

    admit = place = finish = rewrite = _write

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None:
        return None

    async def clear(self, request_id: RequestId, key_hash: str) -> None:
        return None


@pytest.fixture
def store() -> SlowStore:
    """A store that is slow."""
    return SlowStore()


@pytest.fixture
def driver(store: SlowStore) -> Driver:
    """Past its first moments, with one ready worker of each role, whose sessions nobody reads."""
    limits = CoreLimits(
        max_queued_requests=9,
        max_queued_prompt_tokens=999,
        loss=LossLimits(),
        gateway_grace_s=5.0,
        store_hold_s=0.0,
    )
    made = Driver(
        SchedulerCore(limits, Epoch(1)),
        store=store,
        marks=store,
        clock=Clock(),
        metrics=Metrics("scheduler", "scheduler"),
        log=get_logger("test"),
    )
    for role in (Role.PREFILL, Role.DECODE):
        session, _ = made.open_session()
        made.step(SessionOpened(session=session, facts=facts(role), epoch_seen=Epoch(0)))
        made.step(InventoryTold(session=session, entries=()))
    return made


def facts(role: Role) -> WorkerFacts:
    """Ten blocks."""
    return WorkerFacts(
        role=role,
        ref=WorkerRef(WorkerId(role.value), Incarnation(1)),
        address="a",
        admin_url="",
        pid=1,
        layout=b"l",
        block_size=16,
        num_blocks=10,
        max_sequences=9,
        token_budget=256,
    )


def start(driver: Driver, name: str = "r1") -> StreamId:
    """A Serve stream with its Start."""
    stream, _ = driver.open_stream()
    driver.step(
        StartReceived(
            stream=stream,
            spec=make_spec(name),
            gateway_incarnation=Incarnation(1),
            last_attempt_seen=Attempt(0),
            epoch_seen=Epoch(0),
            unix_ms=1,
        )
    )
    return stream


async def until(condition: Callable[[], object]) -> None:
    """Waits until it is true."""
    async with asyncio.timeout(ANSWER_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_writes_of_one_request_keep_their_order(driver: Driver, store: SlowStore) -> None:
    """A cancel during the first write: the outcome is written after it, not beside it."""
    async with asyncio.TaskGroup() as group:
        lanes = group.create_task(driver.run())
        start(driver)
        await until(lambda: store.begun)
        driver.step(CancelAsked(request_id=RequestId("r1"), reason=CancelReason.DISCONNECT))
        await asyncio.sleep(0)
        assert [("r1", RequestState.QUEUED)] == store.begun
        store.gate.release()
        await until(lambda: len(store.begun) == 2)
        assert ("r1", RequestState.CANCELLED) == store.begun[1]
        assert driver.idle.is_set()
        lanes.cancel()


async def test_once_redis_is_known_to_be_away_nobody_waits_for_it(driver: Driver, store: SlowStore) -> None:
    """Admission is refused without a write; after StateBack what is owed is written first."""
    async with asyncio.TaskGroup() as group:
        lanes = group.create_task(driver.run())
        store.is_away = True
        start(driver)
        store.gate.release()
        await until(lambda: not driver.core.is_state_ready)
        start(driver, "r2")
        assert 1 == len(store.begun)
        store.is_away = False
        driver.step(StateBack())
        await until(lambda: len(store.begun) == 2)
        assert ("r1", RequestState.FAILED) == store.begun[1]
        assert not driver.core.is_state_ready
        store.gate.release()
        await until(lambda: driver.core.is_state_ready)
        lanes.cancel()


async def test_a_worker_that_does_not_read_loses_its_session(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel is bounded; it dials again and gets its commands again."""
    monkeypatch.setattr(driver_module, "MAX_SESSION_MESSAGES", 1)
    session, channel = driver.open_session()
    driver.step(SessionOpened(session=session, facts=facts(Role.DECODE), epoch_seen=Epoch(0)))
    driver.step(InventoryTold(session=session, entries=()))
    # The welcome fills the channel; the acknowledgement is one message too many.
    key = RequestKey(RequestId("nobody"), Attempt(1))
    driver.step(ReportTold(session=session, number=1, key=key, report=PrefillDoneTold()))
    assert (True, None) == (channel.is_closed, driver.core.fleet.by_session(session))


async def test_an_unknown_request_is_released(driver: Driver) -> None:
    """There is nothing to wait for; an unreleased one is waited for in vain."""
    assert await driver.wait_released(RequestId("nobody"), 0.0)
    start(driver)
    assert not await driver.wait_released(RequestId("r1"), 0.01)
    driver.step(Ticked())
    driver.step(CancelAsked(request_id=RequestId("r1"), reason=CancelReason.DELETE))
    assert await driver.wait_released(RequestId("r1"), ANSWER_S)


async def test_written_tells_whether_a_record_is_on_its_way(driver: Driver, store: SlowStore) -> None:
    """A scheduler that is stopped waits for it."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(driver.run())
        assert driver.written.is_set()
        start(driver)
        assert not driver.written.is_set()
        await until(lambda: store.begun)
        assert not driver.written.is_set()
        store.gate.release()  # admitted; placed follows
        await until(lambda: len(store.begun) == 2)
        assert not driver.written.is_set()
        store.gate.release()
        async with asyncio.timeout(ANSWER_S):
            await driver.written.wait()
        task.cancel()


async def test_hanging_up_ends_every_stream_and_session(driver: Driver) -> None:
    """So that nobody waits for a scheduler that is gone."""
    _, stream = driver.open_stream()
    _, session = driver.open_session()
    driver.hang_up()
    assert [True, True] == [stream.is_closed, session.is_closed]
