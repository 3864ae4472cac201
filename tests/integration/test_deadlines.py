"""Deadlines with real processes: at each stage of a request, and with the scheduler away; nothing is left."""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support import leaks
from tests.support.cancelling import live, outcomes, wait_for_state, wait_outcomes
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpAnswer, HttpStream, exchange, open_request
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.redis_server import connect
from tests.support.script import Script, counting, padded

TIMEOUT_S = 4.0
STAGE_TIMEOUT_S = 8.0  # as long as several requests need to get where they are to be late, on a busy machine
LOST_AND_LATE_S = 12.0  # a worker is given up 5 s after its death
BACK_WITHIN_S = 90.0
SLACK_S = 20.0  # of two busy cores; what is cut off would last for forty seconds
DECODING = counting(2_000, step_ms=20)
BIG = Script(pieces=["0123456789abcdef" * 256], repeat=5_000)  # 4 KiB a token, so that the sockets hold few of them
PREFILLING = padded(["x"], num_prompt_tokens=1_000, prefill_ms=40_000)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def narrow_system() -> Generator[Cluster]:
    """One request at a time."""
    with ClusterPlan().scripted().setting("max_sequences", 1).start() as cluster:
        asyncio.run(ask(cluster.port, counting(3).body()))
        yield cluster


async def test_what_is_late_is_told_in_time(cluster: Cluster) -> None:
    """Whatever it was at: whole answers by 504, a stream by the error behind its text, then [DONE] and no finish reason."""
    started_at = time.monotonic()

    async def whole(script: Script) -> HttpAnswer:
        return await exchange(cluster.port, "POST", CHAT_PATH, body={**script.body(), "timeout": TIMEOUT_S})

    async with asyncio.TaskGroup() as group:
        headers = {"X-Request-Timeout": str(TIMEOUT_S)}
        streamed = group.create_task(stream_chat(cluster.port, DECODING.body(), headers=headers))
        asked = [group.create_task(whole(DECODING))]
        await wait_for_state(cluster, "decoding", 2)
        asked.append(group.create_task(whole(PREFILLING)))
    assert TIMEOUT_S <= time.monotonic() - started_at < 2 * TIMEOUT_S + SLACK_S
    answers = [task.result() for task in asked]
    assert [(504, "timeout")] * 2 == [(answer.status, answer.json()["error"]["code"]) for answer in answers]
    record = streamed.result()
    assert ("timeout", None) == ((record.error or {})["code"], record.finish_reason)
    assert record.deltas
    assert DECODING.text(len(record.deltas)) == record.text


async def test_a_late_request_leaves_the_queue(narrow_system: Cluster) -> None:
    """It was never placed; the one that runs is not touched, and the next one gets its turn."""
    cluster = narrow_system
    baseline = await leaks.capture(cluster)
    running = counting(450, step_ms=20)
    async with live(cluster, running) as stream:
        record = await collect(stream, until_deltas=2)
        async with asyncio.TaskGroup() as group:
            body = {**counting(3).body(), "timeout": TIMEOUT_S}
            late = group.create_task(exchange(cluster.port, "POST", CHAT_PATH, body=body))
            await wait_for_state(cluster, "queued")
            next_one = group.create_task(ask(cluster.port, counting(4).body()))
            await collect(stream, record=record)
    assert (504, "timeout") == (late.result().status, late.result().json()["error"]["code"])
    assert (running.text(), None) == (record.text, record.error)
    assert counting(4).text() == next_one.result()["choices"][0]["message"]["content"]
    await leaks.assert_no_leaks(cluster, baseline)


async def test_decode_ends_a_late_answer_while_the_scheduler_stands_still(narrow_system: Cluster) -> None:
    """By its own clock: its blocks are free before anybody could tell it."""
    cluster = narrow_system
    baseline = await leaks.capture(cluster)
    status = await cluster.status()
    scheduler, decode = status.one("scheduler"), status.one("decode")
    body = {**DECODING.body(), "stream": True, "timeout": TIMEOUT_S}
    async with open_request(cluster.port, "POST", CHAT_PATH, body=body) as stream:
        record = await collect(stream, until_deltas=2)
        os.kill(scheduler.live_pid, signal.SIGSTOP)
        try:
            await collect(stream, record=record)
            await eventually(
                lambda: cluster.metrics(decode),
                lambda scraped: scraped.total("firsttoken_kv_blocks", state="active") == 0,
                within_s=SLACK_S,
                what="no block of a late answer is held",
            )
        finally:
            os.kill(scheduler.live_pid, signal.SIGCONT)
    assert "timeout" == (record.error or {})["code"]
    await cluster.wait_ready()
    await leaks.assert_no_leaks(cluster, baseline)
    script = counting(5)
    assert script.text() == (await stream_chat(cluster.port, script.body())).text


@pytest.fixture(scope="module")
def staged_system() -> Generator[Cluster]:
    """Its workers may be stopped for some seconds without being given up."""
    with ClusterPlan().scripted().setting("worker_lost_s", 20).start() as cluster:
        yield cluster


