"""The scheduler's client against a real gRPC server. Whole requests are in test_session.py."""

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Container
from dataclasses import replace
from typing import NoReturn

import pytest

from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import ControlEvent, ControlStream, Delivered, Placed, Queued, SchedulerClient, Start
from gateway.request_id import new_request_id
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation
from shared.domain.request import CancelReason, Outcome, RequestSpec
from shared.domain.sampling import SamplingParams
from shared.obs.metrics import Metrics
from shared.process import RealClock
from shared.rpc.channels import ChannelPool
from shared.text.chat import ChatMessage, ChatTokenizer
from tests.support.fake_backend import FakeBackend, running
from tests.support.script import counting

NOTHING_DELIVERED = Delivered(attempt=Attempt(1), ids=(), cached_tokens=0, complete=None)


@contextlib.asynccontextmanager
async def connected(backend: FakeBackend) -> AsyncGenerator[tuple[SchedulerClient, Metrics]]:
    """A client of a served backend."""
    metrics, pool = Metrics("gateway", "g"), ChannelPool("")

    async def locate() -> str:
        return backend.address

    try:
        async with running(backend):
            yield (
                SchedulerClient(
                    locate=locate, pool=pool, incarnation=Incarnation(9), metrics=metrics, clock=RealClock()
                ),
                metrics,
            )
    finally:
        await pool.close()
        metrics.close()


def start() -> Start:
    """Of a small scripted request."""
    prompt = ChatTokenizer.scripted().render([ChatMessage(role="user", content=counting(2).message)])
    spec = RequestSpec(
        request_id=new_request_id(1), prompt_ids=prompt, max_tokens=3, sampling=SamplingParams(seed=2**64 - 1)
    )
    return Start(spec=spec, last_attempt_seen=4, tokens_held=7, last_attempt_closed=3)


async def catch_broken(call: Awaitable[object]) -> str:
    """Why the line broke."""
    with pytest.raises(LinkBroken) as broken:
        await call
    return str(broken.value)


async def test_a_start_carries_everything() -> None:
    """The spec whole, the incarnation, what is held, the highest epoch seen."""
    backend = FakeBackend()
    asked = start()
    async with connected(backend) as (client, _):
        await client.status(30)
        stream = await client.serve(asked)
        assert Queued(position=0) == await stream.read()
        stream.close()

    (sent,) = backend.only.starts
    assert asked.spec == backend.only.spec
    assert (9, 4, 7, 3, 5) == (
        sent.gateway_incarnation,
        sent.last_attempt_seen,
        sent.tokens_held,
        sent.last_attempt_closed,
        sent.scheduler_epoch,
    )


@pytest.mark.parametrize(("timeout_ms", "expected"), [(0, (None,)), (50_000, range(60, 82))])
async def test_a_deadline_is_the_calls_own_too(timeout_ms: int, expected: Container[int | None]) -> None:
    """With some time for the scheduler's own word about it; without one the call lasts."""
    backend = FakeBackend()
    async with connected(backend) as (client, _):
        stream = await client.serve(replace(start(), timeout_ms=timeout_ms))
        assert Queued(position=0) == await stream.read()
        left_s = backend.only.context.time_remaining()
        stream.close()

    assert (None if left_s is None else math.ceil(left_s)) in expected


async def test_a_cancel_on_the_stream_brings_the_outcome() -> None:
    """And then the stream has ended, which reads as a broken link."""
    backend = FakeBackend()
    backend.may_place.clear()
    async with connected(backend) as (client, _):
        stream = await client.serve(start())
        events: list[ControlEvent] = [await stream.read()]
        await stream.ask_cancel(CancelReason.DELETE)
        events.append(await stream.read())
        with pytest.raises(LinkBroken):
            await stream.read()
        stream.close()

    assert isinstance(events[1], Outcome)
    assert ["delete"] == backend.only.cancel_reasons


