"""A TCP proxy on loopback that a test can slow down, silence and cut, for all its clients or for one of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Target: TypeAlias = int | Callable[[], Awaitable[int]]
"""The port behind it, or who tells it for each new connection (raises OSError where there is none)."""
NamesOf: TypeAlias = Callable[[Collection[int]], Mapping[int, str]]
"""Names clients by the ports that they dial from; whoever is not known is left out. Asked in a thread, too."""
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

    def __init__(self, target: Target, names_of: NamesOf | None = None) -> None:
        self._target = target
        self._names_of = names_of
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
        if of != EVERYONE:
            self._identify(self._connections)

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
        if of == EVERYONE:
            return list(self._connections)
        self._identify(self._connections)
        return [each for each in self._connections if each.of == of]

    def _identify(self, connections: Iterable[_Connection]) -> None:
        """Only when it is needed, all by one look: who dialled early may not have been known then."""
        unknown = {each.client_port: each for each in connections if not each.of}
        if unknown and self._names_of is not None:
            for port, name in self._names_of(unknown).items():
                unknown[port].of = name

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
            if any(self._cut) or any(name for name, delay_s in self._delays_s.items() if delay_s > 0):
                # In a thread: everybody else's messages go through this loop.
                await asyncio.to_thread(self._identify, [connection])
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
        return not self._cut.isdisjoint({EVERYONE, connection.of})

    def _delay_of(self, connection: _Connection) -> float:
        return max(self.delay_s, self._delays_s.get(connection.of, 0.0))


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
async def tcp_proxy(target: Target, names_of: NamesOf | None = None) -> AsyncGenerator[TcpProxy]:
    """A running proxy in front of a port on loopback; its own port is in `port`."""
    proxy = TcpProxy(target, names_of)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