@pytest.fixture
async def staged(staged_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before, idle and whole after."""
    await staged_system.wait_ready(within_s=BACK_WITHIN_S)
    await ask(staged_system.port, counting(3).body())
    baseline = await leaks.capture(staged_system)
    yield staged_system
    await staged_system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(staged_system, baseline)


class LateRequests:
    """Streams that have little time, and all that is said of their ends."""

    def __init__(self, cluster: Cluster, stack: AsyncExitStack, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._stack = stack
        self._asked: list[tuple[Script, HttpStream]] = []

    async def ask(self, script: Script) -> None:
        """Its prompt is not in any cache."""
        body = {**script.body(), "stream": True, "timeout": self._timeout_s, "cache_salt": uuid.uuid4().hex}
        opening = open_request(self._cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192)
        self._asked.append((script, await self._stack.enter_async_context(opening)))

    async def hear(self) -> None:
        """To their ends: each client is told that the time is over, behind the text that there was."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(stream)) for _, stream in self._asked]
        for (script, _), task in zip(self._asked, tasks, strict=True):
            record = task.result()
            assert ("timeout", None) == ((record.error or {})["code"], record.finish_reason)
            assert script.text(len(record.deltas)) == record.text

    async def check(self, before: dict[str, float]) -> None:
        """All have ended by the scheduler's word, too, and their records say why, as soon as they are written."""
        await wait_outcomes(self._cluster, before, failed=len(self._asked))
        redis = (await self._cluster.status()).one("redis")
        with connect(f"redis://{redis.address}/0") as client:

            async def record(stream: HttpStream) -> list[str | None]:
                key = f"firsttoken:1:request:{{{stream.headers['x-firsttoken-request']}}}"
                return client.hmget(key, "state", "error_code")

            for _, stream in self._asked:
                await eventually(
                    lambda stream=stream: record(stream),
                    lambda found: found == ["failed", "DEADLINE_EXCEEDED"],
                    within_s=40.0,
                    what="its record says that it was late",
                )


@asynccontextmanager
async def all_late(cluster: Cluster, *, timeout_s: float = STAGE_TIMEOUT_S) -> AsyncGenerator[LateRequests]:
    """What is asked in the block ends with its deadline, and in no other way."""
    before = await outcomes(cluster)
    async with AsyncExitStack() as stack:
        late = LateRequests(cluster, stack, timeout_s)
        yield late
    await late.check(before)


async def test_in_the_queue_in_prefill_in_decode_and_parked(staged: Cluster) -> None:
    """All at once: what does not fit into the prefill worker waits in the queue, what nobody reads is parked."""
    async with all_late(staged) as late:
        await late.ask(BIG)
        await eventually(staged.status, lambda s: s.sequences.get("parked") == 1, within_s=60.0, what="one is parked")
        await late.ask(DECODING)
        for _ in range(2):
            await late.ask(PREFILLING)
        await eventually(
            staged.status,
            lambda s: {"decoding": 2, "prefilling": 1, "queued": 1} == s.live_requests,
            within_s=60.0,
            what="one at each of these stages",
        )
        # The parked one is not read before its end, which would let it go on.
        await eventually(staged.status, lambda s: not s.live_requests, within_s=60.0, what="all are over")
        await late.hear()


async def test_before_its_prompt_is_begun(staged: Cluster) -> None:
    """Placed, reserved for, and the prefill worker has not moved."""
    status = await staged.status()
    async with all_late(staged) as late:
        with frozen(status.one("prefill").live_pid):
            await late.ask(counting(2))
            await wait_for_state(staged, "prefilling")
            await late.hear()


async def test_while_its_cache_moves(staged: Cluster) -> None:
    """Decode takes nothing: one copy is in the middle, one is all sent and not committed, one request has no blocks yet."""
    status = await staged.status()
    async with all_late(staged) as late, AsyncExitStack() as stack:
        with frozen(status.one("prefill").live_pid):  # nothing is sent before decode stands still
            # More chunks, each a frame, than may be unacknowledged; and fewer. Prefill is given both at once.
            await late.ask(padded(["x"], num_prompt_tokens=400))
            await late.ask(padded(["y"], num_prompt_tokens=100))
            await wait_for_state(staged, "prefilling", 2)
            stack.enter_context(frozen(status.one("decode").live_pid))
        await late.ask(counting(2))
        await eventually(
            staged.status,
            lambda s: {"transferring": 2, "placing": 1} == s.live_requests,
            within_s=60.0,
            what="one in the middle, one sent, one without blocks",
        )
        await late.hear()


async def test_while_it_waits_for_another_worker(narrow_system: Cluster) -> None:
    """Its decode worker has died in the middle of the answer, and nobody starts another in time."""
    cluster = narrow_system
    baseline = await leaks.capture(cluster)
    decode = (await cluster.status()).one("decode")
    async with all_late(cluster, timeout_s=LOST_AND_LATE_S) as late:
        await late.ask(DECODING)
        await wait_for_state(cluster, "decoding")
        with frozen(cluster.process.pid):
            os.kill(decode.live_pid, signal.SIGKILL)
            await wait_for_state(cluster, "queued")
            await late.hear()
    await cluster.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(cluster, baseline)


async def test_the_servers_own_bounds() -> None:
    """Who asks for no time gets the default, who asks for too much the maximum."""
    bounds = {"default_timeout_s": 3.0, "max_timeout_s": 5.0}
    plan = ClusterPlan().scripted()
    for name, value in bounds.items():
        plan = plan.setting(name, value)
    clock = asyncio.get_running_loop()

    async def lasted(cluster: Cluster, **asked: float) -> float:
        begun = clock.time()
        record = await stream_chat(cluster.port, DECODING.body(**asked))
        assert "timeout" == (record.error or {})["code"]
        return clock.time() - begun

    with plan.start() as cluster:
        await ask(cluster.port, counting(3).body())  # the first one takes longer
        baseline = await leaks.capture(cluster)
        async with asyncio.TaskGroup() as group:
            told = [group.create_task(lasted(cluster, **asked)) for asked in ({}, {"timeout": 3_000.0})]
        await leaks.assert_no_leaks(cluster, baseline)
    for task, bound_s in zip(told, bounds.values(), strict=True):
        assert bound_s <= task.result() < bound_s + SLACK_S
