import asyncio
import random
import time

import pytest
from redis.exceptions import ResponseError

from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.state.client import TIMEOUT_S, EvictionPolicyError, Script, StateClient
from tests.support.redis_server import CALL_S, RedisServer, own_redis
from tests.support.tcp_proxy import tcp_proxy

NUM_TASKS = 50


@pytest.mark.parametrize(("max_connections", "num_reads"), [(1, 1), (10, 3)])
async def test_cancelled_callers_never_mix_replies(
    client: StateClient, valkey: RedisServer, max_connections: int, num_reads: int
) -> None:
    """Fifty tasks read their own keys over a link 100 ms late, half are cancelled at random moments (RED-02).

    On a single node: there is no client of ours for a cluster, only keys that would do there (RED-03).
    """
    for n in range(NUM_TASKS):
        await client.call("SET", f"key:{n}", f"value:{n}")
    dice = random.Random(7)
    async with tcp_proxy(valkey.port) as proxy:
        proxy.delay_s = 0.1
        slow = StateClient(f"redis://127.0.0.1:{proxy.port}", max_connections=max_connections, timeout_s=90)
        read: dict[int, list[bytes]] = {n: [] for n in range(NUM_TASKS)}

        async def reader(n: int) -> None:
            for _ in range(num_reads):
                read[n].append(await slow.call("GET", f"key:{n}"))

        async with asyncio.TaskGroup() as group:
            loop = asyncio.get_running_loop()
            for n in range(NUM_TASKS):
                task = spawn(group, reader(n), name=f"reader {n}")
                if n % 2:
                    loop.call_later(dice.uniform(0, 1.5), task.cancel)
        after = [await slow.call("GET", f"key:{n}") for n in range(5)]
        await slow.close()

    for n, values in read.items():
        assert {f"value:{n}".encode()} >= set(values)
    assert {num_reads} == {len(read[n]) for n in range(0, NUM_TASKS, 2)}
    assert any(len(read[n]) < num_reads for n in range(1, NUM_TASKS, 2))
    assert [f"value:{n}".encode() for n in range(5)] == after


async def test_late_reply_is_not_read_by_the_next_caller(valkey: RedisServer) -> None:
    """A call that timed out leaves no reply behind for the next one."""
    async with tcp_proxy(valkey.port) as proxy:
        client = StateClient(f"redis://127.0.0.1:{proxy.port}", max_connections=1, timeout_s=CALL_S)
        await client.call("SET", "key", "old")
        proxy.delay_s, client.timeout_s = 1.3, 1.0
        with pytest.raises(ServingError):
            await client.call("GET", "key")
        proxy.delay_s, client.timeout_s = 0.0, CALL_S

        assert b"PONG" == await client.call("PING")
        await client.close()


async def test_silent_redis_is_away_within_its_time(valkey: RedisServer) -> None:
    """No answer in 500 ms, on an old connection and on a new one alike."""
    client = StateClient(valkey.url, timeout_s=CALL_S)
    assert await client.ping()
    client.timeout_s = TIMEOUT_S
    valkey.pause()
    try:
        for _ in range(2):
            started_at = time.monotonic()
            with pytest.raises(ServingError) as caught:
                await client.call("GET", "key")
            assert ErrorCode.STATE_UNAVAILABLE == caught.value.code
            assert 0.4 < time.monotonic() - started_at < CALL_S
        assert not await client.ping()
    finally:
        valkey.resume()
    client.timeout_s = CALL_S
    assert await client.ping()
    await client.close()


async def test_the_time_of_a_call_is_that_of_its_connection(valkey: RedisServer) -> None:
    """Whoever has given a store more than the usual time has given it for dialling, too."""
    client = StateClient(valkey.url, timeout_s=CALL_S)
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    for delay_s in (0.0, 0.0001, 0.0005, 0.001, 0.002):  # somewhere in the dialling this process stands still
        loop.call_later(delay_s, time.sleep, 2 * TIMEOUT_S / 5)
    assert await client.ping()
    assert loop.time() - started_at > TIMEOUT_S
    await client.close()


async def test_restarted_redis_is_found_again(client: StateClient, valkey: RedisServer) -> None:
    """Dead connections in the pool cost no failed call, and scripts are loaded anew."""
    script = Script("release_lease", "lease:{x}", "epoch:{x}")
    async with asyncio.TaskGroup() as group:
        for n in range(8):
            spawn(group, client.run(script, ["nobody"]), name=f"run {n}")
    await asyncio.to_thread(valkey.stop)
    await asyncio.to_thread(valkey.start)

    assert 0 == await client.run(script, ["nobody"])


