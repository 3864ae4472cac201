"""Reads requests' bodies within their bounds: the size of each, the memory of all together, the time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request

from shared.aio.scope import stop_when
from shared.domain.errors import ErrorCode, ServingError

# All bodies that are being read or tokenised take at most as much as so many of the largest, 256 MiB with its default.
# By bytes, not by number: a client that sends one byte and waits takes nothing that others need.
MAX_LARGEST_BODIES = 64


class BodyReader:
    """Knows what is held. `draining` is set once the gateway shuts down."""

    def __init__(self, *, max_bytes: int, timeout_s: float, draining: asyncio.Event) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = MAX_LARGEST_BODIES * max_bytes
        self._timeout_s = timeout_s
        self._draining = draining
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @contextlib.asynccontextmanager
    async def reading(self, request: Request) -> AsyncGenerator[bytearray]:
        """The whole body; it counts as held until the block is left.

        Raises BODY_TOO_LARGE at once where the declared length says so, else when the limit is passed; OVERLOADED where
        all bodies together take too much; SLOW_CLIENT when its end did not come in time; DRAINING as soon as that
        begins; CANCELLED when the client leaves: nobody reads the answer.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            await self._fill(body, request)
            yield body
        finally:
            self._held_bytes -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), stop_when(self._draining) as drain:
                async for piece in request.stream():
                    body += piece
                    self._held_bytes += len(piece)
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    if self._held_bytes > self._max_held_bytes:
                        raise ServingError(ErrorCode.OVERLOADED, "this gateway is reading too many large bodies")
        except ClientDisconnect:
            raise ServingError(ErrorCode.CANCELLED, "the client left") from None
        except TimeoutError:
            raise ServingError(ErrorCode.SLOW_CLIENT, f"the body did not arrive within {self._timeout_s:g} s") from None
        if drain.was_stopped:
            raise ServingError(ErrorCode.DRAINING, "this gateway is shutting down")

    def _too_large(self) -> ServingError:
        return ServingError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than {self._max_bytes} bytes")
