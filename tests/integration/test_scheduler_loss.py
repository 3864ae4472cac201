"""The scheduler dies, stands still, is replaced: what runs does not feel it, and nothing and nobody is lost or doubled."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.support import leaks, processes
from tests.support.cancelling import live, wait_for_state
from tests.support.chat import ChatRecord, ask, collect
from tests.support.cluster import Cluster, ClusterPlan, Service
from tests.support.http_client import HttpStream
from tests.support.polling import eventually
from tests.support.script import Script, counting, padded
from tests.support.standby import STOP_WITHIN_S, standby

# Until its lease has run out (3 s), the new process has started, workers and gateways have dialled; and a busy machine.
BACK_WITHIN_S = 120.0
ANSWER_WITHIN_S = 180.0
# What the end of a scheduler may add to the time between two tokens of a running answer. Nothing of an answer waits for
# a scheduler: where the next one runs already no gap grew, 0.1 s being the longest. The start of one takes processor time
# from all: it added 0.3 to 0.7 s where twenty processes wanted two cores, 1.8 s once. An answer that waited for it would
# show the whole time without one: the 3 s of the lease and more, on a slow machine much more. Half of that is the bound.
MIN_MORE_GAP_S = 2.0
MIN_MORE_GAP_BESIDE_STANDBY_S = 1.0
STEP_MS = 20
USAGE = {"stream_options": {"include_usage": True}}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def own_system() -> Generator[Cluster]:
    """One prefill and one decode worker."""
    with ClusterPlan().scripted().start() as cluster:
        yield cluster


@pytest.fixture
async def system(own_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before each test; whole and without leaks after it."""
    await own_system.wait_ready(within_s=BACK_WITHIN_S)
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ask(own_system.port, counting(3).body()))
    baseline = await leaks.capture(own_system)
    yield own_system
    await own_system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(own_system, baseline, within_s=BACK_WITHIN_S)


async def scheduler_of(cluster: Cluster) -> Service:
    """The active one, as the gateway finds it."""
    return (await cluster.status()).one("scheduler")


async def wait_replaced(cluster: Cluster, old: Service) -> Service:
    """Another one is active."""
    return await eventually(
        lambda: scheduler_of(cluster),
        lambda active: active.live_pid != old.live_pid,
        within_s=BACK_WITHIN_S,
        what="another scheduler is active",
    )


def check(script: Script, record: ChatRecord) -> None:
    """Every token once and in order, counted once."""
    assert None is record.error
    assert (script.text(), "stop") == (record.text, record.finish_reason)
    usage = record.usage or {}
    assert (script.num_prompt_tokens, script.num_pieces + 1) == (usage["prompt_tokens"], usage["completion_tokens"])


def longest_gap(times: Sequence[float]) -> float:
    """Between two deltas, in seconds."""
    return max(later - earlier for earlier, later in pairwise(times))


def check_not_paused(record: ChatRecord, *, since: float, took_s: float, more_s: float = MIN_MORE_GAP_S) -> None:
    """Not much longer between two tokens than before; and it has run while there was no scheduler."""
    more_s = max(more_s, took_s / 2)
    before = [at for at in record.delta_times if at <= since]
    after = [before[-1], *(at for at in record.delta_times if at > since)]
    assert longest_gap(after) <= longest_gap(before) + more_s
    assert sum(1 for at in after[1:] if at - since <= took_s) >= int(took_s / (longest_gap(before) + more_s))


def check_order(records: Sequence[ChatRecord]) -> None:
    """Their first words came in this order; a prompt takes 1.5 s, and what the reader sees a moment late is no other order."""
    firsts = [record.delta_times[0] for record in records]
    assert all(later > earlier - 1.0 for earlier, later in pairwise(firsts)), firsts


def long_prompt(number: int) -> Script:
    """More than two of them is more than a prefill worker is given ahead."""
    return padded([f"p{number} ", "x"], num_prompt_tokens=700, prefill_ms=1500)


@dataclass(slots=True)
class Asked:
    """One request and what its reader has of it."""

    script: Script
    stream: HttpStream
    record: ChatRecord


NUM_RUNNING = 3


