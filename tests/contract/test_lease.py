import asyncio

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, Incarnation
from shared.state import leadership
from shared.state.client import StateClient
from shared.state.keys import EPOCH, EPOCH_TTL_MS, LEASE, LEASE_TTL_MS
from shared.state.leadership import Leadership, SchedulerLocation
from shared.state.lease import ABSENT_WAIT_S, RENEW_INTERVAL_S, LeaseKeeper, LeaseState
from shared.state.locate import SchedulerLocator
from tests.support.hand_clock import HandClock
from tests.support.redis_server import RedisServer

A_MINUTE_MS = 60_000  # since a write, on the slowest machine


class Candidate:
    """One scheduler process as far as the lease is concerned."""

    def __init__(
        self, client: StateClient, clock: HandClock, number: int, absent_wait_s: float = ABSENT_WAIT_S
    ) -> None:
        self.address = f"10.0.0.{number}:7000"
        self.leadership = Leadership(client, clock)
        self.keeper = LeaseKeeper(
            self.leadership,
            clock,
            holder=Incarnation(number),
            address=self.address,
            absent_wait_s=absent_wait_s,
        )

    async def step(self) -> LeaseState:
        """One look or renewal, whenever it is due."""
        await self.keeper.step()
        return self.keeper.state


@pytest.fixture
def clock() -> HandClock:
    """Moved by the test."""
    return HandClock()


async def become_active(candidate: Candidate, clock: HandClock) -> Epoch:
    """Looks, waits the time, looks again."""
    assert LeaseState.STANDBY == await candidate.step()
    clock.advance(ABSENT_WAIT_S)
    assert LeaseState.ACTIVE == await candidate.step()
    return candidate.keeper.epoch


async def expire_lease(client: StateClient) -> None:
    """As three missed renewals do."""
    await client.call("DEL", LEASE)


async def test_absent_lease_is_taken_after_three_seconds(client: StateClient, clock: HandClock) -> None:
    """Not a moment before; its epoch is the wall clock, and everyone can find it."""
    one = Candidate(client, clock, 1)
    states = [await one.step()]
    for seconds in (1.0, 1.0, 0.9):
        clock.advance(seconds)
        states.append(await one.step())
    clock.advance(0.1)

    assert [LeaseState.STANDBY] * 4 == states
    assert LeaseState.ACTIVE == await one.step()
    assert clock.unix_ms() == one.keeper.epoch
    assert SchedulerLocation(address=one.address, epoch=one.keeper.epoch) == await one.leadership.find()


async def test_standby_waits_while_the_lease_is_held(client: StateClient, clock: HandClock) -> None:
    """A lease seen in between starts the 3 s again."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    await become_active(one, clock)
    for _ in range(5):
        clock.advance(10)
        assert (LeaseState.STANDBY, LeaseState.ACTIVE) == (await two.step(), await one.step())
    await expire_lease(client)
    assert LeaseState.STANDBY == await two.step()
    clock.advance(2)
    assert LeaseState.ACTIVE == await one.step()
    assert LeaseState.STANDBY == await two.step()
    await expire_lease(client)
    clock.advance(2)
    assert LeaseState.STANDBY == await two.step()


async def test_takeover_raises_the_epoch_and_the_old_one_knows(client: StateClient, clock: HandClock) -> None:
    """Even when the wall clock of the new one is behind."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    first = await become_active(one, clock)
    await expire_lease(client)
    clock.set_wall_clock(1)

    assert first + 1 == await become_active(two, clock)
    assert LeaseState.LOST == await one.step()
    assert LeaseState.LOST == await one.step()
    assert two.address == await SchedulerLocator(one.leadership, None).locate()


