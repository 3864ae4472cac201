"""From a session to its client: a bounded channel, and the ASGI response that empties it into the socket.

Not a StreamingResponse: under uvicorn its generator runs in a scope that is cancelled again and again after a
disconnect. Here the session lives elsewhere and is only told; this side awaits nothing in a `finally`.

"Taken by the socket" means that `send` returned. uvicorn's `send` waits while the transport holds more than its
high-water mark, which `gateway.server` sets to 16 KiB: what counts as taken is at most that much ahead of the kernel.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway import sse
from shared.aio.channel import Channel, ChannelClosed
from shared.aio.scope import spawn, stop_when
from shared.domain.clock import Clock

# Each holds the text of one token batch, some hundreds of bytes: far below 1 MiB a client (SCH-02), and enough to go on
# while the socket is busy.
MAX_FRAMES = 64
# The silence is cut a little short, so that the promised interval holds on the wire.
_KEEP_ALIVE_SHARE = 0.95
# A client that has stalled gets the error event if it comes back within this; then its connection is cut.
_LINGER_S = 10.0
CONNECTION_EXTENSION = "firsttoken.connection"


class Connection(Protocol):
    """What the server tells and does beyond ASGI; see `gateway.server`."""

    def pending_bytes(self) -> int:
        """Written and not yet taken by the kernel."""
        ...

    def let_write(self) -> None:
        """The next `send` does not wait, however much is pending, and is the last on this connection."""
        ...

    def abort_after(self, delay_s: float) -> None:
        """Cuts the connection then, unless all was taken before."""
        ...

    def abort(self) -> None:
        """Cuts the connection now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status and headers: the first thing a session puts."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Bytes of the body. With them the client has the text of tokens 1..`token_index`; None = not about tokens."""

    data: bytes
    token_index: int | None = None
    has_text: bool = False
    choice: int = 0
    """Which answer it belongs to, where a client gets several."""


@dataclass(slots=True, kw_only=True)
class ClientLink:
    """Between one session and one client. The session puts a Head, Frames, and closes; the response tells the rest."""

    on_taken: Callable[[Frame], None]
    on_gone: Callable[[], None]
    on_stalled: Callable[[], bytes | None]
    """The client has not read for too long: gives the last bytes for it, None where its answer cannot be ended well."""
    out: Channel[Head | Frame] = field(default_factory=lambda: Channel[Head | Frame](MAX_FRAMES))
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Everything was taken, or the client is gone."""


class Answer(Response):
    """The ASGI response of one session, whole or streamed."""

    def __init__(self, link: ClientLink, *, clock: Clock, keep_alive_s: float, stall_timeout_s: float) -> None:
        super().__init__()
        self._link = link
        self._clock = clock
        self._silence_s = keep_alive_s * _KEEP_ALIVE_SHARE
        self._stall_timeout_s = stall_timeout_s
        self._cut = asyncio.Event()
        self._is_gone = False
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the client has everything or is gone."""
        extensions = cast("Mapping[str, Any]", scope.get("extensions") or {})
        connection = cast("Connection | None", extensions.get(CONNECTION_EXTENSION))
        try:
            async with asyncio.TaskGroup() as group:
                watchers = (
                    spawn(group, self._watch_client(receive), name="client watch"),
                    spawn(group, self._watch_stall(connection), name="stall clock"),
                )
                try:
                    async with stop_when(self._cut):
                        await self._write(send)
                finally:
                    for watcher in watchers:
                        watcher.cancel()
            if not self._is_gone and not self._link.is_over.is_set():
                await self._part(receive, send, connection)
        finally:
            if not self._link.is_over.is_set():
                self._leave()

    async def _write(self, send: Send) -> None:
        is_stream = False
        while True:
            try:
                item = await self._next(is_stream)
            except ChannelClosed:
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
                self._link.is_over.set()
                return
            match item:
                case Head():
                    is_stream = item.headers.get("content-type") == sse.CONTENT_TYPE
                    headers = [(name.encode(), value.encode("latin-1")) for name, value in item.headers.items()]
                    await self._send(send, {"type": "http.response.start", "status": item.status, "headers": headers})
                case Frame():
                    await self._send(send, {"type": "http.response.body", "body": item.data, "more_body": True})
                    self._link.on_taken(item)

    async def _next(self, is_stream: bool) -> Head | Frame:
        """A keep-alive where a stream has nothing to say."""
        if not is_stream:
            return await self._link.out.get()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silence_s):
                return await self._link.out.get()
        return Frame(data=sse.KEEP_ALIVE)

    async def _send(self, send: Send, message: Message) -> None:
        self._sending_since = self._clock.monotonic()
        await send(message)
        self._sending_since = None

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._link.is_over.is_set():  # it also says so after a complete answer
            self._leave()
            self._cut.set()

    async def _watch_stall(self, connection: Connection | None) -> None:
        """Ends the writing when one `send` waits for `stall_timeout_s` without the socket taking a byte."""
        pending, moved_at = 0, self._clock.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._stall_timeout_s / 4))
            now_pending = connection.pending_bytes() if connection else 0
            if self._sending_since is None or now_pending != pending:
                pending, moved_at = now_pending, self._clock.monotonic()
                continue
            if self._clock.monotonic() - max(moved_at, self._sending_since) >= self._stall_timeout_s:
                self._cut.set()
                return

    async def _part(self, receive: Receive, send: Send, connection: Connection | None) -> None:
        """The client has stalled: it finds the reason if it ever reads on, and where there can be none, the end."""
        last_bytes = self._link.on_stalled()
        self._end_link()
        if connection is None:
            return
        if not last_bytes:
            connection.abort()
            await receive()  # that it has gone: to return before would be an answer that we forgot to end
            return
        connection.abort_after(_LINGER_S)
        connection.let_write()
        await send({"type": "http.response.body", "body": last_bytes, "more_body": False})

    def _leave(self) -> None:
        self._is_gone = True
        self._link.on_gone()
        self._end_link()

    def _end_link(self) -> None:
        self._link.out.close()
        self._link.is_over.set()
