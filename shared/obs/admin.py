"""The admin HTTP server of a process: /healthz, /readyz, /metrics and a service's own JSON pages. GET only.

It shares the process's event loop: an answer is the proof that the loop runs, and what a page reads needs no lock.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import Any

import uvicorn

from shared.aio.scope import cancel_and_wait, spawn
from shared.obs.logs import get_logger

Page = Callable[[], Awaitable[tuple[int, str, bytes]]]
"""Gives HTTP status, content type, body."""

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

_log = get_logger("admin")


class AdminServer:
    """Pages by path. Pages may be added while it runs."""

    def __init__(self) -> None:
        self._pages: dict[str, Page] = {}

    def add(self, path: str, page: Page) -> None:
        """Raises ValueError if the path is taken."""
        if path in self._pages:
            raise ValueError(f"{path} is served already")
        self._pages[path] = page

    async def __call__(self, scope: Mapping[str, Any], _receive: object, send: Callable[..., Awaitable[None]]) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            return
        page = self._pages.get(scope["path"])
        if page is None:
            status, content_type, body = 404, TEXT, b"not found\n"
        elif scope["method"] not in ("GET", "HEAD"):
            status, content_type, body = 405, TEXT, b"GET only\n"
        else:
            try:
                status, content_type, body = await page()
            except Exception:  # noqa: BLE001 - a page that fails must not look like a dead process
                _log.exception("admin page failed", path=scope["path"])
                status, content_type, body = 500, TEXT, b"internal error\n"
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    @contextlib.asynccontextmanager
    async def serve(self, sock: socket.socket) -> AsyncGenerator[None]:
        """Serves on a bound socket while the body runs; open connections are cut at its end."""
        config = uvicorn.Config(
            self,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            interface="asgi3",
            ws="none",
            limit_concurrency=64,  # an admin port has few readers; a flood must not take the file descriptors
            timeout_keep_alive=75,
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as group:
            task = spawn(group, server.serve(sockets=[sock]), name="admin-http")
            try:
                await server.is_listening.wait()
                yield
            finally:
                await cancel_and_wait(task)
                server.close_connections()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (`shared.process` owns the signals), and with a word when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def close_connections(self) -> None:
        for listener in getattr(self, "servers", []):  # absent when it was cancelled before it listened
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


def json_page(handler: Callable[[], Awaitable[Mapping[str, Any]]]) -> Page:
    """A page that always answers 200 with the handler's object."""

    async def page() -> tuple[int, str, bytes]:
        return 200, JSON, json.dumps(await handler()).encode()

    return page


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 = the kernel chooses. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
