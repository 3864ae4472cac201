"""Resumable answers while Redis is away."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Generator

import pytest

from gateway.answer_log import HOLD_S, MAX_HELD_TOKENS
from tests.support import processes
from tests.support.audited import audited
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.polling import eventually
from tests.support.process_logs import num_attempts
from tests.support.redis_server import RedisServer, own_redis
from tests.support.resuming import ReadSoFar, ask_resumable, read_on, resume
from tests.support.script import counting

ANSWER_WITHIN_S = 120.0
STEP_MS = 20
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def redis_server() -> Generator[RedisServer]:
    """A store that the tests end and start."""
    with own_redis() as server:
        yield server


@pytest.fixture(scope="module")
def system(redis_server: RedisServer) -> Generator[Cluster]:
    """Two gateways on it."""
    # A Redis that is there may be late on a busy machine: half a second, as it is else, is too short for that.
    plan = ClusterPlan().scripted().gateways(2).setting("redis_timeout_s", 2)
    with plan.redis_url(redis_server.url).start() as cluster:
        yield cluster


@pytest.fixture
async def cluster(system: Cluster) -> AsyncGenerator[Cluster]:
    """Idle and warm before, idle and whole after."""
    async with audited(system) as cluster:
        yield cluster


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed and empty", "stopped"])
async def test_a_store_that_is_away_delays_only_the_resuming(
    cluster: Cluster, redis_server: RedisServer, is_stopped: bool
) -> None:
    """The answer goes on; nobody can take it over meanwhile; the log is whole when the store is back."""
    script = counting(700, step_ms=20)
    async with asyncio.timeout(ANSWER_WITHIN_S), ask_resumable(cluster.port, script) as (stream, read):
        await read_on(stream, read, max_events=5)
        if is_stopped:
            redis_server.pause()
        else:
            redis_server.kill()
        await read_on(stream, read, max_events=50)
        for port in (cluster.port, cluster.port + 1):
            async with resume(port, read) as refused:
                assert 503 == refused.status
                assert b"state_unavailable" in await refused.read_body()
        if is_stopped:
            redis_server.resume()
        else:
            redis_server.start()
        num_away = read.last_id
        key = f"firsttoken:1:log:{{{read.request_id}}}"

        async def num_stored() -> int:
            with redis_server.client as client:
                return int(client.eval(NUM_STORED, 1, key))

        await eventually(num_stored, lambda count: count >= num_away, within_s=60.0, what="the log is whole")
        stream.cut()
        again = ReadSoFar(request_id=read.request_id)
        for port, late in ((cluster.port + 1, read), (cluster.port, again)):
            async with resume(port, late) as resumed:
                await read_on(resumed, late)
            assert (None, script.text(), "stop") == (late.error, late.text, late.finish_reason)


@pytest.mark.parametrize("num_lacking", [60, 160], ids=["kept", "computed again"])
async def test_what_the_store_lacks_of_a_lost_gateway_comes_all_the_same(
    cluster: Cluster, redis_server: RedisServer, num_lacking: int
) -> None:
    """Shown while Redis took no writes. Decode has kept some of it for the next reader; so much more was acknowledged
    that the log ends before what decode still holds.
    """
    script = counting(200, step_ms=STEP_MS)  # all of it has room in the outbox: nothing is parked and preempted
    asked_at = time.monotonic()
    async with asyncio.timeout(ANSWER_WITHIN_S):
        async with ask_resumable(cluster.port, script) as (stream, read):
            await read_on(stream, read, max_events=5)
            is_behind_at = time.monotonic()
            with redis_server.client as client:
                client.replicaof("127.0.0.1", "1")
            await read_on(stream, read, max_events=num_lacking)
            lost = (await cluster.gateways())[0].live_pid
            os.kill(lost, signal.SIGKILL)
            lost_at = time.monotonic()
            await read_on(stream, read)
        await processes.wait_gone(lost)
        with redis_server.client as client:
            client.replicaof("NO", "ONE")
        async with resume(cluster.port + 1, read) as resumed:
            await read_on(resumed, read)
    assert (None, script.text(), "stop") == (read.error, read.text, read.finish_reason)
    assert 201 == (read.usage or {})["completion_tokens"]
    # How much it really was on a busy machine: what has been made since the question is more than what the log lacks.
    max_lacking = max(num_lacking, (lost_at - asked_at) * 1_000 / STEP_MS)
    is_kept = max_lacking <= MAX_HELD_TOKENS and lost_at - is_behind_at < HOLD_S
    assert (await num_attempts(cluster, read.request_id) == 1) or not is_kept


NUM_STORED = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
return last and tonumber(last[2][4]) or 0
"""
