from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from shared.state.client import StateClient
from tests.support import worker_pair
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """One real server for all tests of the store; a test that stops it starts it again."""
    server = RedisServer(0, Path(tmp_path_factory.mktemp("valkey")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def valkey(shared_valkey: RedisServer) -> RedisServer:
    """Running and empty."""
    shared_valkey.start()
    client = StateClient(shared_valkey.url)
    await client.call("FLUSHALL")
    await client.close()
    return shared_valkey


@pytest.fixture
async def client(valkey: RedisServer) -> AsyncGenerator[StateClient]:
    """On an empty store."""
    client = StateClient(valkey.url)
    yield client
    await client.close()


@pytest.fixture(params=["grpc", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one way that KV has between the workers of the test."""
    monkeypatch.setattr(worker_pair, "transports", request.param)
    return request.param
