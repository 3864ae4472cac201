"""CAN-05: calls whose clients go away, many more than a server has room for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from tests.support.polling import eventually

ROOM = 8  # calls at once
NUM_CALLS = 200
_WAIT_S = 60.0  # a hang alone takes longer


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that begin from now on have room for so few calls."""
    monkeypatch.setattr("shared.rpc.server.MAX_CALLS", ROOM)


async def say_first(call: Any, message: object) -> None:
    """The first word of a call. Raises what its server said, AioRpcError, where the call was refused before it."""
    try:
        await call.write(message)
    except (aio.UsageError, asyncio.InvalidStateError):
        await call.read()
        raise


async def cancel_many(method: str, use: Callable[[], Awaitable[None]]) -> None:
    """`use` begins a call, reads some of it and cancels it. Each call is served, and in the end no handler of the method
    and no task is left that was not there before. Raises AssertionError.
    """
    num_before = len(asyncio.all_tasks())
    for number in range(NUM_CALLS + 1):
        try:
            async with asyncio.timeout(_WAIT_S):
                await _served(use)
        except TimeoutError:
            raise AssertionError(f"call {number} finds no room: {_handlers(method)} handlers run") from None

    async def left() -> tuple[int, int]:
        return _handlers(method), len(asyncio.all_tasks()) - num_before

    await eventually(left, lambda found: found[0] == 0 and found[1] <= 0, within_s=_WAIT_S, what="no handler, no task")


async def _served(use: Callable[[], Awaitable[None]]) -> None:
    """A handler ends a moment after its call: where there is no room, it is asked again."""
    while True:
        try:
            await use()
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(0.01)
        else:
            return


def _handlers(method: str) -> int:
    return sum(task.get_name() == f"handler {method}" for task in asyncio.all_tasks())
