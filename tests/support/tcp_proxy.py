"""A TCP proxy on loopback that a test can slow down, silence and cut, for all its clients or for one of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Target: TypeAlias = int | Callable[[], Awaitable[int]]
"""The port behind it, or who tells it for each new connection (raises OSError where there is none)."""
EVERYONE = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    client_port: int
    of: str = EVERYONE  # not known yet
    writers: list[asyncio.StreamWriter]
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class TcpProxy:
    """Forwards to one port. What a cut connection carried is lost. `of`: the clients of this name alone."""

    def __init__(self, target: Target, name_of: Callable[[int], str] | None = None) -> None:
        """`name_of` names a client by the port that it dials from."""
        self._target = target
        self._name_of = name_of
        self._connections: set[_Connection] = set()
        self._cut: set[str] = set()
        self._delays_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_refused = 0
        self.refused = asyncio.Event()

    @property
    def delay_s(self) -> float:
        """Holds every reply back."""
        return self._delays_s.get(EVERYONE, 0.0)

    @delay_s.setter
    def delay_s(self, delay_s: float) -> None:
        self.slow(delay_s)

    def slow(self, delay_s: float, of: str = EVERYONE) -> None:
        """Holds every reply back for so long; 0 = no more."""
        self._delays_s[of] = delay_s

    def cut(self, of: str = EVERYONE) -> None:
        """Closes every connection, and each new one at once until `restore`."""
        self._cut.add(of)
        self.num_refused = 0
        self.refused.clear()
        for connection in self._of(of):
            connection.abort()

    def silence(self, of: str = EVERYONE) -> None:
        """Connections that are open now stay open and carry nothing, either way, until `restore`; new ones work."""
        for connection in self._of(of):
            connection.gate.clear()

    def restore(self, of: str = EVERYONE) -> None:
        """As at the start, but for the delay."""
        self._cut.discard(of)
        for connection in self._of(of):
            connection.gate.set()

    def _of(self, of: str) -> list[_Connection]:
        return [each for each in self._connections if of in (EVERYONE, self._name(each))]

    def _name(self, connection: _Connection) -> str:
        """Looked up when it is needed: who dialled early may not have been known then."""
        if not connection.of and self._name_of is not None:
            connection.of = self._name_of(connection.client_port)
        return connection.of

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(client_port=writer.get_extra_info("peername")[1], writers=[writer])
        connection.gate.set()
        self._connections.add(connection)
        try:
            if self._is_cut(connection):
                self.num_refused += 1
                self.refused.set()
                return
            try:
                port = self._target if isinstance(self._target, int) else await self._target()
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return  # nobody is there: that is what our client sees, too
            connection.writers.append(up_writer)
            if self._is_cut(connection):
                return  # in the meantime
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, up_writer, connection.gate, lambda: 0.0))
                group.create_task(_copy(up_reader, writer, connection.gate, lambda: self._delay_of(connection)))
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def close(self) -> None:
        """Ends every connection."""
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _is_cut(self, connection: _Connection) -> bool:
        return bool(self._cut) and not self._cut.isdisjoint({EVERYONE, self._name(connection)})

    def _delay_of(self, connection: _Connection) -> float:
        return max(self.delay_s, self._delays_s.get(self._name(connection), 0.0)) if self._delays_s else 0.0


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event, delay_s: Callable[[], float]
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s())
            await gate.wait()
            writer.write(data)
            await writer.drain()
    writer.transport.abort()  # closing one way ends both: no client here half-closes


@contextlib.asynccontextmanager
async def tcp_proxy(target: Target, name_of: Callable[[int], str] | None = None) -> AsyncGenerator[TcpProxy]:
    """A running proxy in front of a port on loopback; its own port is in `port`."""
    proxy = TcpProxy(target, name_of)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
