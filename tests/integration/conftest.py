"""Systems that several tests share. A test that kills something starts its own."""

import asyncio
from collections.abc import AsyncGenerator, Generator

import pytest

from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.script import counting


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sweep 100`: how many requests end at each stage, by each cause, and five times that at random moments."""
    parser.addoption("--sweep", type=int, default=8, help="cancels at each stage of a request's life")


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> int:
    """How many cancels a stage."""
    num = request.config.getoption("--sweep")
    assert isinstance(num, int)
    return num


async def warm_up(cluster: Cluster) -> None:
    """One answer, so that the channels that stay open are open before the first count of open files."""
    script = counting(4)
    answer = await ask(cluster.port, script.body())
    assert script.text() == answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="session")
def scripted_system() -> Generator[Cluster]:
    """One prefill and one decode worker; keep-alives each second so that tests can see some."""
    with ClusterPlan().scripted().setting("keep_alive_s", 1).start() as cluster:
        asyncio.run(warm_up(cluster))
        yield cluster


@pytest.fixture
async def cluster(scripted_system: Cluster) -> AsyncGenerator[Cluster]:
    """The shared scripted system, audited for leaks after the test."""
    baseline = await leaks.capture(scripted_system)
    yield scripted_system
    await leaks.assert_no_leaks(scripted_system, baseline)


@pytest.fixture(scope="session")
def grpc_system() -> Generator[Cluster]:
    """As the shared one, but KV goes by grpc: what workers on two hosts would do."""
    with ClusterPlan().scripted().setting("transports", "grpc").start() as cluster:
        asyncio.run(warm_up(cluster))
        yield cluster


@pytest.fixture(params=["shm", "grpc"])
def system_by(request: pytest.FixtureRequest) -> tuple[str, Cluster]:
    """A transport, and the system whose KV goes by it."""
    name = "grpc_system" if request.param == "grpc" else "scripted_system"
    return request.param, request.getfixturevalue(name)


@pytest.fixture
async def either(system_by: tuple[str, Cluster]) -> AsyncGenerator[Cluster]:
    """The system by each transport; after the test that is how its KV has gone, and nothing has leaked."""
    transport, system = system_by
    baseline = await leaks.capture(system)
    before = await sent_bytes(system)
    yield system
    await leaks.assert_no_leaks(system, baseline)
    after = await sent_bytes(system)
    assert [transport] == [name for name, count in after.items() if count > before.get(name, 0)]


async def sent_bytes(cluster: Cluster) -> dict[str, float]:
    """Bytes of KV by transport, by the only prefill worker's word."""
    (scraped,) = await cluster.role_metrics("prefill")
    return {sample.labels["transport"]: sample.value for sample in scraped.all("firsttoken_kv_transfer_bytes_total")}
