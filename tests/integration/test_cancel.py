"""Cancel by a closed connection and by DELETE, at every state: computing stops, every block comes back, soon."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.cancelling import (
    busy_prefill,
    live,
    live_uncached,
    long_decode,
    outcomes,
    wait_blocks_free,
    wait_for_state,
    wait_outcomes,
)
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.cluster import Cluster
from tests.support.http_client import ConnectionCut, HttpStream, open_request
from tests.support.polling import eventually
from tests.support.script import Script, counting, padded

WAYS = ("reset", "close", "delete")
CHUNK_TOKENS = 64
FREE_WITHIN_S = 30.0  # on a busy machine; how soon it is on an idle one, `make bench` measures
PREFILLING = padded(["x"], num_prompt_tokens=3_000, prefill_ms=45_000)


@asynccontextmanager
async def held_in(cluster: Cluster, state: str) -> AsyncGenerator[HttpStream]:
    """A request that stays in this state until it is cancelled."""
    async with AsyncExitStack() as stack:
        match state:
            case "queued":
                await stack.enter_async_context(busy_prefill(cluster))
                before = (await cluster.status()).requests["queued"]
                stream = await stack.enter_async_context(live(cluster, counting(3)))
                await wait_for_state(cluster, "queued", before + 1)
            case "prefilling":
                stream = await stack.enter_async_context(live_uncached(cluster, PREFILLING))
                await wait_for_state(cluster, "prefilling")
            case "decoding":
                stream = await stack.enter_async_context(live(cluster, long_decode(step_ms=50)))
                await collect(stream, until_deltas=3)
            case _:  # the last step: the end token is being computed
                stream = await stack.enter_async_context(live(cluster, counting(1, step_ms=3_000)))
                await collect(stream, until_deltas=1)  # made by prefill: the only step is the last one
                await wait_for_state(cluster, "decoding")
        yield stream


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "last step"])
async def test_cancel_in_every_state(cluster: Cluster, state: str, way: str) -> None:
    """CAN-01, PDX-06: cancelled in each state by each way, it ends as cancelled and (by the fixture) nothing is left."""
    before = await outcomes(cluster)
    async with held_in(cluster, state) as stream:
        match way:
            case "reset":
                stream.cut()
            case "close":
                await stream.close()
            case _:
                answer = await cluster.delete(stream.headers["x-firsttoken-request"])
                assert answer.status in (200, 202), answer.body  # 202 where the step under way outlasts its patience
                assert "cancelled" == answer.json()["outcome"]
                if answer.status == 200:
                    assert (state == "queued") == (answer.json()["blocks_freed"] == 0)
                record = await collect(stream)
                assert record.error is not None
                assert "cancelled" == record.error["code"]
        fillers = 3 if state == "queued" else 0
        if not fillers:
            await wait_blocks_free(cluster, within_s=FREE_WITHIN_S)
    await wait_outcomes(cluster, before, cancelled=1 + fillers)


async def test_a_client_that_waits_for_a_whole_answer_goes_away(cluster: Cluster) -> None:
    """Its request ends as a streamed one does, though nothing was to be written to it."""
    before = await outcomes(cluster)

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(cluster.port, long_decode().body()))
        await wait_for_state(cluster, "decoding")
        asking.cancel()

    await wait_blocks_free(cluster, within_s=FREE_WITHIN_S)
    await wait_outcomes(cluster, before, cancelled=1)


async def test_a_dead_prompt_does_not_delay_the_next(cluster: Cluster) -> None:
    """CAN-02: once the scheduler knows of the cancel, prefill ends the chunk under way (and the one that began while its
    Abort was on the way), not the other forty of a minute; then a short request has its turn.
    """
    name = "firsttoken_tokens_computed_total"
    async with live_uncached(cluster, padded(["x"], num_prompt_tokens=3_000, prefill_ms=60_000)) as stream:
        await wait_for_state(cluster, "prefilling")
        stream.cut()
        await eventually(cluster.status, lambda s: not s.requests["prefilling"], within_s=60.0, what="it is cancelled")
        before = [(await cluster.role_metrics(role))[0].total(name) for role in ("prefill", "decode")]

        record = await stream_chat(cluster.port, counting(2).body())

    after = [(await cluster.role_metrics(role))[0].total(name) for role in ("prefill", "decode")]
    assert counting(2).text() == record.text
    assert after[0] - before[0] <= counting(2).num_prompt_tokens + 2 * CHUNK_TOKENS, "prefill computed for the dead"
    assert after[1] - before[1] <= 3, "decode computed for the dead request"


async def test_cancel_stops_computing(cluster: Cluster) -> None:
    """R33: the counter of computed tokens stands still after a cancel: two looks, many steps apart, see the same."""
    async with live(cluster, long_decode(step_ms=5)) as stream:
        await collect(stream, until_deltas=20)
        stream.cut()
    await wait_blocks_free(cluster, within_s=FREE_WITHIN_S)
    (first,) = await cluster.role_metrics("decode")

    await stream_chat(cluster.port, counting(3, step_ms=100).body())

    (second,) = await cluster.role_metrics("decode")
    name = "firsttoken_tokens_computed_total"
    assert second.total(name) - first.total(name) <= 4


async def test_delete_again_and_by_part_of_an_id(cluster: Cluster) -> None:
    """CAN-04: a shorter id matches nothing; the prefixed form works on both paths; a repeated cancel is a success."""
    async with live(cluster, long_decode()) as doomed, live(cluster, counting(60, step_ms=20)) as other:
        await collect(doomed, until_deltas=2)
        request_id = doomed.headers["x-firsttoken-request"]
        for part in (request_id[:-1], request_id[:3], request_id + "0"):
            assert 404 == (await cluster.delete(part)).status
        first = await cluster.delete(f"chatcmpl-{request_id}")
        again = await eventually(  # 202 where the blocks are free only after 2 s
            lambda: cluster.delete(request_id), lambda answer: answer.status != 202, within_s=30.0, what="all is free"
        )
        record = await collect(other)

    assert first.status in (200, 202), first.body
    assert ("cancelled", 200, "cancelled") == (first.json()["outcome"], again.status, again.json()["outcome"])
    assert again.json()["blocks_freed"] > 0
    assert counting(60).text() == record.text


async def test_cancel_of_a_finished_request(cluster: Cluster) -> None:
    """A cancel that comes too late changes nothing and breaks nothing."""
    before = await outcomes(cluster)
    record = await stream_chat(cluster.port, counting(3).body())
    await wait_outcomes(cluster, before, finished=1)  # the scheduler hears of the end a moment after the client

    answer = await cluster.delete(record.request_id)

    assert 200 == answer.status, answer.body
    assert "finished" == answer.json()["outcome"]
    await wait_outcomes(cluster, before, finished=1)


async def test_a_crowd_leaves_at_once(cluster: Cluster) -> None:
    """PDX-06: thirty streams in decoding, cut in the same moment; those who stay get their exact texts."""
    stays = [counting(80, step_ms=10) for _ in range(4)]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        tasks = [group.create_task(stream_chat(cluster.port, script.body())) for script in stays]
        streams = [await stack.enter_async_context(live(cluster, long_decode())) for _ in range(30)]
        for stream in streams:
            await collect(stream, until_deltas=2)
        for stream in streams:
            stream.cut()

    assert [script.text() for script in stays] == [task.result().text for task in tasks]


async def cancel_at(cluster: Cluster, script: Script, delay_s: float, way: str) -> None:
    """Asks, and cancels after so long whatever state that is; an answer that was faster is exact."""
    try:
        async with asyncio.timeout(delay_s if way != "delete" else None), live(cluster, script) as stream:
            if way == "delete":
                await asyncio.sleep(delay_s)  # the moment is the point: any state may be hit
                answer = await cluster.delete(stream.headers["x-firsttoken-request"])
                assert answer.status in (200, 202, 404), answer.body
            record = await collect(stream)
            if record.error is None:
                assert script.text() == record.text
            else:
                assert "cancelled" == record.error["code"]
                assert script.text().startswith(record.text)
    except (TimeoutError, ConnectionCut):
        pass  # leaving `live` has closed the connection: that was the cancel


async def test_cancel_at_random_moments(cluster: Cluster, sweep: int) -> None:
    """PDX-06: requests cancelled at random moments, also before their headers; all end, once each, nothing is left."""
    rng = random.Random(20)
    num_requests = max(150, 5 * sweep)
    before = await outcomes(cluster)
    plans: list[tuple[Script, float, str]] = []
    for _ in range(num_requests):
        script = padded(
            [f"{rng.random()} " for _ in range(rng.randint(2, 30))],
            num_prompt_tokens=rng.choice([1_000, 1_500]),
            prefill_ms=rng.choice([0, 0, 100]),
            step_ms=rng.choice([0, 3, 10]),
        )
        plans.append((script, rng.uniform(0.0, 0.6), rng.choice(WAYS)))
    gate = asyncio.Semaphore(12)

    async def one(script: Script, delay_s: float, way: str) -> None:
        async with gate:
            await cancel_at(cluster, script, delay_s, way)

    async with asyncio.TaskGroup() as group:
        for plan in plans:
            group.create_task(one(*plan))

    status = await eventually(
        cluster.status, lambda s: not s.live_requests, within_s=40.0, what="every request has ended"
    )
    assert 0 == status.queue
    after = await outcomes(cluster)
    grown = {outcome: after[outcome] - before[outcome] for outcome in after}
    assert 0 == grown["failed"]
    assert grown["cancelled"] > 20, f"the sweep hit too few live requests: {grown}"
    assert grown["finished"] + grown["cancelled"] <= num_requests
    assert counting(9).text() == (await stream_chat(cluster.port, counting(9).body())).text


async def test_a_cancel_before_the_body_is_complete(cluster: Cluster) -> None:
    """A client that goes away while it still sends its question leaves nothing."""
    before = await outcomes(cluster)
    raw = json.dumps(counting(50).body()).encode()
    headers = {"Content-Length": str(len(raw) + 100)}
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(0.3),
            open_request(cluster.port, "POST", CHAT_PATH, raw_body=raw, headers=headers),
        ):
            pass

    assert counting(2).text() == (await stream_chat(cluster.port, counting(2).body())).text
    await wait_outcomes(cluster, before, finished=1)
