"""Systems that several tests share. A test that kills something starts its own."""

import asyncio
from collections.abc import AsyncGenerator, Generator

import pytest

from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.script import counting


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
