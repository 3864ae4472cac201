"""Answers outlive the workers that make them: killed or short of blocks, the client reads on as if nothing had been."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack

import pytest

from shared.obs.metrics import WASTED_TOKENS_TOTAL
from tests.support import leaks
from tests.support.audited import BACK_WITHIN_S, audited
from tests.support.cancelling import (
    holders,
    live,
    live_uncached,
    outcomes,
    wait_for_state,
    wait_outcomes,
)
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import open_request
from tests.support.polling import eventually
from tests.support.processes import wait_gone
from tests.support.script import Script, counting, padded

ANSWER_WITHIN_S = 120.0
USAGE = {"stream_options": {"include_usage": True}}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pairs_system() -> Generator[Cluster]:
    """Two workers a role."""
    with ClusterPlan().scripted().prefill(2).decode(2).start() as cluster:
        yield cluster


@pytest.fixture
async def pairs(pairs_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before each test; whole and without leaks after it."""
    async with audited(pairs_system) as cluster:
        yield cluster


async def kill_one(cluster: Cluster, role: str) -> None:
    """SIGKILL to the first of its role; gone when this returns."""
    pid = (await cluster.status()).of_role(role)[0].live_pid
    os.kill(pid, signal.SIGKILL)
    await wait_gone(pid)


def check(script: Script, record: ChatRecord) -> None:
    """Every token once and in order; the counts are the client's own, whatever was computed twice."""
    assert None is record.error
    assert (script.text(), "stop") == (record.text, record.finish_reason)
    usage = record.usage or {}
    assert (script.num_prompt_tokens, script.num_pieces + 1) == (usage["prompt_tokens"], usage["completion_tokens"])


async def num_requeued(cluster: Cluster, reason: str) -> int:
    """Attempts that were closed and followed by another."""
    scheduler = (await cluster.status()).one("scheduler")
    return int((await cluster.metrics(scheduler)).total("firsttoken_requeues_total", reason=reason))


async def num_replayed(cluster: Cluster) -> int:
    """Tokens that were fed again, which counts as work in vain."""
    scheduler = (await cluster.status()).one("scheduler")
    return int((await cluster.metrics(scheduler)).total(WASTED_TOKENS_TOTAL, cause="requeued", stage="replay"))


async def test_a_decode_worker_dies_in_mid_answer(pairs: Cluster) -> None:
    """Of several streams, on both workers: all go on, token for token, with one outcome each."""
    before, requeued = await outcomes(pairs), await num_requeued(pairs, "worker_lost")
    replayed = await num_replayed(pairs)
    scripts = [counting(250 + number, step_ms=20) for number in range(8)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live(pairs, script, **USAGE)) for script in scripts]
        records = [await collect(stream, until_deltas=3) for stream in streams]
        await kill_one(pairs, "decode")
        async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
            for stream, record in zip(streams, records, strict=True):
                group.create_task(collect(stream, record=record))
    for script, record in zip(scripts, records, strict=True):
        check(script, record)
    await wait_outcomes(pairs, before, finished=len(scripts))
    assert requeued < await num_requeued(pairs, "worker_lost")
    await eventually(
        lambda: num_replayed(pairs), lambda now: now >= replayed + 2, within_s=60.0, what="the replay is counted"
    )


async def test_a_prefill_worker_dies_in_mid_prompt(pairs: Cluster) -> None:
    """The prompts that it computed are computed by the other one; nobody's answer is touched."""
    before, requeued = await outcomes(pairs), await num_requeued(pairs, "worker_lost")
    decoding = counting(250, step_ms=20)
    prompts = [
        padded([*(f"w{i} " for i in range(20)), "x"], num_prompt_tokens=1_200 + number, prefill_ms=2_000)
        for number in range(4)
    ]
    async with asyncio.timeout(ANSWER_WITHIN_S), AsyncExitStack() as stack:
        running = await stack.enter_async_context(live(pairs, decoding, **USAGE))
        record = await collect(running, until_deltas=2)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(stream_chat(pairs.port, script.body(**USAGE))) for script in prompts]
            await wait_for_state(pairs, "prefilling", 2)
            await kill_one(pairs, "prefill")
            group.create_task(collect(running, record=record))
    check(decoding, record)
    for script, task in zip(prompts, asked, strict=True):
        check(script, task.result())
    await wait_outcomes(pairs, before, finished=len(prompts) + 1)
    assert requeued < await num_requeued(pairs, "worker_lost")


