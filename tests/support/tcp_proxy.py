"""A TCP proxy on loopback that a test can slow down, silence and cut."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable


class TcpProxy:
    """Forwards to one port. `delay_s` holds every reply back; what a cut connection carried is lost."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._gates: set[asyncio.Event] = set()
        self._is_cut = False
        self.delay_s = 0.0
        self.port = 0
        self.num_refused = 0
        self.refused = asyncio.Event()

    def cut(self) -> None:
        """Closes every connection, and each new one at once until `restore`."""
        self._is_cut = True
        self.num_refused = 0
        self.refused.clear()
        for writer in self._writers:
            writer.transport.abort()

    def silence(self) -> None:
        """Connections that are open now stay open and carry nothing, either way, until `restore`; new ones work."""
        for gate in self._gates:
            gate.clear()

    def restore(self) -> None:
        """As at the start, but for the delay."""
        self._is_cut = False
        for gate in self._gates:
            gate.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        self._writers.add(writer)
        try:
            if self._is_cut:
                self.num_refused += 1
                self.refused.set()
                return
            try:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            except OSError:
                return  # nobody is there: that is what our client sees, too
            self._writers.add(up_writer)
            gate = asyncio.Event()
            gate.set()
            self._gates.add(gate)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, up_writer, gate, lambda: 0.0))
                    group.create_task(_copy(up_reader, writer, gate, lambda: self.delay_s))
            finally:
                self._gates.discard(gate)
                self._writers.discard(up_writer)
                up_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


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
async def tcp_proxy(target_port: int) -> AsyncGenerator[TcpProxy]:
    """A running proxy in front of a port on loopback; its own port is in `port`."""
    proxy = TcpProxy(target_port)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.restore()
        proxy.cut()
        server.close()
