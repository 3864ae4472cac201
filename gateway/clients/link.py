"""What a failed internal call means: the peer said why, or the line broke."""

import asyncio
import contextlib
from collections.abc import Generator

import grpc
from grpc.aio import AioRpcError, Metadata
from grpc.aio import Call as GrpcCall

from shared.domain.errors import ErrorCode, ServingError
from shared.rpc.errors import ERROR_METADATA_KEY, serving_error

# No answer of the peer's own: nobody there, connection lost, process gone in mid-call.
_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    }
)

TOKEN_REFUSED = ServingError(
    ErrorCode.NO_CAPACITY, "the active scheduler belongs to another system: it has another cluster token"
)
"""Two systems on one Redis. Asking the same scheduler again would not help; the client may, when the other is gone."""

CALL_ERRORS = (AioRpcError, asyncio.InvalidStateError)
"""What grpc raises where a call is over; the second is its word for a write that came after the end."""


class LinkBroken(Exception):
    """No answer came; the peer may or may not have acted. Trying again is right.

    `told` is what a client hears when trying again did not help.
    """

    def __init__(self, why: str, told: ServingError | None = None) -> None:
        super().__init__(why)
        self.told = told or ServingError(ErrorCode.NO_CAPACITY, "no scheduler is active")


@contextlib.contextmanager
def broken_where_cancelled() -> Generator[None]:
    """A channel that is closed, or a write that ran out of time, cancels calls, and grpc tells whoever waits for one in
    the words of his own cancel. Where nobody has cancelled him the line broke: LinkBroken.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise LinkBroken("cancelled") from None


def failure_of(error: AioRpcError) -> ServingError | LinkBroken:
    """The peer's own words, or LinkBroken."""
    metadata = error.trailing_metadata()
    has_detail = metadata is not None and metadata.get(ERROR_METADATA_KEY) is not None
    if not has_detail and error.code() in _BROKEN:
        return LinkBroken(error.code().name)
    if not has_detail and error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return TOKEN_REFUSED
    return serving_error(error)


async def failure_of_call(call: GrpcCall) -> ServingError | LinkBroken:
    """The same for a call that is known to be over, whatever the exception at hand says."""
    code, details = await call.code(), await call.details()
    return failure_of(AioRpcError(code, Metadata(), await call.trailing_metadata(), details))
