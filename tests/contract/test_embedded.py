import asyncio
import subprocess
from pathlib import Path

import pytest

from shared.state.client import StateClient
from shared.state.embedded import EmbeddedValkey, EmbeddedValkeyError, server_binary
from tests.support.redis_server import CALL_S


async def test_starts_on_a_free_port_and_restarts_on_the_same(tmp_path: Path) -> None:
    """Answers when `start` returns, never evicts, keeps nothing, leaves no process and no data file."""
    server = EmbeddedValkey(0, tmp_path / "store")
    server.start()
    try:
        url = server.url
        client = StateClient(url, timeout_s=CALL_S)
        await client.check_eviction_policy()
        await client.call("SET", "key", "value")
        await asyncio.to_thread(server.stop)
        assert (False, 0) == (server.is_running, server.pid)
        await asyncio.to_thread(server.start)
        assert url == server.url
        assert await client.call("GET", "key") is None
        await client.close()
    finally:
        server.stop()
        server.stop()

    assert ["valkey.log"] == [file.name for file in (tmp_path / "store").iterdir()]


def test_taken_port_is_an_error(tmp_path: Path) -> None:
    """Told with the place of the log; the first one is not disturbed."""
    with EmbeddedValkey(0, tmp_path / "one") as first:
        second = EmbeddedValkey(first.port, tmp_path / "two")
        with pytest.raises(EmbeddedValkeyError, match=r"valkey\.log"):
            second.start()
        assert (True, False) == (first.is_running, second.is_running)


def test_binary_is_a_server() -> None:
    """The file that is found runs."""
    output = subprocess.run(
        [server_binary(), "--version"], capture_output=True, text=True, check=True, timeout=90
    ).stdout

    assert "server v=" in output
