"""Time, the lease, marks and the records of others, with a lease that does what the test says."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import cast

import pytest

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.driver import Driver
from scheduler.ledger import Entry
from scheduler.messages import CancelAsked, CoreEvent, StateBack, StateLost, Ticked
from scheduler.reaper import reap, take_over_records
from shared.domain.errors import ErrorCode, ServingError
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
    """Three marks; one of a request that nobody knows, and one that the client with key "a" has left on another's."""

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None:
        return CancelReason.DELETE if key_hash == "a" else None

    async def watch(self) -> AsyncGenerator[RequestId]:
        yield RequestId("another's")
        yield RequestId("known")
        yield RequestId("unknown")
        await asyncio.Event().wait()


class FakeRecords:
    """A store with records of three schedulers; the second one ends while it is looked at."""

    def __init__(self) -> None:
        self.written: list[StoredRequest] = []

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

    async def rewrite(self, stored: StoredRequest) -> None:
        if stored.request_id == "r4":
            raise ServingError(ErrorCode.STALE_ATTEMPT, "the record was refused: ended")
        self.written.append(stored)


async def test_redis_going_and_coming_is_told_once_each_way_until_the_lease_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And time is told from the start."""
    monkeypatch.setattr("scheduler.reaper.REDIS_LOOK_S", 0.0)
    driver = FakeDriver()
    keeper = FakeKeeper([True, False, True, True])

    await reap(cast(Driver, driver), cast(LeaseKeeper, keeper), FakeCancels(), FakeRecords())

    assert [StateLost, StateBack] == [type(event) for event in driver.told if isinstance(event, StateLost | StateBack)]
    assert Ticked() in driver.told


async def test_marks_of_known_requests_become_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their own clients left them; those of unknown ones are read again when their request is admitted."""
    driver = FakeDriver()
    known = {RequestId("known"): SimpleNamespace(key_hash="a"), RequestId("another's"): SimpleNamespace(key_hash="b")}
    monkeypatch.setattr(driver.core.ledger, "get", known.get)

    await reap(cast(Driver, driver), cast(LeaseKeeper, FakeKeeper([True] * 5)), FakeCancels(), FakeRecords())

    cancel = CancelAsked(request_id=RequestId("known"), reason=CancelReason.DELETE)
    assert [cancel] == [event for event in driver.told if isinstance(event, CancelAsked)]


async def test_records_of_earlier_schedulers_are_taken_over_under_our_epoch() -> None:
    """As they are, so that their writer is refused from now on; one that has just ended is left alone."""
    store = FakeRecords()

    taken = await take_over_records(store, Epoch(6))

    assert [("r3", RequestState.DECODING, 6), ("r5", RequestState.DECODING, 6)] == [
        (stored.request_id, stored.state, stored.epoch) for stored in store.written
    ]
    assert tuple(store.written) == taken


async def test_a_store_that_is_away_is_no_empty_store() -> None:
    """Taking over without the records would lose them all."""

    class Away(FakeRecords):
        async def rewrite(self, stored: StoredRequest) -> None:
            raise ServingError(ErrorCode.STATE_UNAVAILABLE, "away")

    with pytest.raises(ServingError) as caught:
        await take_over_records(Away(), Epoch(6))

    assert ErrorCode.STATE_UNAVAILABLE is caught.value.code


async def test_a_store_that_forgot_between_two_looks_is_written_again() -> None:
    """It answered each time, yet a live record is gone: as if Redis had been away."""
    driver = FakeDriver()
    admitted = Admitted(spec=make_spec(), gateway_incarnation=Incarnation(1), unix_ms=1)
    record = advance(None, admitted, 0.0, RetryRule()).record
    driver.core.ledger.add(Entry(record=record, stream=None, is_written=True))

    await reap(cast(Driver, driver), cast(LeaseKeeper, FakeKeeper([True])), FakeCancels(), FakeRecords())

    told = [type(event) for event in driver.told if isinstance(event, StateLost | StateBack)]
    assert [StateLost, StateBack] == told[:2]
