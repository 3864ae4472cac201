"""The server's own part: what a connection tells, and how much it holds."""

import asyncio
import socket
from typing import Any

from gateway.answer import CONNECTION_EXTENSION
from gateway.server import HIGH_WATER_BYTES, KERNEL_SEND_BUFFER_BYTES, ClientConnection, GatewayServer
from shared.obs.admin import bind


async def test_send_waits_for_a_client_that_does_not_read() -> None:
    """The transport holds little more than its mark, the kernel little more than its buffer; the handle tells how much."""
    seen: dict[str, Any] = {}
    piece = b"x" * 1024
    is_stuck = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection: ClientConnection = scope["extensions"][CONNECTION_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen["sent"] = 0
        try:
            while True:
                async with asyncio.timeout(0.5):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                seen["sent"] += len(piece)
        except TimeoutError:
            seen["pending"] = connection.pending_bytes()
            connection.let_write()
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
            connection.abort_after(0.0)
            is_stuck.set()

    server = GatewayServer(app)
    listener = bind("127.0.0.1", 0)
    listener.listen()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await is_stuck.wait()
        while server.server_state.connections:  # the handle cuts it, although the client has read nothing
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
    client.close()

    assert HIGH_WATER_BYTES < seen["pending"] < HIGH_WATER_BYTES + 4096
    assert seen["sent"] < HIGH_WATER_BYTES + 4 * KERNEL_SEND_BUFFER_BYTES