async def test_old_one_knows_also_after_the_new_one_has_gone(client: StateClient, clock: HandClock) -> None:
    """The lease is absent, but a higher epoch has been given: it is not taken again under the old one."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    await become_active(one, clock)
    await expire_lease(client)
    await become_active(two, clock)
    await two.leadership.release()

    assert LeaseState.LOST == await one.step()


@pytest.mark.parametrize(("seen", "is_above"), [(5, False), (2_000_000_000_000, True)])
async def test_the_next_epoch_is_above_what_peers_have_seen(
    client: StateClient, clock: HandClock, seen: int, is_above: bool
) -> None:
    """Workers that saw a higher epoch than Redis remembers would refuse a lower one: the lease goes back with it."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    first = await become_active(one, clock)
    await one.leadership.release(Epoch(seen))
    clock.set_wall_clock(1)
    assert await one.leadership.find() is None
    assert 0 < await client.call("PTTL", EPOCH) <= EPOCH_TTL_MS

    assert (seen if is_above else first) + 1 == await become_active(two, clock)


async def test_only_the_holder_raises_the_epoch(client: StateClient, clock: HandClock) -> None:
    """One that was replaced changes nothing for the one that came after it."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    await become_active(one, clock)
    await expire_lease(client)
    second = await become_active(two, clock)
    await one.leadership.release(Epoch(second + 100))

    assert LeaseState.ACTIVE == await two.step()
    assert str(second).encode() == await client.call("GET", EPOCH)


@pytest.mark.parametrize("alien", ["", "x", "nan", "inf", "1e300", "\xff"])
async def test_an_epoch_that_is_none_of_ours_is_replaced(client: StateClient, clock: HandClock, alien: str) -> None:
    """Somebody's script has written the key: a scheduler is found all the same, and keeps and returns its lease."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    await client.call("SET", EPOCH, alien)
    first = await become_active(one, clock)
    assert clock.unix_ms() == first
    await client.call("SET", EPOCH, alien)
    clock.advance(1.0)
    assert LeaseState.ACTIVE == await one.step()
    assert str(first).encode() == await client.call("GET", EPOCH)
    await client.call("SET", EPOCH, alien)
    await one.leadership.release(Epoch(first + 10**6))
    assert await become_active(two, clock) > first + 10**6


async def test_a_lease_that_is_none_of_ours_leads_nowhere(client: StateClient, clock: HandClock) -> None:
    """No address to be dialled; it is found when it is gone."""
    one = Candidate(client, clock, 1)
    for address, epoch in ((b"\xff", b"1"), (b"host:1", b"x")):
        await client.call("HSET", LEASE, "holder", "somebody", "address", address, "epoch", epoch)
        assert await one.leadership.find() is None
    assert LeaseState.STANDBY == await one.step()
    clock.advance(ABSENT_WAIT_S)
    assert LeaseState.STANDBY == await one.step()
    await client.call("DEL", LEASE)
    await become_active(one, clock)


