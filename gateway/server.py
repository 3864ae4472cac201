"""uvicorn as we need it: no signal handlers, small write buffers, and a handle on a client's connection.

uvicorn's `send` writes first and waits at the next call while the transport is above its high-water mark. With a low
mark and a small kernel buffer "sent" stays close to "taken by the client", which acknowledgements and the stall clock
rest on.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.answer import CONNECTION_EXTENSION

# A delta's event has about 250 bytes: dozens of tokens may be on their way, so the socket never waits for data.
HIGH_WATER_BYTES = 16 * 1024
# Linux doubles it for its bookkeeping. Unset it grows to megabytes on a fast path, all of it text that nobody has read.
KERNEL_SEND_BUFFER_BYTES = 64 * 1024
IDLE_CONNECTION_S = 75  # above the 60 s of common proxies, so that the proxy closes first
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

    def _abort_if_pending(self) -> None:
        transport = self._protocol.transport
        if transport.get_write_buffer_size() > 0:
            transport.abort()


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        sock = cast("socket.socket | None", transport.get_extra_info("socket"))
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope["extensions"] = {CONNECTION_EXTENSION: ClientConnection(self)}


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

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