@pytest.mark.parametrize("roles", [("decode", "decode"), ("prefill", "prefill"), ("prefill", "decode")], ids="-".join)
async def test_two_workers_die_under_one_request(pairs: Cluster, roles: Sequence[str]) -> None:
    """kill -9, of whichever role: it goes on once; the second time it is taken for the cause, and not given to a third."""
    before = await outcomes(pairs)
    script = padded([f"{i} " for i in range(50)], num_prompt_tokens=1_000, prefill_ms=4_000, repeat=40, step_ms=20)
    killed: list[int] = []
    async with live_uncached(pairs, script) as stream:
        record = ChatRecord(request_id=stream.headers["x-firsttoken-request"])
        for role in roles:
            if role == "decode":  # its answer has begun there
                await collect(stream, record=record, until_deltas=len(record.deltas) + 5)
            victim = await the_holder(pairs, role, killed)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await collect(stream, record=record)
    assert "request_poisoned" == (record.error or {})["code"]
    assert script.text(len(record.deltas)) == record.text
    await wait_outcomes(pairs, before, failed=1)


async def the_holder(cluster: Cluster, role: str, killed: Sequence[int]) -> int:
    """The process of this role that holds the only request, and is none of those."""
    (holder,) = await eventually(
        lambda: holders(cluster, role),
        lambda found: len(found) == 1 and found[0].live_pid not in killed,
        within_s=BACK_WITHIN_S,
        what=f"one {role} worker holds the request",
    )
    return holder.live_pid


async def test_whole_answers_and_stop_strings_outlive_a_worker(pairs: Cluster) -> None:
    """A stop string that began before the loss is complete after it; a whole answer has one body."""
    whole = counting(400, step_ms=20)
    stopped = Script(pieces=["a", "#", "#", *["-"] * 370, "#", "#", "#", *["b"] * 50], step_ms=20)
    async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
        answers = [group.create_task(ask(pairs.port, whole.body())) for _ in range(3)]
        stops = [group.create_task(stream_chat(pairs.port, stopped.body(stop=["###"]))) for _ in range(3)]
        await wait_for_state(pairs, "decoding", 6)
        await kill_one(pairs, "decode")
    for answer in answers:
        assert whole.text() == answer.result()["choices"][0]["message"]["content"]
    for stop in stops:
        assert ("a##" + "-" * 370, "stop") == (stop.result().text, stop.result().finish_reason)


async def test_a_slow_reader_over_a_loss(pairs: Cluster) -> None:
    """It has not read what was made before the loss; it reads everything once, in the end."""
    script = Script(pieces=[f"{i:05d}" * 400 for i in range(20)], repeat=30, step_ms=5)
    async with open_request(
        pairs.port, "POST", CHAT_PATH, body={**script.body(**USAGE), "stream": True}, receive_buffer=4096
    ) as stream:
        await wait_for_state(pairs, "decoding")
        async with asyncio.TaskGroup() as group:  # others show when the workers have moved on
            for _ in range(4):
                group.create_task(stream_chat(pairs.port, counting(50, step_ms=5).body()))
        for role in ("decode", "decode"):
            await kill_one(pairs, role)
            await pairs.wait_ready(within_s=BACK_WITHIN_S)
        async with asyncio.timeout(ANSWER_WITHIN_S):
            record = await collect(stream)
    check(script, record)


async def test_cancelled_while_it_changes_workers(pairs: Cluster) -> None:
    """Clients leave in the second in which a worker is lost: cancelled once, and everything is given back."""
    before = await outcomes(pairs)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live(pairs, counting(500, step_ms=20))) for _ in range(8)]
        for stream in streams:
            await collect(stream, until_deltas=2)
        await kill_one(pairs, "decode")
        for stream in streams:
            stream.cut()
            await asyncio.sleep(0.05)  # spread over the loss, which is the point
    await wait_outcomes(pairs, before, cancelled=len(streams))


@pytest.fixture
def small_system() -> Generator[Cluster]:
    """A decode pool far below what the streams come to."""
    with ClusterPlan().scripted().setting("kv_pool_mib", 1).start() as cluster:
        yield cluster


async def test_more_streams_than_the_pool_can_hold(small_system: Cluster) -> None:
    """Some are preempted, all go on, none shows it."""
    cluster = small_system
    await ask(cluster.port, counting(3).body())
    baseline = await leaks.capture(cluster)
    scripts: Sequence[Script] = [
        padded([f"{number}-{i} " for i in range(100)], num_prompt_tokens=1_300, repeat=6, step_ms=3)
        for number in range(20)
    ]
    async with asyncio.timeout(2 * ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
        asked = [group.create_task(stream_chat(cluster.port, script.body(**USAGE))) for script in scripts]
    for script, task in zip(scripts, asked, strict=True):
        check(script, task.result())
    assert await num_requeued(cluster, "preempted") > 0
    await leaks.assert_no_leaks(cluster, baseline)
