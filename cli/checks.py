"""Looks before anything is started: a taken port or a Redis that does not answer is one clear sentence."""

import asyncio
import contextlib
import socket

from cli.problem import EXIT_USAGE, CommandProblem
from shared.domain.errors import ServingError
from shared.process import RealClock
from shared.settings import ADMIN_PORT_OFFSET
from shared.state.client import EvictionPolicyError, StateClient
from shared.state.leadership import Leadership

POLL_S = 0.05
MAX_PORT = 65535
REDIS_TIMEOUT_S = 5.0  # an embedded one answers after 0.1 s; one elsewhere may be about to be up again


def check_ports(first: int, num_gateways: int) -> None:
    """A gateway has one and, for administration, one 1000 above. Raises CommandProblem for one that cannot be had."""
    last = first + num_gateways - 1
    if last + ADMIN_PORT_OFFSET > MAX_PORT:
        raise CommandProblem(
            f"{num_gateways} gateways from port {first} on need ports up to {last + ADMIN_PORT_OFFSET}, and there are "
            f"only {MAX_PORT}; choose another --port",
            exit_code=EXIT_USAGE,
        )
    for port in range(first, last + 1):
        check_port(port)
        check_port(port + ADMIN_PORT_OFFSET)


def check_port(port: int) -> None:
    """Raises CommandProblem if somebody listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is not taken
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise CommandProblem(
                f"port {port} is taken (a gateway uses P and, for administration, P + 1000); choose another --port"
            ) from None


async def wait_for_redis(url: str) -> None:
    """Returns when Redis answers and would never throw a record away; raises CommandProblem with what is wrong."""
    client = StateClient(url)
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await _check_policy_when_it_answers(client)
    except TimeoutError:
        raise CommandProblem(
            f"no Redis answers at {_without_password(url)}; start it, or leave --redis-url out to use the embedded one"
        ) from None
    except EvictionPolicyError:
        raise CommandProblem(
            f"the Redis at {_without_password(url)} may evict records: set its maxmemory-policy to noeviction"
        ) from None
    except ValueError:
        raise CommandProblem(
            f"{_without_password(url) or 'an empty text'} is no Redis URL; give one like redis://host:6379/0",
            exit_code=EXIT_USAGE,
        ) from None
    finally:
        await client.close()


async def check_nobody_is_active(url: str) -> None:
    """Two systems cannot share a Redis; a lease that a killed one left is over in 3 s. Raises CommandProblem."""
    client = StateClient(url)
    leadership = Leadership(client, RealClock())
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            while True:
                with contextlib.suppress(ServingError):  # slow for a moment: `wait_for_redis` has seen it answer
                    if await leadership.find() is None:
                        return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise CommandProblem(
            f"another firsttoken system is active on the Redis at {_without_password(url)}; stop it, or name another "
            "--redis-url (redis://host:6379/1 is another database of the same server)"
        ) from None
    finally:
        await client.close()


async def _check_policy_when_it_answers(client: StateClient) -> None:
    """One slow reply is no absence: the machine may be starting a lot at once."""
    while True:
        try:
            await client.check_eviction_policy()
            return
        except ServingError:
            await asyncio.sleep(POLL_S)


def _without_password(url: str) -> str:
    """What may be shown."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
