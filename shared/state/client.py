"""Commands to Redis (or Valkey): bounded in time, safe to cancel, scripts loaded on demand.

A connection goes back to the pool only after its whole reply has been read; whatever else happens (timeout,
cancellation, error) it is closed, so that nobody reads another's reply (redis/redis-py#2624). That is why the
connections of redis-py are used here and its pool is not.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib import resources
from typing import Any, cast

from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.obs.logs import get_logger

Reply = Any  # what a command answers: bytes, int, list or None; each caller knows its command
TIMEOUT_S = 0.5  # decisions §3: no answer in 500 ms means that Redis is away
MAX_CONNECTIONS = 8  # one process has a few writers; more would only queue inside Redis' one thread
SCAN_COUNT = 500

# A store that is full, read-only, loading, failing over, or closed to us by its own rules does not answer questions of
# ours: as good as away.
_AWAY = (
    OSError,
    TimeoutError,
    RedisConnectionError,
    RedisTimeoutError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
# So is one that refuses writes for want of replicas or after a failed snapshot, or is held up by somebody's script:
# redis-py has no class for these, the reply begins with the word. And one in which something of others stands under a
# key of ours (WRONGTYPE): answers that run must not end for that.
_AWAY_WORDS = frozenset({"NOREPLICAS", "MISCONF", "BUSY", "WRONGTYPE"})

_log = get_logger("state")


class EvictionPolicyError(Exception):
    """The store may throw away records: the service must not start on it."""


class Script:
    """A Lua file of shared/state/lua and the keys of each call: functions make those of one request."""

    def __init__(self, name: str, *keys: str | Callable[[RequestId], str]) -> None:
        self.name = name
        self._keys = keys
        self.text = (resources.files("shared.state") / "lua" / f"{name}.lua").read_text()
        self.sha1 = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def keys_of(self, request_id: RequestId | None) -> list[str]:
        """Of one call. Raises ValueError where it is about a request, and none is named."""
        keys: list[str] = []
        for key in self._keys:
            if isinstance(key, str):
                keys.append(key)
            elif request_id is None:
                raise ValueError(f"{self.name} is about one request")
            else:
                keys.append(key(request_id))
        return keys


class StateClient:
    """A small pool of connections. Not for use from several loops."""

    def __init__(self, url: str, *, max_connections: int = MAX_CONNECTIONS, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self.timeout_s = timeout_s
        """Of each call."""
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(max_connections)
        self._is_closed = False
        self._is_away = False  # as the last call found it, for the log

    async def call(self, *command: str | int | bytes) -> Reply:
        """One command. Raises ServingError STATE_UNAVAILABLE when Redis is away; a refused command is a bug."""
        try:
            async with asyncio.timeout(self.timeout_s), self._slots:
                reply = await self._call(command)
        except (*_AWAY, ResponseError) as error:
            if not _is_away(error):
                raise
            if not self._is_away:
                _log.warning("redis is away", error=type(error).__name__, reason=str(error))
            self._is_away = True
            raise state_unavailable() from error
        if self._is_away:
            _log.info("redis is back")
        self._is_away = False
        return reply

    async def run(
        self, script: Script, args: Sequence[str | int | bytes], *, request_id: RequestId | None = None
    ) -> Reply:
        """One script, atomically, with its own keys and no others."""
        keys = script.keys_of(request_id)
        try:
            return await self.call("EVALSHA", script.sha1, len(keys), *keys, *args)
        except NoScriptError:  # a Redis that was restarted, or never saw it
            return await self.call("EVAL", script.text, len(keys), *keys, *args)

    async def scan(self, pattern: str, kind: str) -> AsyncGenerator[str]:
        """Every key of this type ("hash", "string") that was there all the time, perhaps more than once."""
        cursor = "0"
        while True:
            reply = await self.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT, "TYPE", kind)
            cursor = reply[0].decode()
            for key in reply[1]:
                yield key.decode()
            if cursor == "0":
                return

    async def ping(self) -> bool:
        """True if it answers in time."""
        try:
            await self.call("PING")
        except ServingError:
            return False
        return True

    async def check_eviction_policy(self) -> None:
        """Raises EvictionPolicyError unless the policy is noeviction, STATE_UNAVAILABLE when Redis is away."""
        info = (await self.call("INFO", "memory")).decode()
        policies = [line.partition(":")[2] for line in info.splitlines() if line.startswith("maxmemory_policy:")]
        if policies != ["noeviction"]:
            raise EvictionPolicyError(f"Redis must have maxmemory-policy noeviction, it has {policies}")

    async def close(self) -> None:
        """Closes the idle connections; one in use is closed when its command ends."""
        self._is_closed = True
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        """Also where a server refuses to serve: after a failover the old primary lives on as a replica, and whoever
        stays connected to it is told READONLY for ever.
        """
        while self._idle:
            await drop(self._idle.pop())

    async def _take(self) -> Connection:
        """An idle connection that is still open and clean, else a new one: a restarted Redis costs no failed call."""
        while self._idle:
            connection = self._idle.pop()
            try:
                if not await connection.can_read():  # nothing to read, and no end of file
                    return connection
            except RedisConnectionError:
                pass
            await drop(connection)
        return connect_later(self.url, self.timeout_s)

    async def _call(self, command: Sequence[str | int | bytes]) -> Reply:
        connection = await self._take()
        is_clean = is_sent = False
        try:
            await connection.connect()
            await connection.send_command(*command)
            is_sent = True
            reply = await read_reply(connection)
            is_clean = True
            return reply
        except ResponseError as error:  # a reply like any other, read to its end
            is_clean = is_sent and not _is_away(error)
            if not is_clean:
                await self._drop_idle()
            raise
        finally:
            if is_clean and not self._is_closed:
                self._idle.append(connection)
            else:
                await drop(connection)


def _is_away(error: BaseException) -> bool:
    return isinstance(error, _AWAY) or str(error).partition(" ")[0] in _AWAY_WORDS


def state_unavailable() -> ServingError:
    """What a caller is told when Redis is away."""
    return ServingError(ErrorCode.STATE_UNAVAILABLE, "the state store cannot be reached")


def connect_later(url: str, timeout_s: float) -> Connection:
    """A connection that dials at its `connect()`, for so long. Its reads have no timeout: the caller sets one."""
    options = cast(dict[str, Any], dict(parse_url(url)))
    connection_class = options.pop("connection_class", Connection)
    options.update(socket_timeout=None, socket_connect_timeout=timeout_s, protocol=2, driver_info=None)
    return connection_class(**options)


async def read_reply(connection: Connection, timeout_s: float | None = None) -> Reply:
    """The next whole reply, or None after the timeout: what came of it is kept, and a next read goes on with it."""
    # Typed in part only: a reply is whatever the command answers.
    return await connection.read_response(  # pyright: ignore[reportUnknownVariableType]
        timeout=timeout_s, disconnect_on_error=False
    )


async def drop(connection: Connection) -> None:
    """Closes a connection without waiting for the other end. Never raises: there is nothing left to save."""
    try:
        await connection.disconnect(nowait=True)
    except (OSError, RedisError) as error:
        _log.debug("connection closed badly", error=type(error).__name__)
