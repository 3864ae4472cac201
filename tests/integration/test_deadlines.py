"""Deadlines with real processes: in the queue, in a prompt, in an answer, with the scheduler away; nothing is left."""

import asyncio
import os
import signal
import time
from collections.abc import Generator

import pytest

from tests.support import leaks
from tests.support.cancelling import live, wait_for_state
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import exchange, open_request
from tests.support.polling import eventually
from tests.support.script import Script, counting, padded

TIMEOUT_S = 3.0
SLACK_S = 20.0  # of two busy cores; what is cut off would last for forty seconds
DECODING = counting(2_000, step_ms=20)
PREFILLING = padded(["x"], num_prompt_tokens=1_000, prefill_ms=40_000)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def narrow_system() -> Generator[Cluster]:
    """One request at a time."""
    with ClusterPlan().scripted().setting("max_sequences", 1).start() as cluster:
        asyncio.run(ask(cluster.port, counting(3).body()))
        yield cluster


@pytest.mark.parametrize("script", [DECODING, PREFILLING], ids=["decoding", "prefilling"])
async def test_a_late_whole_answer_is_a_504(cluster: Cluster, script: Script) -> None:
    """In time, whatever it was at."""
    started_at = time.monotonic()
    answer = await exchange(cluster.port, "POST", CHAT_PATH, body={**script.body(), "timeout": TIMEOUT_S})
    assert (504, "timeout") == (answer.status, answer.json()["error"]["code"])
    assert TIMEOUT_S <= time.monotonic() - started_at < TIMEOUT_S + SLACK_S


async def test_a_late_stream_ends_with_the_error_behind_its_text(cluster: Cluster) -> None:
    """Then [DONE], and no finish reason."""
    body = {**DECODING.body(), "stream": True}
    headers = {"X-Request-Timeout": str(TIMEOUT_S)}
    async with open_request(cluster.port, "POST", CHAT_PATH, body=body, headers=headers) as stream:
        record = await collect(stream)
    assert "timeout" == (record.error or {})["code"]
    assert record.deltas
    assert DECODING.text(len(record.deltas)) == record.text


async def test_a_late_request_leaves_the_queue(narrow_system: Cluster) -> None:
    """It was never placed; the one that runs is not touched, and the next one gets its turn."""
    cluster = narrow_system
    baseline = await leaks.capture(cluster)
    running = counting(350, step_ms=20)
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