async def test_a_write_that_ran_out_of_time_breaks_the_line_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write cancels the call; whoever reads meanwhile hears of a broken line, and is not cancelled himself."""
    backend = FakeBackend()
    async with connected(backend) as (client, _):
        stream = await client.serve(start())
        assert [Queued, Placed] == [type(await stream.read()) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(catch_broken(stream.read()))
            await asyncio.sleep(0)
            monkeypatch.setattr("gateway.clients.scheduler._WRITE_TIMEOUT_S", 0.0)
            assert "write timeout" == await catch_broken(stream.tell_delivered(NOTHING_DELIVERED))
        assert "cancelled" == reading.result()
        stream.close()


async def test_a_reader_that_is_cancelled_itself_ends() -> None:
    """And does not take it for a broken line."""
    backend = FakeBackend()
    async with connected(backend) as (client, _):
        stream = await client.serve(start())
        assert [Queued, Placed] == [type(await stream.read()) for _ in range(2)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.read()
        stream.close()


async def test_an_older_scheduler_is_not_listened_to() -> None:
    """Less than the highest epoch seen is refused and counted."""
    backend = FakeBackend()
    async with connected(backend) as (client, metrics):
        await client.status(30)
        backend.epoch = 4
        with pytest.raises(LinkBroken):
            await client.status(30)
        stream = await client.serve(start())
        with pytest.raises(LinkBroken):
            await stream.read()
        stream.close()
        page = metrics.render().decode()

    assert 'firsttoken_refused_total{kind="stale_epoch"} 2.0' in page
    assert 5 == client.epoch


async def test_a_refusal_keeps_its_words() -> None:
    """Code, message, param, time to wait."""
    backend = FakeBackend()
    backend.refusal = ServingError(ErrorCode.NEVER_FITS, "needs more", param="max_tokens")
    async with connected(backend) as (client, _):
        stream = await client.serve(start())
        with pytest.raises(ServingError) as caught:
            await stream.read()
        stream.close()

    assert backend.refusal == caught.value


async def test_nobody_there_is_a_broken_link() -> None:
    """For each kind of call, in a bounded time."""
    backend = FakeBackend()
    async with connected(backend) as (client, _):
        backend.address = "127.0.0.1:9"
        async with asyncio.timeout(30):
            with pytest.raises(LinkBroken):
                await client.status(30)
            with pytest.raises(LinkBroken):
                await client.cancel(new_request_id(1), "k", CancelReason.DELETE)
            with pytest.raises(LinkBroken):
                await (await client.serve(start())).read()


async def test_a_scheduler_that_moved_is_found_after_a_broken_call() -> None:
    """And until then nobody is asked where it is: a Redis that is away costs running work nothing."""
    backend = FakeBackend()
    metrics, pool = Metrics("gateway", "g"), ChannelPool("")
    addresses = ["127.0.0.1:9"]
    num_asked = 0

    async def locate() -> str:
        nonlocal num_asked
        num_asked += 1
        return addresses[-1]

    client = SchedulerClient(locate=locate, pool=pool, incarnation=Incarnation(9), metrics=metrics, clock=RealClock())
    async with running(backend):
        with pytest.raises(LinkBroken):
            await client.status(30)
        addresses.append(backend.address)
        for _ in range(3):
            assert 2 == (await client.status(30)).queue
    await pool.close()
    metrics.close()

    assert 2 == num_asked


async def read_to_the_end(stream: ControlStream) -> NoReturn:
    """Raises what ends it."""
    while True:
        await stream.read()


async def test_a_scheduler_that_was_replaced_and_lives_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off from Redis alone it still answers; its streams are broken, and are dialled again at the active one."""
    monkeypatch.setattr("gateway.clients.scheduler._LOOK_INTERVAL_S", 0.01)
    old, new = FakeBackend(), FakeBackend()
    metrics, pool = Metrics("gateway", "g"), ChannelPool("")
    place: list[str | None] = []
    was_away = asyncio.Event()

    async def locate() -> str:
        if place[-1] is None:
            was_away.set()
            raise ServingError(ErrorCode.STATE_UNAVAILABLE, "Redis is away")
        return place[-1]

    client = SchedulerClient(locate=locate, pool=pool, incarnation=Incarnation(9), metrics=metrics, clock=RealClock())
    async with running(old), running(new), asyncio.TaskGroup() as group:
        place.append(old.address)
        watching = group.create_task(client.watch_place())
        stream = await client.serve(start())
        assert isinstance(await stream.read(), Queued)
        place.append(None)
        async with asyncio.timeout(30):
            await was_away.wait()
        place.append(new.address)
        with pytest.raises(LinkBroken):
            await read_to_the_end(stream)
        stream = await client.serve(start())
        assert isinstance(await stream.read(), Queued)
        assert [1, 1] == [len(backend.requests) for backend in (old, new)]
        stream.close()
        watching.cancel()
    await pool.close()
    metrics.close()


async def test_calls_that_wait_when_the_scheduler_is_replaced_are_broken_and_not_cancelled() -> None:
    """grpc tells who waits for a call of a closed channel in the words of his own cancel: a session would lose its line."""
    metrics, pool = Metrics("gateway", "g"), ChannelPool("")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        async def locate() -> str:
            return address

        client = SchedulerClient(
            locate=locate, pool=pool, incarnation=Incarnation(9), metrics=metrics, clock=RealClock()
        )

        async def outcome(call: Awaitable[object]) -> str:
            with contextlib.suppress(LinkBroken):
                await call
                return "answered"
            return "broken"

        async with asyncio.TaskGroup() as group:
            calls = (
                client.serve(start()),
                client.status(30),
                client.cancel(new_request_id(1), "", CancelReason.DELETE),
            )
            tasks = [group.create_task(outcome(call)) for call in calls]
            for _ in range(10):
                await asyncio.sleep(0)  # each has begun its call
            await pool.drop(address)
    await pool.close()
    metrics.close()

    assert ["broken"] * 3 == [task.result() for task in tasks]


async def test_status_is_told_whole() -> None:
    """In the domain's words."""
    backend = FakeBackend()
    async with connected(backend) as (client, _):
        status = await client.status(30)

    assert ["scheduler", "prefill", "decode"] == [service.role for service in status.services]
    assert (2, {"decoding": 1}, {"decode": {"free": 9}}) == (status.queue, status.requests, status.blocks)
    assert (True, 0, 10_000) == (status.is_redis_ready, status.unreleased, status.max_request_tokens)
