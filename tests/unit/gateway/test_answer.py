"""The ASGI side alone, with a send and a receive that the test holds in hand."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.answer import CONNECTION_EXTENSION, Answer, ClientLink, Frame, Head
from shared.process import RealClock

STREAM_HEAD = Head(status=200, headers={"content-type": "text/event-stream; charset=utf-8"})


class Client:
    """Takes what is sent; leaves, stops taking, or reports progress when the test says so."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.taken: list[Frame] = []
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.has_left = asyncio.Event()
        self.got_something = asyncio.Event()
        self.num_gone = 0
        self.last_bytes: bytes | None = b"error"
        self.pending = 0
        self.aborts: list[float] = []
        self.link = ClientLink(on_taken=self.taken.append, on_gone=self._on_gone, on_stalled=lambda: self.last_bytes)

    @property
    def body(self) -> bytes:
        """All bytes of the body so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    def answer(self, **settings: float) -> Callable[[], Awaitable[None]]:
        """The answer, ready to be run."""
        answer = Answer(self.link, clock=RealClock(), **{"keep_alive_s": 60.0, "stall_timeout_s": 60.0, **settings})
        scope = {"type": "http", "extensions": {CONNECTION_EXTENSION: self}}
        return lambda: answer(scope, self._receive, self._send)

    def pending_bytes(self) -> int:
        """As the connection tells it."""
        return self.pending

    def let_write(self) -> None:
        """The connection's."""
        self.may_take.set()

    def abort_after(self, delay_s: float) -> None:
        """The connection's."""
        self.aborts.append(delay_s)

    def abort(self) -> None:
        """The connection's."""
        self.aborts.append(0.0)
        self.has_left.set()

    def _on_gone(self) -> None:
        self.num_gone += 1

    async def _receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_take.wait()
        self.sent.append(dict(message))
        self.got_something.set()


async def test_what_the_session_puts_is_sent_in_order_and_ended_once() -> None:
    """Head, frames, one last empty body; each frame is reported when it was taken."""
    client = Client()
    frames = [Frame(data=b"a", token_index=1), Frame(data=b"b", token_index=2)]
    for item in (STREAM_HEAD, *frames):
        await client.link.out.put(item)
    client.link.out.close()

    await client.answer()()

    assert ["http.response.start", *["http.response.body"] * 3] == [message["type"] for message in client.sent]
    assert [True, True, False] == [message["more_body"] for message in client.sent[1:]]
    assert b"ab" == client.body
    assert frames == client.taken
    assert client.link.is_over.is_set()
    assert 0 == client.num_gone


async def test_silence_is_filled_with_comments_only_in_a_stream() -> None:
    """The keep-alive counts from the last byte; a whole answer has no room for it."""
    stream, whole = Client(), Client()
    await stream.link.out.put(STREAM_HEAD)
    await whole.link.out.put(Head(status=200, headers={"content-type": "application/json"}))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_run(client.answer(keep_alive_s=0.02))) for client in (stream, whole)]
        while len(stream.sent) < 4:
            stream.got_something.clear()
            await stream.got_something.wait()
        for task in tasks:
            task.cancel()

    assert stream.body.startswith(b": keep-alive\n\n" * 3)
    assert b"" == whole.body


async def test_a_client_that_leaves_ends_the_answer() -> None:
    """The session is told once, and its channel is closed so that it waits for no room."""
    client = Client()
    await client.link.out.put(STREAM_HEAD)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(_run(client.answer()))
        await client.got_something.wait()
        client.has_left.set()

    assert 1 == client.num_gone
    assert client.link.is_over.is_set()
    assert client.link.out.is_closed


async def test_a_server_that_cancels_the_answer_counts_as_the_client_leaving() -> None:
    """As at the end of a shutdown: nothing is awaited, and the session hears of it."""
    client = Client()
    await client.link.out.put(STREAM_HEAD)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(_run(client.answer()))
        await client.got_something.wait()
        task.cancel()

    assert 1 == client.num_gone


async def test_a_client_that_takes_nothing_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent the last bytes without waiting, and its connection is cut a while later."""
    monkeypatch.setattr("gateway.answer._LINGER_S", 10.0)
    client = Client()
    client.may_take.clear()
    client.pending = 5
    await client.link.out.put(STREAM_HEAD)

    async with asyncio.timeout(30):
        await client.answer(stall_timeout_s=0.1)()

    assert b"error" == client.body
    assert not client.sent[-1]["more_body"]
    assert [10.0] == client.aborts
    assert 0 == client.num_gone


async def test_a_stalled_answer_without_an_end_is_cut_at_once() -> None:
    """A whole answer cannot be ended in the middle."""
    client = Client()
    client.may_take.clear()
    client.last_bytes = None
    await client.link.out.put(STREAM_HEAD)

    async with asyncio.timeout(30):
        await client.answer(stall_timeout_s=0.1)()

    assert [] == client.sent
    assert [0.0] == client.aborts


async def test_a_socket_that_moves_is_not_stalled() -> None:
    """One byte a look is progress, however long a single send waits."""
    client = Client()
    client.may_take.clear()
    await client.link.out.put(STREAM_HEAD)
    await client.link.out.put(Frame(data=b"text"))
    client.link.out.close()
    looks = 0

    def moving() -> int:
        nonlocal looks
        looks += 1
        if looks == 20:
            client.may_take.set()
        return looks

    client.pending_bytes = moving

    async with asyncio.timeout(30):
        await client.answer(stall_timeout_s=0.08)()

    assert b"text" == client.body
    assert [] == client.aborts


async def _run(answer: Callable[[], Awaitable[None]]) -> None:
    await answer()
