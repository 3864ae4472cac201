"""A stream whose server has ended it, with messages that nobody reads."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from shared.rpc.calls import end_call
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.wire import decode_pb2, decode_pb2_grpc


class Hasty(decode_pb2_grpc.DecodeServicer):
    """Says three things and goes."""

    async def Tokens(self, request_iterator: Any, context: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for _ in range(3):
            await context.write(decode_pb2.TokensDown())


async def write_on(call: Any) -> None:
    """Until it fails."""
    while True:
        await call.write(decode_pb2.TokensUp())


def names_of_tasks() -> list[str]:
    """Of those that run."""
    return sorted(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


async def test_a_call_whose_write_has_failed_leaves_nothing() -> None:
    """`cancel` alone would leave a task for good."""
    pool = ChannelPool("t")

    def add(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(Hasty(), server)

    async with serve(add, host="127.0.0.1", port=0, token="t", services=()) as server:
        stub = decode_pb2_grpc.DecodeStub(pool.get(server.address))
        before = names_of_tasks()
        for _ in range(5):
            call = stub.Tokens()
            await call.read()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await write_on(call)
            end_call(call)
            end_call(call)
        async with asyncio.timeout(30):
            while names_of_tasks() != before:
                await asyncio.sleep(0.01)
        await pool.close()
