"""Requests held in a chosen state, the ways to cancel them, and the time until their blocks are free."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.support.chat import CHAT_PATH
from tests.support.cluster import Cluster, Service
from tests.support.http_client import HttpStream, open_request
from tests.support.metrics import Scrape
from tests.support.polling import eventually
from tests.support.script import Script, counting, padded

TWO_BUDGETS = 512  # prompt tokens that a prefill worker is given ahead (two steps of 256)
FILLER_PREFILL_MS = 60_000  # a chunk each six seconds: longer than any test holds others behind them


@asynccontextmanager
async def live_body(
    cluster: Cluster, body: dict[str, Any], *, port: int | None = None, receive_buffer: int | None = None
) -> AsyncGenerator[HttpStream]:
    """A streamed request that has been admitted; `port` of another gateway than the first."""
    async with open_request(
        port or cluster.port, "POST", CHAT_PATH, body={**body, "stream": True}, receive_buffer=receive_buffer
    ) as stream:
        assert 200 == stream.status, await stream.read_body()
        yield stream


@asynccontextmanager
async def live(cluster: Cluster, script: Script, **parameters: Any) -> AsyncGenerator[HttpStream]:
    """The same, for a script."""
    async with live_body(cluster, script.body(**parameters)) as stream:
        yield stream


@asynccontextmanager
async def live_uncached(cluster: Cluster, script: Script, **parameters: Any) -> AsyncGenerator[HttpStream]:
    """The same, with nothing of its prompt in the prefix cache, whoever asked the same before: it is computed in full."""
    async with live(cluster, script, cache_salt=uuid.uuid4().hex, **parameters) as stream:
        yield stream


async def wait_for_state(cluster: Cluster, state: str, count: int = 1) -> None:
    """At least so many requests are in this state."""
    await eventually(
        cluster.status,
        lambda status: status.requests.get(state, 0) >= count,
        within_s=40.0,
        what=f"{count} requests {state}",
    )


@asynccontextmanager
async def busy_prefill(cluster: Cluster) -> AsyncGenerator[None]:
    """The prefill pool has all the work that it is given ahead: what comes now stays queued."""
    filler = padded(["x"], num_prompt_tokens=TWO_BUDGETS + 100, prefill_ms=FILLER_PREFILL_MS)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live_uncached(cluster, filler)) for _ in range(3)]
        await wait_for_state(cluster, "queued")
        yield
        for stream in streams:
            stream.cut()


async def wait_blocks_free(cluster: Cluster, *, within_s: float) -> float:
    """Seconds until no worker has a block in use."""
    clock = asyncio.get_running_loop()
    begun = clock.time()
    status = await cluster.status()
    for role in ("prefill", "decode"):
        for worker in status.of_role(role):
            await eventually(
                lambda worker=worker: cluster.metrics(worker),
                lambda metrics: 0 == blocks_in_use(metrics),
                within_s=within_s,
                what=f"the blocks of {worker.id} are free",
            )
    return clock.time() - begun


def blocks_in_use(metrics: Scrape) -> float:
    """Neither free nor cached."""
    return sum(metrics.total("firsttoken_kv_blocks", state=s) for s in ("reserved", "active", "quarantined"))


async def outcomes(cluster: Cluster) -> dict[str, float]:
    """How many requests have ended in which way since the scheduler's start."""
    scheduler = (await cluster.status()).one("scheduler")
    return (await cluster.metrics(scheduler)).by("firsttoken_requests_total", "outcome")


async def wait_outcomes(cluster: Cluster, before: dict[str, float], **grown: int) -> None:
    """Waits until the counters have grown by exactly this since `before`. Raises AssertionError if they do not."""
    wanted = {
        outcome: before.get(outcome, 0) + grown.get(outcome, 0) for outcome in ("finished", "cancelled", "failed")
    }
    await eventually(
        lambda: outcomes(cluster),
        lambda now: wanted == {outcome: now.get(outcome, 0) for outcome in wanted},
        within_s=40.0,
        what=f"outcomes {wanted}",
    )


async def holders(cluster: Cluster, role: str) -> list[Service]:
    """Workers of a role that have blocks in use."""
    workers = (await cluster.status()).of_role(role)
    return [worker for worker in workers if blocks_in_use(await cluster.metrics(worker))]


def long_decode(*, step_ms: int = 20) -> Script:
    """Decodes for far longer than a test waits."""
    return counting(50, repeat=2_000, step_ms=step_ms)
