import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from shared.domain.errors import ErrorCode, ServingError
from shared.rpc.channels import ChannelPool
from shared.rpc.errors import serving_error
from shared.rpc.interceptors import TOKEN_METADATA_KEY
from shared.rpc.server import serve
from shared.wire import kv_pb2, kv_pb2_grpc

ALL_ERRORS = [ServingError(code, f"about {code}", param="field", retry_after_s=3) for code in ErrorCode]


class FailingTransfer(kv_pb2_grpc.KvTransferServicer):
    """`FirstToken` and `Push` raise what the test asks for; `Push` first sends as many acknowledgements as frames came."""

    def __init__(self) -> None:
        self.fail: Callable[[], Any] | None = None
        self.context: Any = None  # of the last Push
        self.has_started = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def Hello(self, request: kv_pb2.TransferHello, context: Any) -> kv_pb2.TransferWelcome:
        return kv_pb2.TransferWelcome()

    async def FirstToken(self, request: kv_pb2.FirstTokenRequest, context: Any) -> kv_pb2.FirstTokenReply:
        if self.fail is not None:
            await self.fail()
        return kv_pb2.FirstTokenReply()

    async def Push(
        self, request_iterator: AsyncIterator[kv_pb2.PushUp], context: Any
    ) -> AsyncGenerator[kv_pb2.PushDown]:
        self.context = context
        self.has_started.set()
        try:
            async for up in request_iterator:
                yield kv_pb2.PushDown(ack=kv_pb2.FrameAck(upto=up.frame.number))
            if self.fail is not None:
                await self.fail()
        finally:
            await asyncio.sleep(0)  # cleanup that waits completes
            self.has_ended.set()


class Link:
    """A servicer behind a real server, and a stub on a real channel."""

    def __init__(self, servicer: FailingTransfer, address: str, pool: ChannelPool) -> None:
        self.servicer = servicer
        self.address = address
        self.stub = kv_pb2_grpc.KvTransferStub(pool.get(address))

    async def first_token(self) -> ServingError | None:
        """The error of a unary call, None if it went well."""
        try:
            await self.stub.FirstToken(kv_pb2.FirstTokenRequest())
        except grpc.aio.AioRpcError as error:
            return serving_error(error)
        return None

    async def push(self) -> ServingError | None:
        """The error of a stream that got one message through, None if it went well."""
        call = self.stub.Push()
        try:
            await call.write(kv_pb2.PushUp(frame=kv_pb2.KvFrame(number=7)))
            assert kv_pb2.PushDown(ack=kv_pb2.FrameAck(upto=7)) == await call.read()
            await call.done_writing()
            assert grpc.aio.EOF == await call.read()
        except grpc.aio.AioRpcError as error:
            return serving_error(error)
        finally:
            call.cancel()
        return None


@pytest.fixture
async def link() -> AsyncGenerator[Link]:
    """With the right token at both ends."""
    servicer = FailingTransfer()
    async with serve(
        lambda server: kv_pb2_grpc.add_KvTransferServicer_to_server(servicer, server),
        host="127.0.0.1",
        port=0,
        token="right",
        services=["firsttoken.v1.KvTransfer"],
        grace_s=0,
    ) as running:
        pool = ChannelPool("right")
        yield Link(servicer, running.address, pool)
        await pool.close()


def raising(error: BaseException) -> Callable[[], Any]:
    """A handler's failure."""

    async def fail() -> None:
        raise error

    return fail


async def test_calls_that_go_well(link: Link) -> None:
    """Unary and stream pass unchanged."""
    assert (None, None) == (await link.first_token(), await link.push())


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: error.code)
async def test_every_error_survives_the_way(link: Link, error: ServingError) -> None:
    """Code, message, field and retry-after are the same on both sides, in a unary call and in a stream."""
    link.servicer.fail = raising(error)

    assert (error, error) == (await link.first_token(), await link.push())


async def test_error_out_of_a_task_group(link: Link) -> None:
    """A handler may do its work in a group of tasks: the group's one error counts."""
    error = ServingError(ErrorCode.OVERLOADED, "full")
    link.servicer.fail = raising(BaseExceptionGroup("tasks", [ExceptionGroup("inner", [error])]))

    assert error == await link.push()


