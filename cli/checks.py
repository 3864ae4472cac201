"""Looks before anything is started: a taken port or a Redis that does not answer is one clear sentence."""

import asyncio
import socket

from cli.problem import CommandProblem
from shared.domain.errors import ServingError
from shared.state.client import StateClient

POLL_S = 0.05
REDIS_TIMEOUT_S = 5.0  # an embedded one answers after 0.1 s, one elsewhere may be just restarting


def check_port(port: int) -> None:
    """Raises CommandProblem if somebody listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is not taken
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise CommandProblem(
                f"port {port} is taken (the gateway uses P and, for administration, P + 1000); choose another --port"
            ) from None
