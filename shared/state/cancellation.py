"""Cancel marks: any gateway sets one, the scheduler watches. A wake-up may be lost, a mark is not."""

import asyncio
import random
from collections.abc import AsyncGenerator

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from shared.aio.backoff import Backoff
from shared.codec.request import cancel_reason_from_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.domain.request import CancelReason
from shared.obs.logs import get_logger
from shared.state.client import StateClient, connect_later, drop, read_reply
from shared.state.keys import (
    CANCEL_CHANNEL,
    CANCEL_PATTERN,
    CANCEL_TTL_MS,
    KEY_HASH_FIELD,
    cancel_key,
    request_id_of,
    request_key,
)

PING_INTERVAL_S = 1.0  # how often a silent subscription is asked whether it lives
RECONNECT_MAX_S = 1.0  # RED-01: a mark set while the subscription was away is seen within 3 s

_log = get_logger("state")


class Cancellations:
    """The marks of one deployment. When Redis is away, all but `watch` raise STATE_UNAVAILABLE."""

    def __init__(self, client: StateClient) -> None:
        self._client = client

    async def mark(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> None:
        """Sets the mark, then wakes the watchers. Again does no harm: the first reason stands.

        Raises REQUEST_NOT_FOUND where the record says that the request is another's. Without a record there is no
        telling: the mark counts for a request of this key alone.
        """
        owner = await self._client.call("HGET", request_key(request_id), KEY_HASH_FIELD)
        if owner and owner != key_hash.encode():
            raise ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request")
        await self._client.call("SET", cancel_key(request_id, key_hash), reason.value, "NX", "PX", CANCEL_TTL_MS)
        await self._client.call("PUBLISH", CANCEL_CHANNEL, request_id)

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None:
        """The reason, if the client with this key has left a mark."""
        reply = await self._client.call("GET", cancel_key(request_id, key_hash))
        if reply is None:
            return None
        return cancel_reason_from_wire(reply.decode(errors="replace"), CancelReason.DELETE)

    async def clear(self, request_id: RequestId, key_hash: str) -> None:
        """Once the request has ended; without it the mark would be told again after each reconnect, for ten minutes."""
        await self._client.call("DEL", cancel_key(request_id, key_hash))

    async def watch(self) -> AsyncGenerator[RequestId]:
        """Yields marked requests until it is closed: after each (re)connect every stored mark, then each new one.

        An id may come twice. Outlives any outage of Redis. Close it (`contextlib.aclosing`).
        """
        backoff = Backoff(initial_s=0.05, max_s=RECONNECT_MAX_S, random=random.random)
        while True:
            connection = connect_later(self._client.url, self._client.timeout_s)
            try:
                async with asyncio.timeout(self._client.timeout_s):
                    await connection.connect()
                    await connection.send_command("SUBSCRIBE", CANCEL_CHANNEL)
                    await connection.read_response()
                # Subscribed first, then read: a mark set in between comes twice rather than never.
                async for key in self._client.scan(CANCEL_PATTERN, "string"):
                    yield request_id_of(key)
                backoff.reset()
                while True:
                    request_id = await _next_message(connection)
                    if request_id is not None:
                        yield request_id
            except (OSError, RedisError, TimeoutError, ServingError) as error:
                _log.warning("cancel subscription lost", error=type(error).__name__)
            finally:
                await drop(connection)
            await asyncio.sleep(backoff.next_delay())


async def _next_message(connection: Connection) -> RequestId | None:
    """The next id, or None for an answered ping. Raises TimeoutError when the other end is silent."""
    has_pinged = False
    while True:
        reply = await read_reply(connection, PING_INTERVAL_S)
        if reply is None:
            if has_pinged:
                raise TimeoutError
            await connection.send_command("PING", check_health=False)
            has_pinged = True
            continue
        if reply[0] == b"message":
            return RequestId(reply[2].decode())
        return None  # pong
