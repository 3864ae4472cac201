"""Reads a request's body up to the limit, and no further."""

from starlette.requests import ClientDisconnect, Request

from shared.domain.errors import ErrorCode, ServingError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises BODY_TOO_LARGE at once where the declared length says so, else when the limit is passed.

    A client that leaves in between raises CANCELLED: nobody reads the answer.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ServingError(ErrorCode.CANCELLED, "the client left") from None
    return bytes(body)


def _too_large(max_bytes: int) -> ServingError:
    return ServingError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
