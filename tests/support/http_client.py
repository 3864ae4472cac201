"""A small HTTP/1.1 client over a raw socket: it can stop reading, be cut at any byte, and hides nothing."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.sse_lines import Block, BlockSplitter

LOOPBACK = "127.0.0.1"
READ_TIMEOUT_S = 90.0  # far above the longest silence that a test allows (keep-alive 15 s, worker loss 10 s)
READ_BYTES = 65_536


class ConnectionCut(ConnectionError):
    """The server ended the connection before the answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HttpStream:
    """An answer whose body is read piece by piece. Header names are lower case."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience_s: float = READ_TIMEOUT_S
    ) -> None:
        self._patience_s = patience_s
        self._reader = reader
        self._writer = writer
        self._splitter = BlockSplitter()
        self._blocks: list[Block] = []
        self.status = 0
        self.headers: dict[str, str] = {}

    async def read_head(self) -> None:
        """Reads status and headers."""
        async with asyncio.timeout(self._patience_s):
            head = await self._reader.readuntil(b"\r\n\r\n")
        status_line, *header_lines = head.decode("latin-1").split("\r\n")[:-2]
        self.status = int(status_line.split(" ")[1])
        for line in header_lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, without the chunk framing. Raises ConnectionCut if it is not complete."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while piece := await self._chunk():
                yield piece
            return
        missing = int(self.headers.get("content-length", "0"))
        while missing:
            async with asyncio.timeout(self._patience_s):
                piece = await self._reader.read(min(missing, READ_BYTES))
            if not piece:
                raise ConnectionCut(f"{missing} bytes of the body are missing")
            missing -= len(piece)
            yield piece

    async def _chunk(self) -> bytes:
        try:
            async with asyncio.timeout(self._patience_s):
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                return (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise ConnectionCut("the connection ended inside the body") from error

    async def read_body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def blocks(self) -> AsyncIterator[Block]:
        """Each block of an event stream, comments too. Raises ConnectionCut; raises ValueError on a torn last block."""
        clock = asyncio.get_running_loop()
        while self._blocks:
            yield self._blocks.pop(0)
        async for piece in self.pieces():
            self._blocks.extend(self._splitter.feed(piece, at=clock.time()))
            while self._blocks:
                yield self._blocks.pop(0)
        if self._splitter.rest:
            raise ValueError(f"the stream ended inside an event: {self._splitter.rest!r}")

    async def next_data(self) -> Block:
        """The next block that has data; what follows stays to be read. Raises ConnectionCut at the end of the stream."""
        while True:
            while self._blocks:
                block = self._blocks.pop(0)
                if block.data is not None:
                    return block
            piece = await self._chunk()
            if not piece:
                raise ConnectionCut("the stream has ended")
            self._blocks.extend(self._splitter.feed(piece, at=asyncio.get_running_loop().time()))

    async def send(self, data: bytes) -> None:
        """As it is: what follows on a connection, or half a request."""
        self._writer.write(data)
        async with asyncio.timeout(READ_TIMEOUT_S):
            await self._writer.drain()

    async def is_at_end(self) -> bool:
        """Waits for the next byte, or for the server to end the connection."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await self._reader.read(1) == b""

    async def close(self) -> None:
        """Ends the connection as a client does that has lost interest. Leaving the context does the same."""
        self._writer.close()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._writer.wait_closed()
        except OSError:
            pass  # a connection that either side has reset is closed

    def cut(self) -> None:
        """Ends the connection at once with a reset, as a dying client does."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


@asynccontextmanager
async def open_request(
    port: int,
    method: str,
    path: str,
    *,
    body: Any = None,
    raw_body: bytes | None = None,
    headers: Mapping[str, str | None] | None = None,
    receive_buffer: int | None = None,
    patience_s: float = READ_TIMEOUT_S,
) -> AsyncGenerator[HttpStream]:
    """Sends one request and reads the head of its answer. Leaving the context closes the connection.

    A header whose value is None is not sent. `receive_buffer` bounds what this client takes in without reading: for the tests with a slow reader.
    `patience_s` is the longest silence.
    """
    content = raw_body if raw_body is not None else b"" if body is None else json.dumps(body).encode()
    raw = socket.socket()
    try:
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        async with asyncio.timeout(READ_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(raw, (LOOPBACK, port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=receive_buffer or READ_BYTES)
    except BaseException:
        raw.close()
        raise
    stream = HttpStream(reader, writer, patience_s)
    try:
        sent: dict[str, str | None] = {"Host": f"{LOOPBACK}:{port}", "Connection": "close"}
        sent["Content-Length"] = str(len(content))
        if content:
            sent["Content-Type"] = "application/json"
        sent.update(headers or {})
        fields = [f"{name}: {value}" for name, value in sent.items() if value is not None]
        writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode() + content)
        await stream.read_head()
        yield stream
    finally:
        await stream.close()


async def exchange(
    port: int,
    method: str,
    path: str,
    *,
    body: Any = None,
    raw_body: bytes | None = None,
    headers: Mapping[str, str | None] | None = None,
) -> HttpAnswer:
    """One request and its whole answer."""
    async with open_request(port, method, path, body=body, raw_body=raw_body, headers=headers) as stream:
        return HttpAnswer(status=stream.status, headers=stream.headers, body=await stream.read_body())
