"""Redis away, in every way it can be: what runs goes on, new requests get 503, and it recovers by itself."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack

import pytest

from shared.domain.ids import RequestId
from shared.state.keys import KEY_HASH_FIELD, cancel_key, request_key
from tests.support import leaks
from tests.support.cancelling import live, long_decode, outcomes, wait_blocks_free, wait_outcomes
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpAnswer, HttpStream, exchange
from tests.support.polling import eventually
from tests.support.redis_server import RedisServer, moving_address, own_redis
from tests.support.script import Script, counting

REFUSED_WITHIN_S = 40.0  # Redis stays away until the refusal is there: only a hang takes so long
BACK_WITHIN_S = 60.0
KEY_PREFIX = "firsttoken:1:"
CANCELS = f"{KEY_PREFIX}cancels"
GAP_S = 3.0
# A Redis that is there may be late on a busy machine: half a second, as it is else, is too short for that.
PLAN = ClusterPlan().scripted().setting("redis_timeout_s", 2)
FORGOTTEN = "known-until-the-restart"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def redis_server() -> Generator[RedisServer]:
    """The store that the tests take away."""
    with own_redis() as server:
        yield server


@pytest.fixture(scope="module")
def system(redis_server: RedisServer) -> Generator[Cluster]:
    """A system on that store."""
    with PLAN.redis_url(redis_server.url).start() as cluster:
        yield cluster


@pytest.fixture
async def cluster(system: Cluster) -> AsyncGenerator[Cluster]:
    """Warm before, ready and without leaks after each test."""
    await ask(system.port, counting(2).body())
    baseline = await leaks.capture(system)
    yield system
    await system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(system, baseline)


async def question(cluster: Cluster) -> HttpAnswer:
    """A whole answer of two words, or what came instead."""
    return await exchange(cluster.port, "POST", CHAT_PATH, body=counting(2).body())


def need_replicas(server: RedisServer, count: int) -> None:
    """With fewer than this many it refuses writes; it has none."""
    with server.client as client:
        client.config_set("min-replicas-to-write", count)


OUTAGES: dict[str, tuple[Callable[[RedisServer], None], Callable[[RedisServer], None]]] = {
    "frozen": (RedisServer.pause, RedisServer.resume),
    "killed and back empty": (RedisServer.kill, RedisServer.start),
    "refusing writes": (lambda server: need_replicas(server, 1), lambda server: need_replicas(server, 0)),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_running_streams_go_on_and_new_requests_are_refused(
    cluster: Cluster, redis_server: RedisServer, outage: str
) -> None:
    """A stream across the outage is exact; others are refused in it; cancel works without Redis; afterwards all is as before."""
    take_away, bring_back = OUTAGES[outage]
    before = await outcomes(cluster)
    script = counting(450, step_ms=20)
    async with live(cluster, script) as stream, live(cluster, long_decode()) as doomed:
        record = await collect(stream, until_deltas=3)
        await collect(doomed, until_deltas=2)
        take_away(redis_server)
        try:
            async with asyncio.timeout(REFUSED_WITHIN_S):
                answer = await question(cluster)
            assert 503 == answer.status, answer.body
            assert "state_unavailable" == answer.json()["error"]["code"]
            assert "service_unavailable_error" == answer.json()["error"]["type"]
            assert int(answer.headers["retry-after"]) >= 1
            doomed.cut()
            await eventually(
                lambda: outcomes(cluster),
                lambda now: now["cancelled"] == before["cancelled"] + 1,
                within_s=40.0,
                what="the cancelled stream has ended without Redis",
            )
            await collect(stream, until_deltas=len(record.deltas) + 30, record=record)
        finally:
            bring_back(redis_server)
        back = await eventually(
            lambda: question(cluster), lambda a: a.status == 200, within_s=BACK_WITHIN_S, what="served again"
        )
        await collect(stream, record=record)
    assert counting(2).text() == back.json()["choices"][0]["message"]["content"]
    assert (script.text(), "stop") == (record.text, record.finish_reason)


async def test_live_records_are_written_again(cluster: Cluster, redis_server: RedisServer) -> None:
    """After a restart that forgot everything the record of what runs is there again, and then its outcome."""
    async with live(cluster, long_decode()) as stream:
        await collect(stream, until_deltas=2)
        request_id = stream.headers["x-firsttoken-request"]
        key = f"{KEY_PREFIX}request:{{{request_id}}}"
        with redis_server.client as client:
            client.set(FORGOTTEN, "x")
        redis_server.kill()
        redis_server.start()
        with redis_server.client as client:
            assert not client.exists(FORGOTTEN)  # the record itself may be back already

            async def state() -> str | None:
                return client.hget(key, "state")

            await eventually(state, lambda s: s == "decoding", within_s=BACK_WITHIN_S, what="the record is back")
            stream.cut()
            await eventually(state, lambda s: s == "cancelled", within_s=30.0, what="the outcome is written")
            assert 0 < client.ttl(key) <= 600


async def test_a_failover_to_another_server_that_is_empty() -> None:
    """The old primary refuses writes and lives on as a replica, the address leads to the new one: what runs goes on, its
    record is written there, and nobody stays with the old one, which may then go.
    """
    script = counting(700, step_ms=20)
    with (
        own_redis() as old,
        own_redis() as new,
        moving_address(old) as address,
        PLAN.redis_url(address.url).start() as cluster,
    ):
        await ask(cluster.port, counting(2).body())
        baseline = await leaks.capture(cluster)
        async with live(cluster, script) as stream, live(cluster, long_decode()) as lasting:
            record = await collect(stream, until_deltas=3)
            await collect(lasting, until_deltas=2)
            with old.client as client:
                client.replicaof("127.0.0.1", new.port)
            await eventually(
                lambda: question(cluster),
                lambda a: a.status == 503,
                within_s=BACK_WITHIN_S,
                what="no writes, no answers",
            )
            await collect(stream, until_deltas=len(record.deltas) + 5, record=record)
            address.server = new
            await eventually(
                lambda: question(cluster), lambda a: a.status == 200, within_s=BACK_WITHIN_S, what="served again"
            )
            with new.client as client:

                async def state_of(running: HttpStream) -> str | None:
                    return client.hget(request_key(RequestId(running.headers["x-firsttoken-request"])), "state")

                await eventually(
                    lambda: state_of(lasting),
                    lambda s: s == "decoding",
                    within_s=BACK_WITHIN_S,
                    what="the record is there",
                )
                old.kill()
                await collect(stream, record=record)
                await eventually(
                    lambda: state_of(stream), lambda s: s == "finished", within_s=BACK_WITHIN_S, what="an outcome, too"
                )
                lasting.cut()
        assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
        await cluster.wait_ready(within_s=BACK_WITHIN_S)
        await leaks.assert_no_leaks(cluster, baseline)


async def test_records_hold_no_text(cluster: Cluster, redis_server: RedisServer) -> None:
    """Neither the question nor the answer is in Redis at any time of a request."""
    secret = "sesame-9313"
    script = counting(30, step_ms=20)
    with redis_server.client as client:

        def dump() -> str:
            keys = list(client.scan_iter(match="*"))
            return repr([(key, client.hgetall(key) if client.type(key) == "hash" else client.get(key)) for key in keys])

        body = script.body()
        body["messages"].insert(0, {"role": "system", "content": secret})
        async with live(cluster, script, messages=body["messages"]) as stream:
            record = await collect(stream, until_deltas=3)
            during = dump()
            await collect(stream, record=record)
        after = dump()
    for seen in (during, after):
        assert record.request_id in seen
        assert secret not in seen
        assert "w1" not in seen


async def test_a_stored_cancel_mark_is_found_after_a_gap(cluster: Cluster, redis_server: RedisServer) -> None:
    """RED-01: for 3 s nobody can subscribe; a cancel of that time is found afterwards, and told again it is no other.

    Its 3 s are not measured: a scheduler that may subscribe again does so within one, whatever the machine does then.
    """
    before = await outcomes(cluster)
    async with live(cluster, long_decode()) as stream:
        record = await collect(stream, until_deltas=2)
        request_id = RequestId(record.request_id)
        with redis_server.client as client:

            async def num_subscribers() -> int:
                return client.execute_command("PUBSUB", "NUMSUB", CANCELS)[1]

            await eventually(  # a server that was started a moment ago may have none yet
                num_subscribers, lambda count: count > 0, within_s=30.0, what="the scheduler listens"
            )
            owner = client.hget(request_key(request_id), KEY_HASH_FIELD)
            client.execute_command("ACL", "SETUSER", "default", "-subscribe")
            try:
                assert client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1
                ends_at = asyncio.get_running_loop().time() + GAP_S
                client.set(cancel_key(request_id, owner), "delete", px=60_000)
                assert 0 == client.publish(CANCELS, record.request_id)
                while asyncio.get_running_loop().time() < ends_at:
                    await collect(stream, until_deltas=len(record.deltas) + 1, record=record)
                assert record.error is None
            finally:
                client.execute_command("ACL", "SETUSER", "default", "+subscribe")
            async with asyncio.timeout(60.0):
                await collect(stream, record=record)
            client.publish(CANCELS, record.request_id)
    assert record.error is not None
    assert "cancelled" == record.error["code"]
    await wait_blocks_free(cluster, within_s=40.0)
    await wait_outcomes(cluster, before, cancelled=1)


async def test_an_evicting_redis_is_refused() -> None:
    """A store that may drop live records is named as unfit, and the start ends instead of running on it."""
    with own_redis() as server:
        with server.client as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(AssertionError, match="noeviction"), ClusterPlan().scripted().redis_url(server.url).start():
            pass


async def test_a_crowd_across_an_outage(cluster: Cluster, redis_server: RedisServer) -> None:
    """Twenty streams while Redis freezes for as long as they run: every text exact."""
    scripts = [counting(250 + i, step_ms=20) for i in range(20)]
    async with AsyncExitStack() as stack:

        async def begin(script: Script) -> tuple[HttpStream, ChatRecord]:
            stream = await stack.enter_async_context(live(cluster, script))
            return stream, await collect(stream, until_deltas=2)

        async with asyncio.TaskGroup() as group:
            beginning = [group.create_task(begin(script)) for script in scripts]
        begun = [task.result() for task in beginning]
        redis_server.pause()
        try:
            async with asyncio.TaskGroup() as group:
                for stream, record in begun:
                    group.create_task(collect(stream, record=record))
        finally:
            redis_server.resume()
    assert [script.text() for script in scripts] == [record.text for _, record in begun]
