"""The server's own part: what a connection tells, and how much it holds."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.answer import CONNECTION_EXTENSION, Answer, ClientLink, Frame, Head
from gateway.server import (
    HIGH_WATER_BYTES,
    IDLE_CONNECTION_S,
    KERNEL_SEND_BUFFER_BYTES,
    MAX_HEAD_BYTES,
    ClientConnection,
    GatewayServer,
)
from shared.obs.admin import bind
from shared.process import RealClock
from tests.support.chat import CHAT_PATH, collect
from tests.support.gateway_app import RunningGateway, running_gateway, the_request, until, until_idle
from tests.support.hand_timers import HandTimers
from tests.support.http_client import HttpAnswer, HttpStream, open_request
from tests.support.script import counting


async def test_send_waits_for_a_client_that_does_not_read() -> None:
    """The transport holds little more than its mark, the kernel little more than its buffer; the handle tells how much."""
    seen: dict[str, Any] = {}
    piece = b"x" * 1024
    is_stuck = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection: ClientConnection = scope["extensions"][CONNECTION_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen["sent"] = 0
        try:
            while True:
                async with asyncio.timeout(1.5):  # the socket takes what it can take at once
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                seen["sent"] += len(piece)
        except TimeoutError:
            seen["pending"] = connection.pending_bytes()
            connection.let_write()
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
            connection.abort_after(0.0)
            is_stuck.set()

    server = GatewayServer(app)
    listener = bind("127.0.0.1", 0)
    listener.listen()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await is_stuck.wait()
        while server.server_state.connections:  # the handle cuts it, although the client has read nothing
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
    client.close()

    assert HIGH_WATER_BYTES < seen["pending"] < HIGH_WATER_BYTES + 4096
    assert seen["sent"] < HIGH_WATER_BYTES + 4 * KERNEL_SEND_BUFFER_BYTES


async def test_a_stalled_answer_that_has_no_end_is_cut_without_a_complaint(caplog: pytest.LogCaptureFixture) -> None:
    """To uvicorn an answer that returns unended is a bug, unless its client has gone."""
    link = ClientLink(on_taken=lambda _: None, on_gone=lambda: None, on_stalled=lambda: None)
    await link.out.put(Head(status=200, headers={"content-type": "application/json"}))
    for _ in range(20):
        await link.out.put(Frame(data=b"x" * 100_000))
    server = GatewayServer(Answer(link, clock=RealClock(), keep_alive_s=60.0, stall_timeout_s=0.2))
    listener = bind("127.0.0.1", 0)
    listener.listen()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await link.is_over.wait()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
    client.close()
    # Of the server alone: what the collector of garbage finds of other tests is told as an error, too.
    complaints = [record.message for record in caplog.records if record.name.startswith("uvicorn")]
    assert [] == complaints


@contextlib.asynccontextmanager
async def sending(running: RunningGateway, data: bytes) -> AsyncGenerator[HttpStream]:
    """A connection on which these bytes were sent."""
    stream = HttpStream(*await asyncio.open_connection("127.0.0.1", running.port))
    try:
        await stream.send(data)
        yield stream
    finally:
        await stream.close()


async def read_answer(stream: HttpStream) -> HttpAnswer:
    """The next one."""
    await stream.read_head()
    return HttpAnswer(status=stream.status, headers=stream.headers, body=await stream.read_body())


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nX : y\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_an_openai_error(data: bytes) -> None:
    """ERR-02: 400 in the form of every other error, and the connection ends."""
    async with running_gateway() as running, sending(running, data) as stream:
        answer = await read_answer(stream)
        assert await stream.is_at_end()

    assert (400, "application/json") == (answer.status, answer.headers["content-type"])
    assert {
        "error": {
            "message": "this is not a valid HTTP request",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_value",
        }
    } == answer.json()


@pytest.mark.parametrize("line", [b"X-A: ", b"X-%d: a\r\n"])
async def test_headers_without_end_are_refused(line: bytes) -> None:
    """One long one or many short ones; nothing of that size is kept."""
    data = b"GET / HTTP/1.1\r\nHost: x\r\n"
    data += b"".join(line % number for number in range(20_000)) if b"%d" in line else line + b"a" * 200_000
    assert MAX_HEAD_BYTES < len(data)
    async with running_gateway() as running, sending(running, data) as stream:
        answer = await read_answer(stream)

    assert 400 == answer.status
    assert "headers are larger" in answer.json()["error"]["message"]


async def test_a_large_body_is_no_head() -> None:
    """In one piece or in chunks of a byte, whose frames alone are larger than a head may be."""
    content = json.dumps(counting(2).body()).encode()
    padded = content + b" " * (20_000 - len(content))
    head = b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT_PATH.encode()
    whole = head + b"Content-Length: %d\r\n\r\n" % (10 * len(padded)) + padded + b" " * (9 * len(padded))
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in padded)
    async with running_gateway() as running:
        for data in (whole, chunks + b"0\r\n\r\n"):
            async with sending(running, data) as stream:
                assert 200 == (await read_answer(stream)).status


@pytest.mark.parametrize("cut", [None, 60, -3])
async def test_an_offered_upgrade_is_declined_and_the_request_served(cut: int | None) -> None:
    """Java's client offers h2c on each request by default. Its body counts, whole or in pieces, and so does what follows."""
    content = json.dumps(counting(2).body()).encode()
    request = (
        b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (CHAT_PATH.encode(), len(content), content)
    )
    async with running_gateway() as running, sending(running, request[:cut] if cut else request * 3) as stream:
        if cut:
            for _ in range(20):  # passes in which the server reads the first piece alone
                await asyncio.sleep(0)
            await stream.send(request[cut:] + request * 2)
        answers = [await read_answer(stream) for _ in range(3)]

    assert [200] * 3 == [answer.status for answer in answers]
    assert {counting(2).text()} == {answer.json()["choices"][0]["message"]["content"] for answer in answers}


