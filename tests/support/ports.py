"""Free ports for the one process whose port a test must choose: the gateway (and its admin port, 1000 above)."""

import random
import socket

ADMIN_OFFSET = 1000
# Below the range from which Linux takes ports for outgoing connections, so that no client socket sits on ours.
FIRST_PORT, LAST_PORT = 20_000, 30_000
ATTEMPTS = 200


def is_free(port: int) -> bool:
    """True if a server could listen on this port of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def gateway_port(count: int = 1) -> int:
    """The first of `count` neighbours, each free together with the one ADMIN_OFFSET above it.

    Raises RuntimeError if none is found.
    """
    for _ in range(ATTEMPTS):
        first = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)
        if all(is_free(port) and is_free(port + ADMIN_OFFSET) for port in range(first, first + count)):
            return first
    raise RuntimeError("no pair of free ports")
