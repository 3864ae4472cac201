"""Failures of calls: `ServingError` -> status and metadata on the server, and back on the client."""

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from shared.codec.errors import detail_to_error, error_to_detail
from shared.domain.errors import ErrorCode, ServingError
from shared.wire import common_pb2

ERROR_METADATA_KEY = "firsttoken-error-bin"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a prompt of 1,000,000 ids takes at most 3 MB; KV frames have 1 MiB

_FROM_STATUS = {
    grpc.StatusCode.UNAVAILABLE: ServingError(ErrorCode.NO_CAPACITY, "a part of the service cannot be reached"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ServingError(ErrorCode.DEADLINE_EXCEEDED, "the service took too long"),
    grpc.StatusCode.CANCELLED: ServingError(ErrorCode.CANCELLED, "cancelled"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServingError(ErrorCode.OVERLOADED, "the service is overloaded"),
    grpc.StatusCode.UNAUTHENTICATED: ServingError(ErrorCode.INTERNAL, "the cluster token was refused"),
}


def status_of(error: ServingError) -> grpc.StatusCode:
    """By the error table."""
    return grpc.StatusCode[error.row.grpc_status]


def trailing_metadata_of(error: ServingError) -> tuple[tuple[str, bytes], ...]:
    """The whole error, for `serving_error` at the other end."""
    return ((ERROR_METADATA_KEY, error_to_detail(error).SerializeToString()),)


def serving_error(error: grpc.aio.AioRpcError) -> ServingError:
    """What a failed call means. Total: without our detail the status decides, and what says nothing is INTERNAL.

    A call that got no answer (nobody there, connection lost) is NO_CAPACITY: it may be tried again.
    """
    metadata = error.trailing_metadata()
    raw = metadata.get(ERROR_METADATA_KEY) if metadata is not None else None
    if isinstance(raw, bytes):
        try:
            return detail_to_error(common_pb2.ErrorDetail.FromString(raw))
        except DecodeError:
            return ServingError(ErrorCode.INTERNAL, "the server failed")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return ServingError(
            ErrorCode.BODY_TOO_LARGE, f"the request takes more than {MAX_MESSAGE_BYTES} bytes on an internal link"
        )
    return _FROM_STATUS.get(error.code(), ServingError(ErrorCode.INTERNAL, "the server failed"))
