"""The gateway's application on a real socket in this process, with a fake backend behind it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from gateway.app import Gateway, open_gateway
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from shared.aio.scope import cancel_and_wait
from shared.domain.ids import Incarnation
from shared.obs.admin import bind
from shared.obs.metrics import Metrics
from shared.process import RealClock
from shared.state.locate import SchedulerLocator
from shared.state.stream_log import StreamLog
from shared.text.chat import ChatTokenizer
from tests.support.fake_backend import FakeBackend, FakeRequest, running

WAIT_S = 90.0  # a hang alone takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
    """`port` is the HTTP port."""

    gateway: Gateway
    server: GatewayServer
    backend: FakeBackend
    metrics: Metrics
    listener: socket.socket
    port: int


@contextlib.asynccontextmanager
async def running_gateway(
    backend: FakeBackend | None = None,
    *,
    scheduler: str | None = None,
    logs: StreamLog | None = None,
    **settings: Any,
) -> AsyncGenerator[RunningGateway]:
    """Serves while the body runs. `scheduler` overrides the backend's address. Enter and leave it in one task."""
    backend = backend or FakeBackend()
    metrics = Metrics("gateway", "gateway-test")
    config = GatewayConfig(scripted=True, port=0, **settings)
    try:
        async with running(backend):
            locator = SchedulerLocator(None, scheduler or backend.address)
            async with open_gateway(
                config,
                tokenizer=ChatTokenizer.scripted(),
                locator=locator,
                cancellations=None,
                logs=logs,
                clock=RealClock(),
                incarnation=Incarnation(9),
                metrics=metrics,
            ) as gateway:
                server = GatewayServer(gateway.app)
                sock = bind("127.0.0.1", 0)
                port: int = sock.getsockname()[1]
                sock.listen()  # a client may connect before the server task has run
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(server.serve(sockets=[sock]))
                    try:
                        yield RunningGateway(
                            gateway=gateway,
                            server=server,
                            backend=backend,
                            metrics=metrics,
                            listener=sock,
                            port=port,
                        )
                    finally:
                        # Not by its own shutdown, which looks around ten times a second.
                        await cancel_and_wait(task)
                        for listener in server.servers if server.started else [sock]:
                            listener.close()
                        for connection in list(server.server_state.connections):
                            connection.shutdown()
    finally:
        metrics.close()


async def until(request: FakeRequest, is_so: Callable[[FakeRequest], object]) -> None:
    """Waits until the backend has seen it."""
    async with asyncio.timeout(WAIT_S):
        while not is_so(request):
            await request.changed.wait()


async def the_request(running: RunningGateway) -> FakeRequest:
    """Waits until it has arrived at the backend."""
    async with asyncio.timeout(WAIT_S):
        await running.backend.arrived.wait()
    return running.backend.only


async def until_idle(running: RunningGateway) -> None:
    """Waits until the gateway has no open request."""
    async with asyncio.timeout(WAIT_S):
        await running.gateway.sessions.wait_idle()
    assert 0 == running.gateway.sessions.num_open
