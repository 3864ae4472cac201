"""What happens without a message: time, the lease, Redis coming and going, cancel marks, what others left."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Protocol

from scheduler.driver import Driver
from scheduler.messages import CancelAsked, StateBack, StateLost, Ticked
from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, RequestId
from shared.domain.request import CancelReason, StoredRequest
from shared.state.lease import LeaseKeeper, LeaseState

TICK_S = 0.25  # all waits that it ends are whole seconds; one tick costs well under a millisecond
REDIS_LOOK_S = 0.25  # while Redis is away: admission is back this soon after it


class CancelWatch(Protocol):
    """What is needed of `shared.state.cancellation`."""

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None: ...

    def watch(self) -> AsyncGenerator[RequestId]: ...


class RecordLook(Protocol):
    """What is needed of `shared.state.requests` while active."""

    async def load(self, request_id: RequestId) -> StoredRequest | None: ...


class RecordsOfOthers(Protocol):
    """What is needed of `shared.state.requests`."""

    async def load_live(self) -> Sequence[StoredRequest]: ...

    async def rewrite(self, stored: StoredRequest) -> None: ...


async def reap(driver: Driver, keeper: LeaseKeeper, cancels: CancelWatch, records: RecordLook) -> None:
    """Until cancelled; returns when the lease is lost, after which nothing may be commanded any more."""
    async with asyncio.TaskGroup() as group:
        ticks = spawn(group, _tick(driver), name="reaper tick")
        watch = spawn(group, _watch_cancels(driver, cancels), name="cancel marks")
        await _keep_lease(driver, keeper, records)
        ticks.cancel()
        watch.cancel()


async def take_over_records(store: RecordsOfOthers, epoch: Epoch) -> tuple[StoredRequest, ...]:
    """What an earlier scheduler left, oldest first, written under our epoch: from here on its own writes are refused.

    Raises STATE_UNAVAILABLE.
    """
    taken: list[StoredRequest] = []
    for stored in await store.load_live():
        ours = replace(stored, epoch=epoch)
        try:
            await store.rewrite(ours)
        except ServingError as error:
            if error.code is not ErrorCode.STALE_ATTEMPT:
                raise
            continue  # the earlier one has just ended it, or it is a later one's
        taken.append(ours)
    return tuple(taken)


async def _tick(driver: Driver) -> None:
    while True:
        driver.step(Ticked())
        await asyncio.sleep(TICK_S)


async def _keep_lease(driver: Driver, keeper: LeaseKeeper, records: RecordLook) -> None:
    while keeper.state is LeaseState.ACTIVE:
        wait_s = await keeper.step()
        if not keeper.is_redis_reachable:
            driver.step(StateLost())
        elif not driver.core.is_state_ready and keeper.state is LeaseState.ACTIVE:
            driver.step(StateBack())
        elif await _has_forgotten(driver, records):
            driver.step(StateLost())
            driver.step(StateBack())
        await asyncio.sleep(wait_s if driver.core.is_state_ready else min(wait_s, REDIS_LOOK_S))


async def _has_forgotten(driver: Driver, records: RecordLook) -> bool:
    """Whether Redis was emptied between two looks (a restart takes 0.1 s): the oldest live record tells."""
    oldest = next((entry for entry in driver.core.ledger.live() if entry.is_written), None)
    if oldest is None:
        return False
    with contextlib.suppress(ServingError):  # away now: the next look says so
        return await records.load(oldest.request_id) is None
    return False


async def _watch_cancels(driver: Driver, cancels: CancelWatch) -> None:
    async with contextlib.aclosing(cancels.watch()) as marked:
        async for request_id in marked:
            entry = driver.core.ledger.get(request_id)
            if entry is None:
                continue  # its mark is read again when it is admitted
            with contextlib.suppress(ServingError):  # Redis went away in between: the watch tells every mark again
                reason = await cancels.read(request_id, entry.key_hash)
                if reason is not None:
                    driver.step(CancelAsked(request_id=request_id, reason=reason))
