"""The end of a listening socket, with clients that connect all the time."""

import asyncio
import socket
import threading
from collections import Counter

import pytest

from gateway.listener import stop_taking_connections
from shared.obs.admin import bind

NUM_CLIENTS = 8
ANSWER = b"served"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One answer a connection."""
    await reader.read(1)
    writer.write(ANSWER)
    await writer.drain()
    writer.close()


def ask(address: tuple[str, int]) -> str:
    """What came of one connection."""
    try:
        connection = socket.create_connection(address, timeout=60)
    except ConnectionRefusedError:
        return "refused"
    with connection:
        try:
            connection.sendall(b"?")
            return "served" if connection.recv(100) == ANSWER else "cut"
        except ConnectionResetError:
            return "reset"


async def test_each_of_a_crowd_is_served_or_refused() -> None:
    """None is reset."""
    seen = Counter[str]()
    listener = bind("127.0.0.1", 0)
    server = await asyncio.start_server(serve, sock=listener)
    address = listener.getsockname()

    def client() -> None:
        while not seen["refused"]:
            seen[ask(address)] += 1

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(60):
        while seen["served"] < 10 * NUM_CLIENTS:
            await asyncio.sleep(0.001)
        await stop_taking_connections(listener)
        server.close()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert {"served", "refused"} == set(seen)


async def test_who_has_connected_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is accepted; who comes behind it is refused, although nobody has closed the socket yet."""
    monkeypatch.setattr("gateway.listener.HANDSHAKE_S", 0.0)
    listener = bind("127.0.0.1", 0)
    listener.listen()
    early = socket.create_connection(listener.getsockname())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        ending = group.create_task(stop_taking_connections(listener))
        await asyncio.sleep(0)
        late = group.create_task(asyncio.to_thread(ask, listener.getsockname()))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert (False, False) == (ending.done(), late.done())
        accepted, _ = listener.accept()
        await ending
        listener.close()
        assert "refused" == await late
    with early, accepted:
        early.sendall(b"?")
        assert b"?" == accepted.recv(10)
