import shutil
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from shared.engine.decode_runner import DecodeStep
from shared.engine.prefill_runner import PrefillStep
from shared.state.client import StateClient
from tests.support import ports, worker_pair
from tests.support.redis_server import CALL_S, RedisServer


@pytest.fixture(scope="session", params=["valkey", "redis-server"])
def store_binary(request: pytest.FixtureRequest) -> Path | None:
    """Our own Valkey (None), then Debian's Redis, which scripts/install_test_packages.sh brings."""
    if request.param == "valkey":
        return None
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on the path: scripts/install_test_packages.sh")
    return Path(found)


@pytest.fixture(scope="session")
def shared_valkey(store_binary: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Generator[RedisServer]:
    """One real server for all tests of the store; a test that stops it starts it again."""
    # Not one from the range of outgoing connections: one of those could take it while the server is stopped.
    server = RedisServer(ports.gateway_port(), Path(tmp_path_factory.mktemp("store")), binary=store_binary)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def valkey(shared_valkey: RedisServer) -> RedisServer:
    """Running and empty."""
    shared_valkey.start()
    client = StateClient(shared_valkey.url, timeout_s=CALL_S)
    await client.call("FLUSHALL")
    await client.close()
    return shared_valkey


@pytest.fixture
async def client(valkey: RedisServer) -> AsyncGenerator[StateClient]:
    """On an empty store."""
    client = StateClient(valkey.url, timeout_s=CALL_S)
    yield client
    await client.close()


@pytest.fixture(params=["grpc", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one way that KV has between the workers of the test."""
    monkeypatch.setattr(worker_pair, "transports", request.param)
    return request.param


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here waits for a scheduler's lease to run out, and a machine that stands still for 3 s must not make it."""
    monkeypatch.setattr("shared.state.leadership.LEASE_TTL_MS", 600_000)


@pytest.fixture(autouse=True)
def checked_after_each_step(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Pools, prefix indexes and tables of the workers in this process are whole after every step that they hear of."""
    broken: list[AssertionError] = []

    def check(service: DecodeService | PrefillService) -> None:
        try:
            service.check_integrity()
        except AssertionError as error:  # told to the test, not to the engine's thread
            broken.append(error)

    decode_step, prefill_step = DecodeService.on_step, PrefillService.on_step

    def after_decode(service: DecodeService, step: DecodeStep) -> None:
        decode_step(service, step)
        check(service)

    def after_prefill(service: PrefillService, step: PrefillStep) -> None:
        prefill_step(service, step)
        check(service)

    monkeypatch.setattr(DecodeService, "on_step", after_decode)
    monkeypatch.setattr(PrefillService, "on_step", after_prefill)
    yield
    assert [] == broken
