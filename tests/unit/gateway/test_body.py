"""The limit on bodies, over real sockets: what counts is what is read, not what is announced alone."""

import asyncio
import json

from tests.support.chat import CHAT_PATH
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import running_gateway
from tests.support.http_client import exchange
from tests.support.script import counting


async def test_a_declared_body_over_the_limit_is_refused_unread() -> None:
    """413 although not one byte of it was sent."""
    async with running_gateway(max_body_bytes=2000) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n" % CHAT_PATH.encode())
        async with asyncio.timeout(10):
            status_line = await reader.readline()
        writer.close()

    assert b"413" == status_line.split(b" ")[1]


async def test_a_chunked_body_over_the_limit_is_refused_before_its_end() -> None:
    """413 as soon as the limit is passed; the chunked body never ends."""
    async with running_gateway(max_body_bytes=2000) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT_PATH.encode())
        writer.write(b"7d1\r\n" + b" " * 2001 + b"\r\n")
        async with asyncio.timeout(10):
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
        async with asyncio.timeout(10):
            while running.gateway.sessions.num_open == 0:
                await asyncio.sleep(0)
            writer.close()
            await running.gateway.sessions.wait_idle()

    assert {} == backend.requests
