"""PDX-06: crowds cancelled at each stage of their lives, by every way; the audit of the fixture finds nothing left.

Twenty a stage here; `make sweep` takes a hundred, and five hundred at random moments.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import pytest

from tests.support import leaks
from tests.support.cancelling import (
    busy_prefill,
    live,
    live_uncached,
    long_decode,
    outcomes,
    wait_for_state,
    wait_outcomes,
)
from tests.support.chat import CHAT_PATH, ask, collect
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpStream, open_request
from tests.support.metrics import Scrape
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.script import Script, counting, padded

NUM_FILLERS = 3  # of `busy_prefill`
PREFILLING = padded(["x"], num_prompt_tokens=100, prefill_ms=8_000)
BIG = Script(pieces=["0123456789abcdef" * 256], repeat=5_000)  # 4 KiB a token, so that the sockets hold few of them
WORDS = (f"{number} " for number in count(1_000))
ROUND = {"queued": 50, "copying": 2, "parked": 10}
"""How many fit at once: what waits for a place would be queued, and that is another stage. Elsewhere ten."""
STAGES = ("queued", "placing", "waiting for prefill", "prefilling", "copying", "decoding", "parked", "last step")
Thaw = Callable[[], None]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def sweep_system() -> Generator[Cluster]:
    """Its workers may be stopped for some seconds without being given up."""
    with ClusterPlan().scripted().setting("worker_lost_s", 20).start() as cluster:
        yield cluster


@pytest.fixture
async def swept(sweep_system: Cluster) -> AsyncGenerator[Cluster]:
    """Idle and warm before, idle and whole after."""
    await ask(sweep_system.port, counting(3).body())
    baseline = await leaks.capture(sweep_system)
    yield sweep_system
    await leaks.assert_no_leaks(sweep_system, baseline)


@asynccontextmanager
async def held_at(cluster: Cluster, stage: str, num: int) -> AsyncGenerator[tuple[list[HttpStream], Thaw]]:
    """So many streams that stay at this stage; the second lets the worker go on that was stopped for that, if one was."""
    async with AsyncExitStack() as stack:
        status = await cluster.status()
        decode, prefill = (status.one(role).live_pid for role in ("decode", "prefill"))
        thaw: Thaw = lambda: None  # noqa: E731 - most stages stop nobody

        async def begin(script: Script) -> list[HttpStream]:
            return [await stack.enter_async_context(live_uncached(cluster, script)) for _ in range(num)]

        match stage:
            case "queued":
                await stack.enter_async_context(busy_prefill(cluster))
                before = (await cluster.status()).requests["queued"]
                streams = await begin(counting(3))
                await wait_for_state(cluster, "queued", before + num)
            case "placing":
                thaw = stack.enter_context(frozen(decode))
                streams = await begin(counting(2))
                await wait_for_state(cluster, "placing", num)
            case "waiting for prefill":
                thaw = stack.enter_context(frozen(prefill))
                streams = await begin(counting(2))
                await wait_for_state(cluster, "prefilling", num)
            case "prefilling":
                streams = await begin(PREFILLING)
                await wait_for_state(cluster, "prefilling", min(num, 4))
            case "copying":
                # Each its own words: what is cached is not copied.
                scripts = [padded([next(WORDS), "x"], num_prompt_tokens=200, prefill_ms=1_000) for _ in range(num)]
                streams = [await stack.enter_async_context(live(cluster, script)) for script in scripts]
                await wait_for_state(cluster, "prefilling", num)
                thaw = stack.enter_context(frozen(decode))
                await wait_for_state(cluster, "transferring", num)
            case "decoding":
                streams = await begin(long_decode())
                for stream in streams:
                    await collect(stream, until_deltas=2)
            case "parked":
                body = {**BIG.body(), "stream": True}
                streams = [
                    await stack.enter_async_context(
                        open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192)
                    )
                    for _ in range(num)
                ]
                await eventually(
                    cluster.status, lambda s: s.sequences.get("parked") == num, within_s=60.0, what="all are parked"
                )
            case _:  # each is cancelled by itself when its end token is being computed
                streams = await begin(counting(2, step_ms=2_000))
        yield streams, thaw


async def cancel_all(cluster: Cluster, streams: list[HttpStream], thaw: Thaw, *, after_deltas: int) -> None:
    """A third of them each way. Whoever was stopped goes on when all cancels are at the scheduler."""

    async def cancel(stream: HttpStream, way: Callable[[HttpStream], Awaitable[None]]) -> None:
        await collect(stream, until_deltas=after_deltas)
        await way(stream)

    async def delete(stream: HttpStream) -> None:
        answer = await cluster.delete(stream.headers["x-firsttoken-request"])
        assert answer.status in (200, 202), answer.body
        assert "cancelled" == answer.json()["outcome"]

    ways: list[Callable[[HttpStream], Awaitable[None]]] = [delete, _reset, HttpStream.close]
    before = (await cluster.status()).live_requests
    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            group.create_task(cancel(stream, ways[number % len(ways)]))
        ended = len(streams)
        await eventually(
            cluster.status,
            lambda s: (
                sum(n for state, n in s.live_requests.items() if state != "aborting") <= sum(before.values()) - ended
            ),
            within_s=40.0,
            what="every cancel has arrived",
        )
        thaw()


async def _reset(stream: HttpStream) -> None:
    stream.cut()


async def scheduler_metrics(cluster: Cluster) -> Scrape:
    """Of the only scheduler."""
    (metrics,) = await cluster.role_metrics("scheduler")
    return metrics


@pytest.mark.parametrize("stage", STAGES)
async def test_a_crowd_at_one_stage(swept: Cluster, stage: str, sweep: int) -> None:
    """All end as cancelled, once each; every count is back at idle (by the fixture); what was computed counts as wasted."""
    before, metrics = await outcomes(swept), await scheduler_metrics(swept)
    num_left, num_rounds = sweep, 0
    while num_left:
        num = min(num_left, ROUND.get(stage, 10))
        async with held_at(swept, stage, num) as (streams, thaw):
            await cancel_all(swept, streams, thaw, after_deltas=2 if stage == "last step" else 0)
        num_left, num_rounds = num_left - num, num_rounds + 1
        await eventually(swept.status, lambda s: not s.live_requests, within_s=40.0, what="all have ended")

    fillers = NUM_FILLERS * num_rounds if stage == "queued" else 0
    await wait_outcomes(swept, before, cancelled=sweep + fillers)
    wasted = {
        kind: (await scheduler_metrics(swept)).total("firsttoken_wasted_tokens_total", cause="cancelled", stage=kind)
        - metrics.total("firsttoken_wasted_tokens_total", cause="cancelled", stage=kind)
        for kind in ("prefill", "decode")
    }
    # Whoever wakes up may begin a step before it hears of the cancel: then nothing is said about its work.
    if stage in ("prefilling", "copying", "decoding", "parked", "last step"):
        assert wasted["prefill"] > 0, wasted
    if stage in ("decoding", "parked", "last step"):
        assert wasted["decode"] > 0, wasted
    if stage in ("queued", "placing", "prefilling"):
        assert 0 == wasted["decode"], wasted
