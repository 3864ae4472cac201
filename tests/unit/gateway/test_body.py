"""The bounds on bodies, over real sockets: what counts is what is read, not what is announced alone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import pytest

from tests.support.chat import CHAT_PATH
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import RunningGateway, running_gateway
from tests.support.http_client import HttpAnswer, HttpStream, exchange
from tests.support.script import counting


@contextlib.asynccontextmanager
async def half_body(running: RunningGateway, sent: bytes, announced: int) -> AsyncGenerator[HttpStream]:
    """A request that stays in its body, once the gateway holds what was sent of it."""
    held = running.gateway.bodies.held_bytes + len(sent)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT_PATH.encode(), announced))
    writer.write(sent)
    try:
        async with asyncio.timeout(30):
            while running.gateway.bodies.held_bytes < held:
                await asyncio.sleep(0)
        yield HttpStream(reader, writer)
    finally:
        writer.close()


async def answer_on(stream: HttpStream) -> HttpAnswer:
    """What comes, although the request has no end."""
    await stream.read_head()
    return HttpAnswer(status=stream.status, headers=stream.headers, body=await stream.read_body())


async def test_a_declared_body_over_the_limit_is_refused_unread() -> None:
    """413 although not one byte of it was sent."""
    async with running_gateway(max_body_bytes=2000) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n" % CHAT_PATH.encode())
        async with asyncio.timeout(30):
            status_line = await reader.readline()
        writer.close()

    assert b"413" == status_line.split(b" ")[1]


async def test_a_chunked_body_over_the_limit_is_refused_before_its_end() -> None:
    """413 as soon as the limit is passed; the chunked body never ends."""
    async with running_gateway(max_body_bytes=2000) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT_PATH.encode())
        writer.write(b"7d1\r\n" + b" " * 2001 + b"\r\n")
        async with asyncio.timeout(30):
            status_line = await reader.readline()
        writer.close()

    assert b"413" == status_line.split(b" ")[1]


async def test_a_body_at_the_limit_is_read() -> None:
    """The limit itself is allowed."""
    content = json.dumps(counting(2).body()).encode()
    padded = content + b" " * (2000 - len(content))
    async with running_gateway(max_body_bytes=2000) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, raw_body=padded)

    assert 200 == answer.status


async def test_a_client_that_leaves_inside_its_body_leaves_nothing() -> None:
    """Nothing was asked, so nothing is answered, and its place is free."""
    backend = FakeBackend()
    async with running_gateway(backend) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{" % CHAT_PATH.encode())
        async with asyncio.timeout(30):
            while running.gateway.sessions.num_open == 0:
                await asyncio.sleep(0)
            writer.close()
            await running.gateway.sessions.wait_idle()

    assert {} == backend.requests


async def test_a_body_that_does_not_end_in_time_is_refused() -> None:
    """408 in OpenAI's form; the connection closes, since half a request is still in it, and its place is free."""
    async with running_gateway(body_timeout_s=0.05) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{" % CHAT_PATH.encode())
        answer = await answer_on(HttpStream(reader, writer))
        async with asyncio.timeout(30):
            assert b"" == await reader.read()
            await running.gateway.sessions.wait_idle()
        writer.close()

    assert (408, "slow_client", "close") == (
        answer.status,
        answer.json()["error"]["code"],
        answer.headers["connection"],
    )
    assert 0 == running.gateway.bodies.held_bytes
    assert {} == running.backend.requests


async def test_half_bodies_do_not_hold_the_drain() -> None:
    """They get 503 as soon as it begins: nothing was promised to them, and they may never end."""
    async with running_gateway() as running, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(half_body(running, b"{", 900)) for _ in range(5)]
        assert 5 == running.gateway.sessions.num_open
        async with asyncio.timeout(30):  # far below the drain's own bound
            await running.gateway.sessions.drain(60.0)
        answers = [await answer_on(stream) for stream in streams]

    assert [(503, "draining")] * 5 == [(answer.status, answer.json()["error"]["code"]) for answer in answers]
    assert {} == running.backend.requests


async def test_all_bodies_together_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """429 for the one that asks for too much; a body with a byte in it takes one, and a small request comes through."""
    monkeypatch.setattr("gateway.body.MAX_LARGEST_BODIES", 2)
    small = json.dumps(counting(2).body()).encode()
    async with running_gateway(max_body_bytes=2000) as running, contextlib.AsyncExitStack() as stack:
        for sent in (b" " * 1500, b" " * 1500, b"{", b"{", b"{"):
            await stack.enter_async_context(half_body(running, sent, 2000))
        taken = await exchange(running.port, "POST", CHAT_PATH, raw_body=small)
        refused = await exchange(running.port, "POST", CHAT_PATH, raw_body=b" " * 1500)
        assert 3003 == running.gateway.bodies.held_bytes

    assert 200 == taken.status
    assert (429, "overloaded") == (refused.status, refused.json()["error"]["code"])
    assert "retry-after" in refused.headers