def head_bytes(running: RunningGateway) -> list[int]:
    """Of each connection: how much of an unfinished head the server has read."""
    connections: Any = running.server.server_state.connections
    return [connection._num_head_bytes for connection in connections]


@pytest.mark.parametrize("data", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: b"])
async def test_a_request_that_does_not_end_closes_its_connection(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Nobody holds a socket for ever by sending half a head; after an answer it counts anew."""
    timers = HandTimers(monkeypatch, from_s=IDLE_CONNECTION_S)
    whole = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running_gateway() as running, sending(running, whole + data) as stream:
        answer = await read_answer(stream)
        timers.ring(IDLE_CONNECTION_S)
        assert await stream.is_at_end()
    async with running_gateway() as running, sending(running, data) as stream:
        async with asyncio.timeout(30):  # a connection that is closed with something unread is reset
            while [len(data)] != head_bytes(running):
                await asyncio.sleep(0.001)
        timers.ring(IDLE_CONNECTION_S)
        assert await stream.is_at_end()

    assert 200 == answer.status


async def connected(running: RunningGateway) -> HttpStream:
    """A connection that the gateway has accepted."""
    num_before = len(running.server.server_state.connections)
    stream = HttpStream(*await asyncio.open_connection("127.0.0.1", running.port))
    async with asyncio.timeout(30):
        while len(running.server.server_state.connections) == num_before:
            await asyncio.sleep(0)
    return stream


MODELS = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", MODELS[:20]])
async def test_who_has_connected_before_the_end_is_still_served(begun: bytes) -> None:
    """However late the request comes; its answer says that it is the last. A new connection is refused."""
    async with running_gateway() as running, asyncio.TaskGroup() as group:
        stream = await connected(running)
        await stream.send(begun)
        ending = group.create_task(running.server.end_connections(running.listener, 30.0))
        async with asyncio.timeout(30):
            while running.server.servers[0].is_serving():
                await asyncio.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", running.port)
        assert not ending.done()
        await stream.send(MODELS[len(begun) :])
        answer = await read_answer(stream)
        assert await stream.is_at_end()
        await stream.close()
    assert (200, "close") == (answer.status, answer.headers["connection"])


async def test_nobody_waits_for_connections_that_are_kept() -> None:
    """One that had its answer ends at once, one that never asks after the time for that."""
    async with running_gateway() as running:
        kept, silent = await connected(running), await connected(running)
        await kept.send(MODELS)
        assert 200 == (await read_answer(kept)).status
        await running.server.end_connections(running.listener, 0.1)
        assert await kept.is_at_end()
        running.server.server_state.connections.copy().pop().shutdown()  # what the end of the server does
        assert await silent.is_at_end()
        for stream in (kept, silent):
            await stream.close()


async def test_an_answer_under_way_is_not_closed_with_the_idle_connections() -> None:
    """It ends well, and its connection with it."""
    script = counting(8)
    async with running_gateway() as running:
        running.backend.max_tokens_out = 2
        body = {**script.body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, headers={"Connection": None}, body=body) as stream:
            record = await collect(stream, until_deltas=2)
            await running.server.end_connections(running.listener, 30.0)
            running.backend.let_out(None)
            await collect(stream, record=record)
            assert await stream.is_at_end()
    assert (script.text(), "stop") == (record.text, record.finish_reason)


async def test_who_leaves_with_a_second_request_sent_cancels_the_first() -> None:
    """uvicorn tells a lost connection only to the newest request on it; the one that is being answered must know."""
    body = json.dumps(counting(8).body(stream=True)).encode()
    question = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close resets
    async with running_gateway() as running:
        running.backend.max_tokens_out = 2
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", running.port))
        await loop.sock_sendall(client, question * 2)
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 2)
        client.close()
        running.backend.let_out(3)  # what is written now fails
        await until(request, lambda seen: seen.cancel_reasons)
        await until_idle(running)
    assert ["disconnect"] == running.backend.only.cancel_reasons
