"""`ServingError` -> HTTP. In a stream the same object is written by `gateway.sse`."""

import json
from http import HTTPStatus

from shared.domain.errors import ErrorCode, ServingError, openai_error

# 499 is for logs only. Someone cancelled the request by its id while its client waited for the whole answer: there is
# none and will be none, and clients do not repeat a 410 by themselves.
_CANCELLED_STATUS = 410


def http_status(error: ServingError) -> int:
    """Every code has one that may leave."""
    return _CANCELLED_STATUS if error.code is ErrorCode.CANCELLED else error.row.http_status


def error_headers(error: ServingError) -> dict[str, str]:
    """Beside the content type. After a 408 the connection closes (RFC 9110 §15.5.9): half a request is still in it."""
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    return {**headers, "connection": "close"} if http_status(error) == HTTPStatus.REQUEST_TIMEOUT else headers


def error_body(error: ServingError) -> bytes:
    """JSON."""
    return json.dumps(openai_error(error)).encode()
