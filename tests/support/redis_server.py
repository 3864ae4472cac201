"""A Redis of the test's own, which it may stop, kill, empty and start again on the same port."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from shared.state.embedded import EmbeddedValkey
from tests.support import ports
from tests.support.tcp_proxy import tcp_proxy

CALL_S = 20.0  # for a reply, where a test does not ask how soon: far above what a service waits


def connect(url: str, *, answers_within_s: float = 30.0) -> Any:
    """A synchronous client; use it as a context."""
    return redis.Redis.from_url(url, decode_responses=True, socket_timeout=answers_within_s)  # pyright: ignore[reportUnknownMemberType]


class RedisServer(EmbeddedValkey):
    """Without persistence: after a restart it is empty."""

    @property
    def client(self) -> Any:
        """A fresh synchronous client."""
        return connect(self.url)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash does."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()


@contextmanager
def own_redis() -> Generator[RedisServer]:
    """A running one, ended at the end even if it is paused then."""
    with tempfile.TemporaryDirectory(prefix="firsttoken-test-redis-") as folder:
        server = RedisServer(ports.gateway_port(), Path(folder))
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.kill()


class MovingAddress:
    """One address that leads to whatever server the test says, for connections made from then on."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.port = 0
        self.is_there = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def serve(self) -> None:
        """Until `end`, in a thread of its own: tests look into the store without giving their loop a turn."""

        async def target() -> int:
            return self.server.port

        async def forward() -> None:
            async with tcp_proxy(target) as proxy:
                self.port = proxy.port
                self.is_there.set()
                await self._is_over.wait()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(forward())

    def end(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._is_over.set)


@contextmanager
def moving_address(server: RedisServer) -> Generator[MovingAddress]:
    """Leads to this server first."""
    address = MovingAddress(server)
    thread = threading.Thread(target=address.serve)
    thread.start()
    assert address.is_there.wait(60)
    try:
        yield address
    finally:
        address.end()
        thread.join()
