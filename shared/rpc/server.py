"""A gRPC server with the limits, pings, health and interceptors that all our servers share."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer  # pyright: ignore[reportMissingTypeStubs]

from shared.obs.logs import get_logger
from shared.rpc.errors import MAX_MESSAGE_BYTES
from shared.rpc.interceptors import ErrorInterceptor, TokenInterceptor

# Pings of our clients come each 2 s (channels.py); half of that is allowed, so that jitter is never "too many pings".
MIN_PING_INTERVAL_MS = 1000
# A client that is silent for 2 + 2 s is gone, even if its machine never said so.
PING_INTERVAL_MS = 2000
PING_TIMEOUT_MS = 2000
# Far above what the scheduler admits (1024 requests, one stream each); only a runaway client meets it.
MAX_CALLS = 8192
MAX_GRACE_S = 5.0
CANCELLED_HANDLERS_S = 1.0  # what a cancelled handler's `finally` may take; ours take milliseconds

_log = get_logger("rpc")

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),  # a second process on the port must fail, not share it
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The name without "recv": with the other, which gRPC ignores, idle channels ended in "too many pings" after 8 s.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # see channels.py
    ("grpc.http2.max_pings_without_data", 0),
)


class RunningServer:
    """A started server. `address` is the host:port that others dial."""

    def __init__(
        self, address: str, health: HealthServicer, services: Sequence[str], handlers: ErrorInterceptor
    ) -> None:
        self.address = address
        self._handlers = handlers
        self._health = health
        self._services = ("", *services)

    @property
    def num_calls(self) -> int:
        """Calls whose handlers have not ended; one whose client has gone counts until then."""
        return self._handlers.num_running

    async def set_serving(self, serving: bool) -> None:
        """What gRPC health answers, for the server and each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)


@contextlib.asynccontextmanager
async def serve(
    add_servicers: Callable[[grpc.aio.Server], None],
    *,
    host: str,
    port: int,
    token: str,
    services: Sequence[str],
    grace_s: float = 0.5,
) -> AsyncGenerator[RunningServer]:
    """Serves while the body runs; port 0 = the kernel chooses. Health says NOT_SERVING until `set_serving(True)`.

    Drain before leaving the body: at its end new calls are refused and running ones get `grace_s` (up to 5 s) for
    their last messages, then they are cancelled. Raises RuntimeError if the port is taken.
    """
    errors = ErrorInterceptor()
    server = grpc.aio.server(
        interceptors=(errors, TokenInterceptor(token)),
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)  # pyright: ignore[reportUnknownMemberType]
    add_servicers(server)
    literal = f"[{host}]" if ":" in host else host
    bound_port = server.add_insecure_port(f"{literal}:{port}")
    running = RunningServer(f"{literal}:{bound_port}", health, services, errors)
    await running.set_serving(False)
    await server.start()
    try:
        yield running
    finally:
        await running.set_serving(False)
        await server.stop(min(grace_s, MAX_GRACE_S))
        try:
            async with asyncio.timeout(CANCELLED_HANDLERS_S):
                await errors.wait_until_idle()
        except TimeoutError:
            _log.warning("handlers still run after the server's end")
