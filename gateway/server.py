"""uvicorn as we need it: no signal handlers, small buffers, bounded requests, and a handle on a client's connection.

uvicorn's `send` writes first and waits at the next call while the transport is above its high-water mark. With a low
mark and a small kernel buffer "sent" stays close to "taken by the client", which acknowledgements and the stall clock
rest on.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.answer import CONNECTION_EXTENSION
from gateway.errors import error_body
from gateway.listener import stop_taking_connections
from shared.domain.errors import ErrorCode, ServingError

# A delta's event has about 250 bytes: dozens of tokens may be on their way, so the socket never waits for data.
HIGH_WATER_BYTES = 16 * 1024
# Linux doubles it for its bookkeeping. Unset it grows to megabytes on a fast path, all of it text that nobody has read.
KERNEL_SEND_BUFFER_BYTES = 64 * 1024
IDLE_CONNECTION_S = 75  # above the 60 s of common proxies, so that the proxy closes first
MAX_HEAD_BYTES = 64 * 1024  # request line and headers, and one read more: four times Node's bound, twice nginx's
_SHUTDOWN_S = 5  # the drain is over when it starts: only connections that a client keeps open are left
BACKLOG = 2048


class ClientConnection:
    """See `gateway.answer.Connection`."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol

    def pending_bytes(self) -> int:
        return self._protocol.transport.get_write_buffer_size()

    def let_write(self) -> None:
        self._protocol.cycle.keep_alive = False  # nothing follows on a connection that may be cut
        self._protocol.flow.resume_writing()

    def abort_after(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._abort_if_pending)

    def abort(self) -> None:
        self._protocol.transport.abort()

    def _abort_if_pending(self) -> None:
        transport = self._protocol.transport
        if transport.get_write_buffer_size() > 0:
            transport.abort()


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. Closed when for IDLE_CONNECTION_S no request on it has come to its end, and none runs."""

    _request_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0  # read and neither of a body nor of a complete request
    _is_last = False  # no request is taken behind the next answer
    _running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the newest, which may wait behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        sock = cast("socket.socket | None", transport.get_extra_info("socket"))
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        super().connection_made(transport)
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells only the newest
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, but a request that offers an upgrade (h2c, as Java's client does) is served without it."""
        self._unset_keepalive_if_required()
        self._num_head_bytes += len(data)
        rest = data
        while rest:
            try:
                self.parser.feed_data(rest)
                rest = b""
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_upgrade_offered():
                    return
                rest = self._head_without_upgrade() + rest[cast("int", upgrade.args[0]) :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            except httptools.HttpParserError:
                self.send_400_response("this is not a valid HTTP request")
                return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request's headers are larger than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """In the form of every other error, where the client is not in the middle of an answer; then closes."""
        cycle = self._open_cycle()
        if cycle is None or not cycle.response_started:
            body = error_body(ServingError(ErrorCode.INVALID_REQUEST, msg))
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_request_timer()
        scope = cast("dict[str, Any]", self.scope)
        scope["extensions"] = {CONNECTION_EXTENSION: ClientConnection(self)}

    def on_headers_complete(self) -> None:
        if not self._is_upgrade_offered():
            super().on_headers_complete()
            cycle = self._open_cycle()
            if self._is_last and cycle is not None:
                cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_offered():
            return  # the parser leaves its body out: it is read again without the offer
        self._num_head_bytes = 0
        self._stop_request_timer()
        super().on_message_complete()

    def is_awaited(self) -> bool:
        """A request is on its way: the connection is new, or has brought the beginning of one."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or self._num_head_bytes > 0 or (cycle.more_body and not cycle.response_complete)

    def set_last(self) -> None:
        """The next answer says that it is the last one."""
        self._is_last = True

    def end(self) -> None:
        """Closes it behind the answer to the request that runs or is on its way; at once where there is none."""
        self.set_last()
        if self._open_cycle() is not None or not self.is_awaited():
            self.shutdown()

    def _is_upgrade_offered(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_request_timer(self) -> None:
        self._stop_request_timer()
        self._request_timer = self.loop.call_later(IDLE_CONNECTION_S, self._close_if_unused)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _close_if_unused(self) -> None:
        if self._open_cycle() is None:
            self.transport.close()

    def _open_cycle(self) -> RequestResponseCycle | None:
        """The request that is being answered, if any."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return None if cycle is None or cycle.response_complete else cycle


class GatewayServer(uvicorn.Server):
    """Serves until `should_exit`; `shared.process` owns the signals."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=GatewayProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
            )
        )

    async def end_connections(self, sock: socket.socket, within_s: float) -> None:
        """No new ones on `sock`, and each that is there ends behind its present answer, at once where there is none.

        Returns when all requests that are on their way have come, at the latest after `within_s`. What no server can
        promise: a client that sends its next request on a kept connection in the moment in which that is closed.
        """
        for connection in self._connections():
            connection.set_last()
        await stop_taking_connections(sock)
        for listener in self.servers:
            listener.close()
        for connection in self._connections():
            connection.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(connection.is_awaited() for connection in self._connections()):  # noqa: ASYNC110 - once a life
                    await asyncio.sleep(0.01)

    def _connections(self) -> list[GatewayProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, GatewayProtocol)]

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
