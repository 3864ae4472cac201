"""`ServingError` <-> `ErrorDetail`."""

from shared.domain.errors import ErrorCode, ServingError
from shared.wire import common_pb2


def error_to_detail(error: ServingError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        code=error.code.value,
        message=error.message,
        param=error.param or "",
        retry_after_s=error.retry_after_s or 0,
    )


def detail_to_error(detail: common_pb2.ErrorDetail) -> ServingError:
    """An unknown code (a newer peer) becomes INTERNAL."""
    try:
        code = ErrorCode(detail.code)
    except ValueError:
        return ServingError(ErrorCode.INTERNAL, "the server failed")
    return ServingError(code, detail.message, param=detail.param or None, retry_after_s=detail.retry_after_s or None)
