"""Resumable answers of the default model: what another gateway goes on with is the answer that nobody cut."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support import leaks
from tests.support.chat import CHAT_PATH, stream_chat
from tests.support.cluster import ClusterPlan
from tests.support.http_client import open_request
from tests.support.resuming import ReadSoFar, read_on, resume

NUM_TOKENS = 160  # a test that is held up for a second still meets an answer under way
STORY = [{"role": "user", "content": "Tell me a story about a fox. Use a word of Japanese (狐) and one 🦊."}]
# No end token: each must still be under way when its gateway dies.
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0, "top_p": 0.95, "seed": 11}
pytestmark = pytest.mark.timeout(600)


def body(fields: dict[str, Any]) -> dict[str, Any]:
    """With its usage."""
    return {"model": "default", "messages": STORY, "stream": True, "stream_options": {"include_usage": True}, **fields}


async def test_a_killed_gateway_does_not_show_in_the_text() -> None:
    """Greedy and sampled: cut in mid-answer by kill -9 of the gateway, and once more at the other, which ends them."""
    with ClusterPlan().gateways(2).start() as cluster:
        here, there = await cluster.gateways()
        whole = [await stream_chat(there.port, body(fields)) for fields in (GREEDY, SAMPLED)]
        baseline = await leaks.capture(cluster)
        async with AsyncExitStack() as stack:
            reads: list[ReadSoFar] = []
            streams = [
                await stack.enter_async_context(
                    open_request(here.port, "POST", CHAT_PATH, body={**body(fields), "resumable": True})
                )
                for fields in (GREEDY, SAMPLED)
            ]
            for stream in streams:
                reads.append(ReadSoFar(request_id=stream.headers["x-firsttoken-request"]))
                await read_on(stream, reads[-1], max_events=12)
            os.kill(here.live_pid, signal.SIGKILL)
            for stream, read in zip(streams, reads, strict=True):
                await read_on(stream, read)
        cut = [(read.is_over, 0 < read.last_id < NUM_TOKENS) for read in reads]
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for read in reads:
                group.create_task(finish(there.port, read))
        await cluster.wait_ready()
        await leaks.assert_no_leaks(cluster, baseline)

    assert [(False, True)] * 2 == cut
    assert [(each.text, "length", counts(each.usage)) for each in whole] == [
        (read.text, read.finish_reason, counts(read.usage)) for read in reads
    ]
    assert whole[0].text != whole[1].text


def counts(usage: Mapping[str, Any] | None) -> list[int]:
    """But for what was cached: the first answer had to compute the prompt."""
    return [(usage or {})[name] for name in ("prompt_tokens", "completion_tokens")]


async def finish(port: int, read: ReadSoFar) -> None:
    """Over two connections."""
    async with resume(port, read) as stream:
        await read_on(stream, read, max_events=10)
        stream.cut()
    async with resume(port, read) as stream:
        await read_on(stream, read)
