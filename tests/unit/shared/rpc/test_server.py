import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc import server
from shared.rpc.server import RunningServer, serve
from shared.wire import decode_pb2_grpc

SERVICE = "firsttoken.v1.Decode"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class WaitingDecode(decode_pb2_grpc.DecodeServicer):
    """A stream that never ends by itself."""

    def __init__(self) -> None:
        self.has_started = asyncio.Event()
        self.was_cancelled = False

    async def Tokens(self, request_iterator: Any, context: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.has_started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def serving(servicer: WaitingDecode, **options: Any) -> Any:
    """On loopback, behind a token."""
    return serve(
        lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server),
        host="127.0.0.1",
        token="secret",
        services=[SERVICE],
        **{"port": 0, **options},
    )


async def health(running: RunningServer, service: str) -> int:
    """What a probe without a token reads."""
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stub file lacks the methods
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return reply.status


async def test_health_follows_set_serving() -> None:
    """Not serving until told so, for the server as a whole and for its service; no token is needed."""
    async with serving(WaitingDecode()) as running:
        before = [await health(running, name) for name in ("", SERVICE)]
        await running.set_serving(True)
        after = [await health(running, name) for name in ("", SERVICE)]

    assert ([NOT_SERVING] * 2, [SERVING] * 2) == (before, after)


async def test_taken_port_is_an_error() -> None:
    """Two processes never share a port."""
    async with serving(WaitingDecode()) as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(RuntimeError):
            async with serving(WaitingDecode(), port=port):
                pass


async def test_end_cuts_endless_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the grace a running stream is cancelled: the end does not wait for it."""
    monkeypatch.setattr(server, "CANCELLED_HANDLERS_S", 30.0)  # on a busy machine a cancel takes its time
    servicer = WaitingDecode()
    async with asyncio.timeout(30), serving(servicer, grace_s=0.05) as running:
        channel = grpc.aio.insecure_channel(running.address)
        call = decode_pb2_grpc.DecodeStub(channel).Tokens(metadata=(("firsttoken-token", "secret"),))
        await servicer.has_started.wait()
        assert 1 == running.num_calls

    assert 0 == running.num_calls
    assert servicer.was_cancelled
    assert grpc.StatusCode.OK != await call.code()
    await channel.close()
