"""What is looked at before anything is started."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import checks
from cli.checks import check_nobody_is_active, check_port, check_ports, wait_for_redis
from cli.problem import EXIT_FAILED, EXIT_USAGE, CommandProblem
from shared.domain.ids import Incarnation
from shared.process import RealClock
from shared.state.client import StateClient, state_unavailable
from shared.state.embedded import EmbeddedValkey
from shared.state.leadership import Leadership
from tests.support.ports import gateway_port
from tests.support.redis_server import CALL_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang alone takes longer: a machine that tests may stand still for as long as a person would wait."""
    monkeypatch.setattr(checks, "REDIS_TIMEOUT_S", 60.0)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A real server, started."""
    with EmbeddedValkey(0, tmp_path) as server:
        yield server


def test_a_taken_port_is_one_sentence() -> None:
    """With the port and the option that helps."""
    port = gateway_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(CommandProblem) as caught:
        check_port(port)

    assert str(port) in caught.value.sentence
    assert "--port" in caught.value.sentence
    check_port(port)


@pytest.mark.parametrize("offset", [0, 1000])
def test_every_gateway_s_ports_are_looked_at(offset: int) -> None:
    """The second one's too, and their admin ports."""
    first = gateway_port(2)
    taken = first + 1 + offset
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(CommandProblem, match=f"port {taken} is taken"):
        check_ports(first, 2)

    check_ports(first, 2)


def test_ports_have_an_end() -> None:
    """Admin ports are 1000 above."""
    with pytest.raises(CommandProblem) as caught:
        check_ports(64535, 2)

    assert EXIT_USAGE == caught.value.exit_code


async def test_a_redis_that_answers_is_good(valkey: EmbeddedValkey) -> None:
    """Nothing is said."""
    await wait_for_redis(valkey.url)


async def test_one_slow_reply_is_no_absence(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that starts a system is busy: both looks ask again within their time."""
    real = StateClient.call
    seen: list[StateClient] = []

    async def slow_at_first(client: StateClient, *command: str | int | bytes) -> Any:
        if client not in seen:
            seen.append(client)
            raise state_unavailable()
        return await real(client, *command)

    monkeypatch.setattr(StateClient, "call", slow_at_first)
    await wait_for_redis(valkey.url)
    await check_nobody_is_active(valkey.url)
    assert 2 == len(seen)


async def test_a_redis_that_may_evict_is_refused(valkey: EmbeddedValkey) -> None:
    """A record thrown away under memory pressure would be a request without an owner."""
    with socket.create_connection(("127.0.0.1", valkey.port)) as connection:
        connection.sendall(b"CONFIG SET maxmemory-policy allkeys-lru\r\n")
        assert connection.recv(64).startswith(b"+OK")

    with pytest.raises(CommandProblem, match="noeviction"):
        await wait_for_redis(valkey.url)


async def test_no_redis_is_one_sentence_without_its_password(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded wait; it may have been about to start."""
    monkeypatch.setattr(checks, "REDIS_TIMEOUT_S", 0.2)
    with pytest.raises(CommandProblem) as caught:
        await wait_for_redis(f"redis://:hunter2@127.0.0.1:{unused_tcp_port}/0")

    assert EXIT_FAILED == caught.value.exit_code
    assert f"redis://127.0.0.1:{unused_tcp_port}/0" in caught.value.sentence
    assert "hunter2" not in caught.value.sentence


async def test_what_is_no_redis_url_is_wrong_usage() -> None:
    """Exit code 2, at once."""
    with pytest.raises(CommandProblem) as caught:
        await wait_for_redis("http://127.0.0.1:6379")

    assert EXIT_USAGE == caught.value.exit_code


async def test_a_redis_with_an_active_system_is_refused(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers and ours would meet; once its lease is over there is room for us."""
    monkeypatch.setattr("shared.state.leadership.LEASE_TTL_MS", 300_000)  # not over before it is looked for
    await check_nobody_is_active(valkey.url)
    client = StateClient(valkey.url, timeout_s=CALL_S)
    leadership = Leadership(client, RealClock())
    await leadership.acquire(Incarnation(1), "127.0.0.1:1")

    with monkeypatch.context() as patch:
        patch.setattr(checks, "REDIS_TIMEOUT_S", 0.2)
        with pytest.raises(CommandProblem, match="another firsttoken system is active"):
            await check_nobody_is_active(valkey.url)
    await leadership.release()
    await check_nobody_is_active(valkey.url)
    await client.close()
