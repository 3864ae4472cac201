"""Readiness and the status page tell the truth; the largest pool is not asked for each request."""

from dataclasses import replace
from typing import cast

import pytest

from gateway.clients.link import TOKEN_REFUSED, LinkBroken
from gateway.clients.scheduler import FleetStatus, SchedulerClient, ServiceInfo
from gateway.fleet import FleetView, StatusPage
from shared.domain.errors import ServingError


def service(role: str, *, ready: bool = True) -> ServiceInfo:
    """One of a kind."""
    return ServiceInfo(role=role, id=f"{role}-0", pid=7, address="127.0.0.1:1", admin_url="http://x", ready=ready)


STATUS = FleetStatus(
    services=(service("scheduler"), service("prefill"), service("decode")),
    queue=2,
    requests={"decoding": 1},
    blocks={"decode": {"free": 9}},
    sequences={"running": 1},
    is_redis_ready=True,
    unreleased=3,
    max_request_tokens=100,
)


class FakeScheduler:
    """Answers with `status`, or not at all."""

    def __init__(self, status: FleetStatus | ServingError | None) -> None:
        self.status_now = status
        self.num_asked = 0

    async def status(self, timeout_s: float) -> FleetStatus:
        """As the client does."""
        self.num_asked += 1
        if self.status_now is None:
            raise LinkBroken("test")
        if isinstance(self.status_now, ServingError):
            raise self.status_now
        return self.status_now


class JumpingClock:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def unix_ms(self) -> int:
        """Not asked."""
        return 0


def view(scheduler: FakeScheduler, clock: JumpingClock | None = None) -> FleetView:
    """Of that scheduler."""
    return FleetView(cast("SchedulerClient", scheduler), clock or JumpingClock())


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (STATUS, (True, "")),
        (None, (False, "the scheduler cannot be reached")),
        (TOKEN_REFUSED, (False, "the active scheduler belongs to another system: it has another cluster token")),
        (replace(STATUS, is_redis_ready=False), (False, "redis cannot be reached")),
        (replace(STATUS, services=(service("decode"),)), (False, "no prefill worker is ready")),
        (
            replace(STATUS, services=(service("prefill"), service("decode", ready=False))),
            (False, "no decode worker is ready"),
        ),
        (
            replace(STATUS, max_request_tokens=0),
            (False, "no prefill worker has the KV layout of a decode worker"),
        ),
    ],
)
async def test_readiness_names_what_is_missing(
    status: FleetStatus | ServingError | None, expected: tuple[bool, str]
) -> None:
    """A scheduler, Redis, and one ready worker of each kind, which understand each other (PDX-03)."""
    assert expected == await view(FakeScheduler(status)).readiness()


async def test_the_largest_pool_is_remembered_for_a_second() -> None:
    """Then it is asked for again."""
    scheduler, clock = FakeScheduler(STATUS), JumpingClock()
    fleet = view(scheduler, clock)

    assert [100, 100] == [await fleet.max_request_tokens(), await fleet.max_request_tokens()]
    assert 1 == scheduler.num_asked

    clock.now += 1.5
    scheduler.status_now = replace(STATUS, max_request_tokens=50)
    assert 50 == await fleet.max_request_tokens()


async def test_the_largest_pool_is_not_made_up() -> None:
    """Without an answer there is none, also not the one from before."""
    scheduler, clock = FakeScheduler(STATUS), JumpingClock()
    fleet = view(scheduler, clock)
    await fleet.max_request_tokens()
    clock.now += 1.5
    scheduler.status_now = None

    with pytest.raises(LinkBroken):
        await fleet.max_request_tokens()


def page(scheduler: FakeScheduler, redis_pid: int | None) -> StatusPage:
    """The page of a ready gateway."""

    async def is_ready() -> tuple[bool, str]:
        return True, ""

    async def pid() -> int | None:
        return redis_pid

    return StatusPage(
        view(scheduler),
        gateway_id="gateway-8000",
        address="http://127.0.0.1:8000",
        admin_url=lambda: "http://127.0.0.1:9000",
        peers="http://127.0.0.1:9001, http://127.0.0.1:9002",
        is_ready=is_ready,
        redis_url="redis://user:secret@[::1]:6380/0?password=secret",
        redis_pid=pid,
    )


async def test_the_status_page_lists_every_service() -> None:
    """The gateway itself and Redis beside what the scheduler knows; no secret of the URL."""
    told = await page(FakeScheduler(STATUS), 41)()

    assert ["gateway", "scheduler", "prefill", "decode", "redis"] == [entry["role"] for entry in told["services"]]
    assert [{"role", "id", "pid", "address", "admin_url", "ready"}] * 5 == [set(entry) for entry in told["services"]]
    assert ["http://127.0.0.1:9001", "http://127.0.0.1:9002"] == told["peers"]
    assert ("http://127.0.0.1:8000", "http://127.0.0.1:9000", True) == (
        told["services"][0]["address"],
        told["services"][0]["admin_url"],
        told["services"][0]["ready"],
    )
    assert ("[::1]:6380", 41, True) == tuple(told["services"][-1][name] for name in ("address", "pid", "ready"))
    assert (2, {"decoding": 1}, {"decode": {"free": 9}}, 3) == tuple(
        told[name] for name in ("queue", "requests", "blocks", "unreleased")
    )


async def test_the_status_page_stands_without_the_others() -> None:
    """What cannot be reached is left out or not ready."""
    told = await page(FakeScheduler(None), None)()

    assert [("gateway", True), ("redis", False)] == [(entry["role"], entry["ready"]) for entry in told["services"]]
    assert (0, {}, {}, 0) == tuple(told[name] for name in ("queue", "requests", "blocks", "unreleased"))
