import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from shared.domain.errors import ErrorCode
from shared.obs.admin import bind
from shared.rpc import channels, server
from shared.rpc.calls import end_call
from shared.rpc.channels import CHANNEL_OPTIONS, ChannelPool
from shared.rpc.errors import MAX_MESSAGE_BYTES, serving_error
from shared.rpc.server import SERVER_OPTIONS, serve
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.support.tcp_proxy import tcp_proxy

MANY_IDS = 1_000_000  # the scripted generator's window
MAX_ID = 200_000  # takes three bytes on the wire, as most ids do


class EchoScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Tells how many prompt ids it got; its status is a large message."""

    def __init__(self) -> None:
        self.num_serving = 0

    async def Serve(
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Any
    ) -> AsyncGenerator[scheduler_pb2.ServeDown]:
        self.num_serving += 1
        try:
            async for up in request_iterator:
                yield scheduler_pb2.ServeDown(scheduler_epoch=len(up.start.spec.prompt_ids))
        finally:
            self.num_serving -= 1

    async def Cancel(self, request: scheduler_pb2.CancelRequest, context: Any) -> scheduler_pb2.CancelReply:
        await asyncio.Event().wait()
        return scheduler_pb2.CancelReply()

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionUp], context: Any
    ) -> AsyncGenerator[scheduler_pb2.SessionDown]:
        async for _ in request_iterator:
            yield scheduler_pb2.SessionDown()

    async def Status(self, request: scheduler_pb2.StatusRequest, context: Any) -> scheduler_pb2.StatusReply:
        return scheduler_pb2.StatusReply(services=[scheduler_pb2.ServiceStatus(address="x" * (5 * 1024 * 1024))])


def serving(port: int = 0, servicer: EchoScheduler | None = None) -> Any:
    """A server on loopback."""
    served = servicer or EchoScheduler()
    return serve(
        lambda grpc_server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(served, grpc_server),
        host="127.0.0.1",
        port=port,
        token="",
        services=["firsttoken.v1.Scheduler"],
        grace_s=0,
    )


@pytest.fixture
async def pool() -> AsyncGenerator[ChannelPool]:
    """Without a token; closed at the end."""
    pool = ChannelPool("")
    yield pool
    await pool.close()


def test_ping_settings_of_both_ends_agree() -> None:
    """The server allows pings at least twice as often as clients send them, with no call running too (OPS-04)."""
    client, host = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)

    assert 2 * host["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"]
    assert (1, 1) == (client["grpc.keepalive_permit_without_calls"], host["grpc.keepalive_permit_without_calls"])
    assert (0, 0) == (client["grpc.http2.max_pings_without_data"], host["grpc.http2.max_pings_without_data"])
    for options in (client, host):
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
    assert 4000 == channels.PING_INTERVAL_MS + channels.PING_TIMEOUT_MS
    assert 4000 == server.PING_INTERVAL_MS + server.PING_TIMEOUT_MS


def test_message_limits_of_both_ends_agree() -> None:
    """What one end may send the other takes, in both directions (OPS-03)."""
    for options in (dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)):
        assert MAX_MESSAGE_BYTES == options["grpc.max_send_message_length"]
        assert MAX_MESSAGE_BYTES == options["grpc.max_receive_message_length"]


async def test_silent_stream_survives_many_pings(pool: ChannelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings as often as a server allows bring no GOAWAY: two strikes would be enough for one (OPS-04)."""
    patient = {"grpc.keepalive_timeout_ms": 30_000, "grpc.http2.ping_timeout_ms": 30_000}  # a late answer is no GOAWAY
    fast_client = {**dict(CHANNEL_OPTIONS), **patient, "grpc.keepalive_time_ms": 120}
    fast_server = {**dict(SERVER_OPTIONS), **patient, "grpc.http2.min_ping_interval_without_data_ms": 60}
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", tuple(fast_client.items()))
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(fast_server.items()))
    async with serving() as running:
        call = scheduler_pb2_grpc.SchedulerStub(pool.get(running.address)).Serve()
        await call.write(scheduler_pb2.ServeUp())
        await call.read()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):  # a dozen pings; a broken stream would end this read with an error
                await call.read()
        call.cancel()


