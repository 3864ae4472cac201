"""A Redis of the test's own, which it may stop, kill, empty and start again on the same port."""

import os
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from shared.state.embedded import EmbeddedValkey
from tests.support import ports

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