@pytest.mark.parametrize("mixed", [True, False])
async def test_bug_is_logged_and_hidden(link: Link, mixed: bool) -> None:
    """The client reads "internal error" and nothing of the exception; the log has it."""
    bug: Exception = ValueError("private text")
    if mixed:
        bug = ExceptionGroup("tasks", [bug, ServingError(ErrorCode.OVERLOADED, "full")])
    link.servicer.fail = raising(bug)
    expected = ServingError(ErrorCode.INTERNAL, "internal error")

    with capture_logs() as logs:
        assert (expected, expected) == (await link.first_token(), await link.push())
    assert ["/firsttoken.v1.KvTransfer/FirstToken", "/firsttoken.v1.KvTransfer/Push"] == [
        line["method"] for line in logs
    ]


async def test_stray_cancellation_ends_the_call(link: Link) -> None:
    """A handler that waited for something cancelled fails at once: its client is not left waiting."""

    async def wait_for_cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    link.servicer.fail = wait_for_cancelled
    expected = ServingError(ErrorCode.INTERNAL, "internal error")
    with capture_logs() as logs:
        assert (expected, expected) == (await link.first_token(), await link.push())
    assert 2 == len(logs)


@pytest.mark.parametrize("is_answered", [False, True])
async def test_cancelled_call_runs_the_cleanup_and_logs_nothing(link: Link, is_answered: bool) -> None:
    """The client's cancel reaches the handler once, and what its `finally` awaits completes."""
    with capture_logs() as logs:
        call = link.stub.Push()
        await call.write(kv_pb2.PushUp(frame=kv_pb2.KvFrame(number=7)))
        async with asyncio.timeout(30):
            await link.servicer.has_started.wait()
            if is_answered:
                assert kv_pb2.PushDown(ack=kv_pb2.FrameAck(upto=7)) == await call.read()
            call.cancel()
            await link.servicer.has_ended.wait()

    assert [] == logs


async def test_a_refusal_of_a_call_that_is_over_is_no_error(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    """Its client went while the handler was about to refuse it: nobody is left to be told, and nothing is wrong."""
    servicer = link.servicer
    servicer.fail = lambda: servicer.context.abort(grpc.StatusCode.UNAVAILABLE, "not the active scheduler")
    with capture_logs() as logs:
        call = link.stub.Push()
        await servicer.has_started.wait()
        call.cancel()
        async with asyncio.timeout(30):
            await servicer.has_ended.wait()
        servicer.fail = None
        assert await link.first_token() is None  # a call later whatever there was to log is logged

    assert [] == [entry for entry in logs if entry["log_level"] == "error"]
    # What came too late for the closed loop of an earlier test is told in the loop of whoever runs now.
    told = [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()]
    assert [] == [record for record in told if record.levelname == "ERROR"]


@pytest.mark.parametrize("token", ["", "wrong", "right "])
async def test_wrong_token_is_refused(link: Link, token: str) -> None:
    """Unary and stream alike, before the handler sees anything; no client may read it as its own wrong key."""
    pool = ChannelPool(token)
    stranger = Link(link.servicer, link.address, pool)
    expected = ServingError(ErrorCode.INTERNAL, "the cluster token was refused")

    assert expected == await stranger.first_token()
    pushed = await stranger.push()
    # The words may be lost: a server that answers before it has read may reset the stream under the client's write.
    assert pushed is not None
    assert ErrorCode.INTERNAL == pushed.code
    assert not link.servicer.has_started.is_set()
    await pool.close()


async def test_refusal_has_its_own_status(link: Link) -> None:
    """Without any token the status is UNAUTHENTICATED."""
    async with grpc.aio.insecure_channel(link.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_pb2_grpc.KvTransferStub(channel).FirstToken(kv_pb2.FirstTokenRequest())

    assert grpc.StatusCode.UNAUTHENTICATED == caught.value.code()


async def test_metadata_of_the_caller_is_kept(link: Link) -> None:
    """The token is added to what a caller sends, not put in its place."""
    async with grpc.aio.insecure_channel(link.address) as channel:
        metadata = ((TOKEN_METADATA_KEY, "right"), ("x-other", "1"))
        reply = await kv_pb2_grpc.KvTransferStub(channel).FirstToken(kv_pb2.FirstTokenRequest(), metadata=metadata)
    own = await link.stub.FirstToken(kv_pb2.FirstTokenRequest(), metadata=(("x-other", "1"),))

    assert (kv_pb2.FirstTokenReply(), kv_pb2.FirstTokenReply()) == (reply, own)