async def test_renewal_keeps_epoch_and_prolongs(client: StateClient, clock: HandClock) -> None:
    """Each second, for three more."""
    assert 3 * RENEW_INTERVAL_S * 1000 == LEASE_TTL_MS
    one = Candidate(client, clock, 1)
    epoch = await become_active(one, clock)
    await client.call("PEXPIRE", LEASE, leadership.LEASE_TTL_MS // 2)
    clock.advance(1)

    assert 1.0 == await one.keeper.step()
    assert leadership.LEASE_TTL_MS // 2 < await client.call("PTTL", LEASE) <= leadership.LEASE_TTL_MS
    assert EPOCH_TTL_MS - A_MINUTE_MS < await client.call("PTTL", EPOCH) <= EPOCH_TTL_MS
    assert SchedulerLocation(address=one.address, epoch=epoch) == await one.leadership.find()


async def test_two_standbys_one_winner(client: StateClient, clock: HandClock) -> None:
    """Both have waited long enough: the script gives it to one."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    for candidate in (one, two):
        await candidate.step()
    clock.advance(ABSENT_WAIT_S)

    assert (LeaseState.ACTIVE, LeaseState.STANDBY) == (await one.step(), await two.step())
    assert await two.leadership.acquire(Incarnation(2), two.address) is None


async def test_active_goes_on_while_redis_is_away(client: StateClient, valkey: RedisServer, clock: HandClock) -> None:
    """Under its epoch; back and empty, it has its lease again before a standby may take it."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    epoch = await become_active(one, clock)
    await asyncio.to_thread(valkey.stop)
    for _ in range(3):
        clock.advance(2)
        assert (LeaseState.ACTIVE, LeaseState.STANDBY) == (await one.step(), await two.step())
        assert (False, False) == (one.keeper.is_redis_reachable, two.keeper.is_redis_reachable)
    await asyncio.to_thread(valkey.start)
    assert LeaseState.STANDBY == await two.step()
    clock.advance(1)
    assert (LeaseState.STANDBY, LeaseState.ACTIVE) == (await two.step(), await one.step())

    assert (True, epoch) == (one.keeper.is_redis_reachable, one.keeper.epoch)
    assert SchedulerLocation(address=one.address, epoch=epoch) == await one.leadership.find()
    clock.advance(10)
    assert LeaseState.STANDBY == await two.step()


async def test_outage_starts_the_wait_again(client: StateClient, valkey: RedisServer, clock: HandClock) -> None:
    """Three seconds without a lease count only with Redis reachable all along."""
    one = Candidate(client, clock, 1)
    await one.step()
    clock.advance(2.9)
    await asyncio.to_thread(valkey.stop)
    await one.step()
    await asyncio.to_thread(valkey.start)
    clock.advance(0.2)

    assert LeaseState.STANDBY == await one.step()
    clock.advance(2.9)
    assert LeaseState.STANDBY == await one.step()
    clock.advance(0.1)
    assert LeaseState.ACTIVE == await one.step()


async def test_somebody_else_took_the_empty_redis(client: StateClient, valkey: RedisServer, clock: HandClock) -> None:
    """The one that was away longer finds the other and is lost."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    await become_active(one, clock)
    await asyncio.to_thread(valkey.stop)
    await asyncio.to_thread(valkey.start)
    await become_active(two, clock)

    assert LeaseState.LOST == await one.step()


async def test_released_lease_and_sole_scheduler(client: StateClient, clock: HandClock) -> None:
    """Released, it is absent at once; where no other can exist the wait may be none; the epoch still grows."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2, absent_wait_s=0.0)
    first = await become_active(one, clock)
    await one.leadership.release()
    await one.leadership.release()
    assert await one.leadership.find() is None

    assert LeaseState.ACTIVE == await two.step()
    assert first + 1 == two.keeper.epoch
    await one.leadership.release()
    assert SchedulerLocation(address=two.address, epoch=two.keeper.epoch) == await two.leadership.find()


async def test_locator_remembers(client: StateClient, valkey: RedisServer, clock: HandClock) -> None:
    """The last known address stands while Redis is away or has no lease; without one it is STATE_UNAVAILABLE."""
    one = Candidate(client, clock, 1)
    locator = SchedulerLocator(Leadership(client, clock), None)
    with pytest.raises(ServingError) as caught:
        await locator.locate()
    assert ErrorCode.STATE_UNAVAILABLE == caught.value.code
    await become_active(one, clock)
    assert one.address == await locator.locate()
    await expire_lease(client)
    assert one.address == await locator.locate()
    await asyncio.to_thread(valkey.stop)
    assert one.address == await locator.locate()
    with pytest.raises(ServingError):
        await SchedulerLocator(Leadership(client, clock), None).locate()


async def test_a_slow_look_does_not_lead_back(client: StateClient, clock: HandClock) -> None:
    """What Redis had said before the scheduler was replaced is heard after what it says now."""
    one, two = Candidate(client, clock, 1), Candidate(client, clock, 2)
    slow, found = asyncio.Event(), asyncio.Event()

    class Slow(Leadership):
        """Keeps the first answer back."""

        async def find(self) -> SchedulerLocation | None:
            location = await super().find()
            if not found.is_set():
                found.set()
                await slow.wait()
            return location

    await become_active(one, clock)
    locator = SchedulerLocator(Slow(client, clock), None)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(locator.locate())
        await found.wait()
        await one.leadership.release()
        await become_active(two, clock)
        assert two.address == await locator.locate()
        slow.set()
    assert two.address == first.result()


async def test_fixed_address_asks_nobody() -> None:
    """FIRSTTOKEN_SCHEDULER is used as it is; both or neither is a mistake."""
    assert "scheduler:7000" == await SchedulerLocator(None, "scheduler:7000").locate()
    with pytest.raises(ValueError, match="either"):
        SchedulerLocator(None, None)
