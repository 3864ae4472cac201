"""Time, the lease, marks and orphans, with a lease that does what the test says."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.driver import Driver
from scheduler.ledger import Entry
from scheduler.messages import CancelAsked, CoreEvent, StateBack, StateLost, Ticked
from scheduler.reaper import finish_orphans, reap
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId
from shared.domain.lifecycle import RetryRule, advance
from shared.domain.lifecycle_events import Admitted
from shared.domain.request import CancelReason, RequestState, StoredRequest
from shared.domain.worker import LossLimits
from shared.state.lease import LeaseKeeper, LeaseState
from tests.support.scheduler_peers import make_spec


class FakeKeeper:
    """Each step takes the next of the given looks: is Redis reachable? After the last the lease is lost."""

    def __init__(self, looks: list[bool]) -> None:
        self._looks = looks
        self.state = LeaseState.ACTIVE
        self.is_redis_reachable = True

    async def step(self) -> float:
        if self._looks:
            self.is_redis_reachable = self._looks.pop(0)
        else:
            self.state = LeaseState.LOST
        return 0.0


class FakeDriver:
    """Notes what it is told."""

    def __init__(self) -> None:
        limits = CoreLimits(max_queued_requests=1, max_queued_prompt_tokens=1, loss=LossLimits(), gateway_grace_s=5.0)
        self.core = SchedulerCore(limits, Epoch(1))
        self.told: list[CoreEvent] = []

    def step(self, event: CoreEvent) -> None:
        self.told.append(event)
        if isinstance(event, StateLost):
            self.core.is_state_ready = False
        if isinstance(event, StateBack):
            self.core.is_state_ready = True


class FakeCancels:
    """Two marks; one of a request that nobody knows."""

    async def read(self, request_id: RequestId) -> CancelReason | None:
        return CancelReason.DELETE

    async def watch(self) -> AsyncGenerator[RequestId]:
        yield RequestId("known")
        yield RequestId("unknown")
        await asyncio.Event().wait()


class FakeOrphans:
    """A store with records of three schedulers."""

    def __init__(self) -> None:
        self.finished: list[StoredRequest] = []

    async def load_live(self) -> list[StoredRequest]:
        return [
            StoredRequest(
                request_id=RequestId(f"r{epoch}"),
                state=RequestState.DECODING,
                attempt=Attempt(1),
                epoch=Epoch(epoch),
                gateway_incarnation=Incarnation(1),
                admitted_unix_ms=1,
                seed=1,
            )
            for epoch in (3, 4, 5)
        ]

    async def load(self, request_id: RequestId) -> StoredRequest | None:
        return None

    async def finish(self, stored: StoredRequest) -> None:
        self.finished.append(stored)


async def test_redis_going_and_coming_is_told_once_each_way_until_the_lease_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And time is told from the start."""
    monkeypatch.setattr("scheduler.reaper.REDIS_LOOK_S", 0.0)
    driver = FakeDriver()
    keeper = FakeKeeper([True, False, True, True])

    await reap(cast(Driver, driver), cast(LeaseKeeper, keeper), FakeCancels(), FakeOrphans())

    assert [StateLost, StateBack] == [type(event) for event in driver.told if isinstance(event, StateLost | StateBack)]
    assert Ticked() in driver.told


async def test_marks_of_known_requests_become_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are read again when their request is admitted."""
    driver = FakeDriver()
    known = {RequestId("known"): object()}
    monkeypatch.setattr(driver.core.ledger, "get", known.get)

    await reap(cast(Driver, driver), cast(LeaseKeeper, FakeKeeper([True] * 5)), FakeCancels(), FakeOrphans())

    cancel = CancelAsked(request_id=RequestId("known"), reason=CancelReason.DELETE)
    assert [cancel] == [event for event in driver.told if isinstance(event, CancelAsked)]


async def test_records_of_earlier_schedulers_are_finished_under_our_epoch() -> None:
    """As FAILED; our own are left alone."""
    store = FakeOrphans()

    count = await finish_orphans(store, Epoch(5))

    assert 2 == count
    assert [
        ("r3", RequestState.FAILED, 5, "STATE_UNAVAILABLE"),
        ("r4", RequestState.FAILED, 5, "STATE_UNAVAILABLE"),
    ] == [(stored.request_id, stored.state, stored.epoch, stored.error_code) for stored in store.finished]


async def test_a_store_that_forgot_between_two_looks_is_written_again() -> None:
    """It answered each time, yet a live record is gone: as if Redis had been away."""
    driver = FakeDriver()
    admitted = Admitted(spec=make_spec(), gateway_incarnation=Incarnation(1), unix_ms=1)
    record = advance(None, admitted, 0.0, RetryRule()).record
    driver.core.ledger.add(Entry(record=record, stream=None, is_written=True))

    await reap(cast(Driver, driver), cast(LeaseKeeper, FakeKeeper([True])), FakeCancels(), FakeOrphans())

    told = [type(event) for event in driver.told if isinstance(event, StateLost | StateBack)]
    assert [StateLost, StateBack] == told[:2]
