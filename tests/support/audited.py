"""A system with several workers a role around one test: ready and warm before it, whole and without leaks after it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import Cluster
from tests.support.script import counting

BACK_WITHIN_S = 120.0
_WARM_UP_REQUESTS = 8  # each of four pairs of workers is met, and its channels are open before open files are counted


@asynccontextmanager
async def audited(system: Cluster) -> AsyncGenerator[Cluster]:
    """The same system. Raises AssertionError at the end if it is not ready again or holds more than before."""
    await system.wait_ready(within_s=BACK_WITHIN_S)
    async with asyncio.TaskGroup() as group:
        for gateway in await system.gateways():
            for _ in range(_WARM_UP_REQUESTS):
                group.create_task(ask(gateway.port, counting(3).body()))
    baseline = await leaks.capture(system)
    yield system
    await system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(system, baseline)