async def test_a_failover_leaves_nobody_at_the_old_primary(client: StateClient, valkey: RedisServer) -> None:
    """The address leads to another server, and the old one lives on as its replica: connections to that are let go."""
    with own_redis() as other:
        at = valkey

        async def present() -> int:
            return at.port

        async with tcp_proxy(present) as proxy:
            moved = StateClient(f"redis://127.0.0.1:{proxy.port}", max_connections=4, timeout_s=CALL_S)
            async with asyncio.TaskGroup() as group:  # so that several connections are there
                for n in range(4):
                    spawn(group, moved.call("SET", f"key:{n}", "old"), name=f"set {n}")
            at = other
            await client.call("REPLICAOF", "127.0.0.1", other.port)
            try:
                with pytest.raises(ServingError) as caught:
                    await moved.call("SET", "key:0", "new")
                assert ErrorCode.STATE_UNAVAILABLE == caught.value.code
                async with asyncio.TaskGroup() as group:
                    for n in range(4):
                        spawn(group, moved.call("SET", f"key:{n}", "new"), name=f"set {n}")
            finally:
                await client.call("REPLICAOF", "NO", "ONE")
            await moved.close()
        with other.client as direct:
            assert ["new"] * 4 == direct.mget([f"key:{n}" for n in range(4)])


async def test_nobody_there(valkey: RedisServer) -> None:
    """A refused connection is told at once: nobody waits for the time of a call to be over."""
    await asyncio.to_thread(valkey.stop)
    client = StateClient(valkey.url, timeout_s=3 * CALL_S)
    async with asyncio.timeout(2 * CALL_S):
        assert not await client.ping()


async def test_full_store_is_away(client: StateClient) -> None:
    """Under noeviction a full store refuses writes: for us it cannot hold state."""
    before = (await client.call("CONFIG", "GET", "maxmemory"))[1]
    await client.call("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(ServingError) as caught:
            await client.call("SET", "key", "value")
        assert ErrorCode.STATE_UNAVAILABLE == caught.value.code
    finally:
        await client.call("CONFIG", "SET", "maxmemory", before)


async def test_a_store_without_its_replicas_is_away(client: StateClient) -> None:
    """It refuses writes, alone and in a script, until it has them; reading goes on."""
    await client.call("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        with pytest.raises(ServingError) as alone:
            await client.call("SET", "key", "value")
        with pytest.raises(ServingError) as in_script:
            await client.run(Script("acquire_lease", "lease:{x}", "epoch:{x}"), ["me", "here", 1, 1000, 1000])
        assert {ErrorCode.STATE_UNAVAILABLE} == {alone.value.code, in_script.value.code}
        assert await client.call("GET", "key") is None
    finally:
        await client.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert b"OK" == await client.call("SET", "key", "value")


@pytest.mark.parametrize(
    "reply",
    [
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "BUSY Redis is busy running a script.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "NOPERM this user has no permissions to run the 'hmget' command",
    ],
)
async def test_refusals_that_pass_are_an_outage(client: StateClient, reply: str) -> None:
    """Whatever the store is waiting for, it cannot hold state now. The store itself says the words, by a script."""
    with pytest.raises(ServingError) as caught:
        await client.call("EVAL", "return redis.error_reply(ARGV[1])", 0, reply)
    assert ErrorCode.STATE_UNAVAILABLE == caught.value.code
    assert await client.ping()


async def test_a_wrong_command_is_a_bug(client: StateClient) -> None:
    """And not an outage, which would hide it."""
    with pytest.raises(ResponseError, match="unknown command"):
        await client.call("NONSENSE")


async def test_eviction_policy_is_checked(client: StateClient) -> None:
    """A store that may evict records is refused."""
    await client.check_eviction_policy()
    await client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(EvictionPolicyError, match="allkeys-lru"):
            await client.check_eviction_policy()
    finally:
        await client.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_scan_finds_every_key(client: StateClient) -> None:
    """Over several pages, and only what matches and is of the type."""
    for n in range(1100):
        await client.call("SET", f"wanted:{n}", 1)
    await client.call("SET", "other", 1)
    await client.call("HSET", "wanted:other", "field", 1)

    assert {f"wanted:{n}" for n in range(1100)} == {key async for key in client.scan("wanted:*", "string")}