@asynccontextmanager
async def crowd(
    cluster: Cluster, readers: asyncio.TaskGroup, unread: Sequence[int] = ()
) -> AsyncGenerator[list[Asked]]:
    """Three answers that run, ten words of each are there; behind them eight prompts: two or so in prefill, others queued.

    All but the `unread` have a reader; `check` them when the readers are through.
    """
    salt = uuid.uuid4().hex  # prompts that an earlier crowd has left in the prefix cache would not be computed
    async with AsyncExitStack() as stack:
        asked: list[Asked] = []

        async def ask_next(script: Script) -> None:
            stream = await stack.enter_async_context(live(cluster, script, cache_salt=salt, **USAGE))
            record = ChatRecord(request_id=stream.headers["x-firsttoken-request"])
            if len(asked) not in unread:
                readers.create_task(collect(stream, record=record))
            asked.append(Asked(script, stream, record))

        for number in range(NUM_RUNNING):
            await ask_next(counting(900 + number, step_ms=STEP_MS))
        await wait_for_state(cluster, "decoding", NUM_RUNNING)
        for number in range(8):  # one after the other: that is their order
            await ask_next(long_prompt(number))
        await wait_for_state(cluster, "queued", 4)
        for number in range(NUM_RUNNING):
            while number not in unread and len(asked[number].record.deltas) < 10:
                await asyncio.sleep(STEP_MS / 1000)
        yield asked
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while not all(each.record.is_done for number, each in enumerate(asked) if number not in unread):
                await asyncio.sleep(STEP_MS / 1000)
        for number, each in enumerate(asked):
            if number not in unread:
                check(each.script, each.record)


async def test_a_killed_scheduler_is_not_felt(system: Cluster) -> None:
    """kill -9 under answers that run, are in prefill, and wait: those that run do not pause, the queue keeps its order."""
    clock = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as readers, crowd(system, readers) as asked:
        old = await scheduler_of(system)
        killed_at = clock.time()
        os.kill(old.live_pid, signal.SIGKILL)
        await wait_replaced(system, old)
        took_s = clock.time() - killed_at
    for each in asked[:NUM_RUNNING]:
        check_not_paused(each.record, since=killed_at, took_s=took_s)
    check_order([each.record for each in asked[NUM_RUNNING:]])


async def test_clients_leave_while_there_is_no_scheduler(system: Cluster) -> None:
    """One that runs, one in prefill and one that waits: each is cancelled by the next one, and everything is given back.

    So is one that is deleted meanwhile.
    """
    leaving, deleted = (0, 3, 10), 1
    async with asyncio.TaskGroup() as readers, crowd(system, readers, (*leaving, deleted)) as asked:
        os.kill((await scheduler_of(system)).live_pid, signal.SIGKILL)
        for number in leaving:
            asked[number].stream.cut()
        answer = await system.delete(asked[deleted].record.request_id)
        assert answer.status in (200, 202), answer.body  # 200 where the next one is there already
        async with asyncio.timeout(BACK_WITHIN_S):
            record = await collect(asked[deleted].stream)
        assert "cancelled" == (record.error or {})["code"]
        assert asked[deleted].script.text(len(record.deltas)) == record.text


async def test_scheduler_and_workers_die_together(system: Cluster) -> None:
    """What was placed is found nowhere by the new one: it goes on behind the words that were read."""
    status = await system.status()
    async with asyncio.TaskGroup() as readers, crowd(system, readers):
        for role in ("scheduler", "decode", "prefill"):
            os.kill(status.one(role).live_pid, signal.SIGKILL)


async def test_a_request_that_comes_without_a_scheduler_waits_for_one(system: Cluster) -> None:
    """Before its headers, as long as a restart takes."""
    old = await scheduler_of(system)
    os.kill(old.live_pid, signal.SIGKILL)
    script = counting(5)
    answer = await ask(system.port, script.body())
    assert script.text() == answer["choices"][0]["message"]["content"]


async def test_a_standby_replaces_one_that_stands_still(system: Cluster) -> None:
    """SIGSTOP: the standby takes over within the lease rules; woken, the old one is refused everywhere and exits."""
    clock = asyncio.get_running_loop()
    old = await scheduler_of(system)
    with standby(old) as other:
        async with asyncio.TaskGroup() as readers, crowd(system, readers) as asked:
            stopped_at = clock.time()
            with processes.frozen(old.live_pid) as thaw:
                active = await wait_replaced(system, old)
                took_s = clock.time() - stopped_at
                assert other.pid == active.live_pid
                thaw()
                await eventually(
                    lambda: command_line(old),
                    lambda command: not command,
                    within_s=STOP_WITHIN_S,
                    what="the old one has ended",
                )
        for each in asked[:NUM_RUNNING]:
            check_not_paused(each.record, since=stopped_at, took_s=took_s, more_s=MIN_MORE_GAP_BESIDE_STANDBY_S)
        check_order([each.record for each in asked[NUM_RUNNING:]])
        assert other.pid == (await scheduler_of(system)).live_pid
        os.kill(other.pid, signal.SIGTERM)  # it hands over to the one that `up` has started again
        assert 0 == await asyncio.to_thread(other.wait, STOP_WITHIN_S)


async def command_line(service: Service) -> str:
    """Empty when it has ended."""
    return processes.command_line(service.live_pid)