async def test_silent_link_is_broken_for_both_ends(pool: ChannelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes through and nobody says so: an unanswered ping ends the stream at the client and at the server."""
    for module, name in ((channels, "CHANNEL_OPTIONS"), (server, "SERVER_OPTIONS")):
        fast = {
            **dict(getattr(module, name)),
            "grpc.keepalive_time_ms": 100,
            "grpc.keepalive_timeout_ms": 1500,  # a busy machine answers later than an idle one
            "grpc.http2.ping_timeout_ms": 1500,
        }
        if module is server:
            fast["grpc.http2.min_ping_interval_without_data_ms"] = 50
        monkeypatch.setattr(module, name, tuple(fast.items()))
    servicer = EchoScheduler()
    async with serving(servicer=servicer) as running, tcp_proxy(int(running.address.rpartition(":")[2])) as proxy:
        async with asyncio.timeout(60):
            call = await answered(scheduler_pb2_grpc.SchedulerStub(pool.get(f"127.0.0.1:{proxy.port}")))
            proxy.silence()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            while servicer.num_serving:
                await asyncio.sleep(0.01)

    assert ErrorCode.NO_CAPACITY == serving_error(caught.value).code


async def answered(stub: Any) -> Any:
    """A stream that has brought something each way; a machine that stood still has broken the one before."""
    while True:
        call = stub.Serve()
        try:
            await call.write(scheduler_pb2.ServeUp())
            await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            end_call(call)
        else:
            return call


async def test_large_messages_pass_both_ways(pool: ChannelPool) -> None:
    """A prompt of a million ids up, 5 MiB down: above grpc's default of 4 MiB (OPS-03)."""
    async with serving() as running:
        stub = scheduler_pb2_grpc.SchedulerStub(pool.get(running.address))
        call = stub.Serve()
        spec = common_pb2.RequestSpec(prompt_ids=[MAX_ID] * MANY_IDS)
        await call.write(scheduler_pb2.ServeUp(start=scheduler_pb2.Start(spec=spec)))
        down = await call.read()
        call.cancel()
        status = await stub.Status(scheduler_pb2.StatusRequest())

    assert isinstance(down, scheduler_pb2.ServeDown)
    assert (MANY_IDS, 5 * 1024 * 1024) == (down.scheduler_epoch, len(status.services[0].address))


async def test_above_the_limit_is_body_too_large(pool: ChannelPool) -> None:
    """A clear refusal, not a broken link: the next call goes through (OPS-03)."""
    async with serving() as running:
        stub = scheduler_pb2_grpc.SchedulerStub(pool.get(running.address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(scheduler_pb2.CancelRequest(reason="x" * (MAX_MESSAGE_BYTES + 1)))
        await stub.Status(scheduler_pb2.StatusRequest())

    assert ErrorCode.BODY_TOO_LARGE == serving_error(caught.value).code


async def test_unary_calls_have_a_timeout(pool: ChannelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that forgot its deadline gets one; its own deadline wins."""
    monkeypatch.setattr(channels, "DEFAULT_UNARY_TIMEOUT_S", 0.05)
    async with serving() as running:
        stub = scheduler_pb2_grpc.SchedulerStub(pool.get(running.address))
        for call in (
            stub.Cancel(scheduler_pb2.CancelRequest()),
            stub.Cancel(scheduler_pb2.CancelRequest(), timeout=0.06),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert ErrorCode.DEADLINE_EXCEEDED == serving_error(caught.value).code


async def test_one_channel_an_address(pool: ChannelPool) -> None:
    """The same until it is dropped; dropping ends its calls and twice does no harm."""
    async with serving() as running:
        channel = pool.get(running.address)
        assert channel is pool.get(running.address)
        call = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
        await call.write(scheduler_pb2.ServeUp())
        await call.read()
        await pool.drop(running.address)
        await pool.drop(running.address)

        assert grpc.StatusCode.CANCELLED == await call.code()
        assert channel is not pool.get(running.address)


async def test_no_proxy_stands_between_our_processes(pool: ChannelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that leads out by a proxy changes nothing in here."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving() as running:
        await scheduler_pb2_grpc.SchedulerStub(pool.get(running.address)).Status(scheduler_pb2.StatusRequest())


async def test_nobody_there_then_somebody(pool: ChannelPool) -> None:
    """A refused connection is NO_CAPACITY at once; the same channel finds a server that starts later."""
    with bind("127.0.0.1", 0) as taken:  # and not listening: nobody else gets the port, and the server may join
        port = int(taken.getsockname()[1])
        stub = scheduler_pb2_grpc.SchedulerStub(pool.get(f"127.0.0.1:{port}"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Status(scheduler_pb2.StatusRequest())
        assert ErrorCode.NO_CAPACITY == serving_error(caught.value).code

        async with serving(port):
            await stub.Status(scheduler_pb2.StatusRequest(), wait_for_ready=True, timeout=30)
