"""Ends a listening socket so that each client is either served or refused.

Closing it alone resets every connection that the kernel has completed and nobody has accepted yet: its client may have
sent a request, and cannot know whether it was taken.
"""

import asyncio
import contextlib
import ctypes
import select
import socket
import struct

# Linux's number on every architecture that we may meet; Python does not name it.
_SO_ATTACH_FILTER = 26
# Classic BPF over a TCP segment: what has SYN and not ACK, the first word of a new connection, is dropped.
_DROP_NEW = (
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # let it pass
)
HANDSHAKE_S = 0.2  # what has begun to connect completes within a round trip: two thirds of the way round the earth
_MAX_WAIT_S = 2.0  # a busy loop may need some turns to accept what waits


async def stop_taking_connections(listener: socket.socket) -> None:
    """Returns once all connections that were begun have been accepted by whoever accepts: close the socket then.

    A client that begins meanwhile is asked by its own kernel to try again, a second later, and is refused then.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in _DROP_NEW))
    head = struct.pack("@HP", len(_DROP_NEW), ctypes.addressof(program))
    with contextlib.suppress(OSError):  # a system without such filters: the few that come in the last moment are reset
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, head)
    await asyncio.sleep(HANDSHAKE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MAX_WAIT_S):
            while _has_waiting(listener):  # noqa: ASYNC110 - the kernel tells it to nobody else
                await asyncio.sleep(0.005)


def _has_waiting(listener: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
