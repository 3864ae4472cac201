"""The end of a streaming call, as its client makes it."""

from typing import Any

import grpc.aio


def end_call(call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
    """Always to be called, in `finally`; again does no harm.

    A write that fails makes grpc.aio take the call for ended, and `cancel` then does nothing (1.85). Where messages are
    unread, as after the end of a stream that a frozen process finds when it wakes, the call below it never ends: it
    stays with its task and those messages for as long as the channel lives. So it is cancelled where it lies.
    """
    if not call.cancel():
        below: Any = getattr(call, "_cython_call", None)
        if below is not None:
            below.cancel("the call was over")
