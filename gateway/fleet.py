"""What the gateway says about the system: readiness, the status page, the room that the workers offer."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import FleetStatus, SchedulerClient, ServiceInfo
from shared.domain.clock import Clock
from shared.domain.errors import ServingError
from shared.domain.request import Role

_STATUS_TIMEOUT_S = 1.0
_ROOM_AGE_S = 1.0  # pools change only when a worker comes or goes


class FleetView:
    """Asks the scheduler. Owns the short memory of the largest pool."""

    def __init__(self, scheduler: SchedulerClient, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._asking = asyncio.Lock()
        self._room: tuple[int, float] | None = None  # and when it was asked

    async def max_request_tokens(self) -> int:
        """Largest prompt + answer that fits some pool; 0 = no workers. Raises ServingError or LinkBroken."""
        async with self._asking:  # one question for a burst of requests
            now = self._clock.monotonic()
            if self._room is None or now - self._room[1] > _ROOM_AGE_S:
                status = await self._scheduler.status(_STATUS_TIMEOUT_S)
                self._room = (status.max_request_tokens, now)
            return self._room[0]

    async def readiness(self) -> tuple[bool, str]:
        """Whether a request could be served now, and else why not."""
        try:
            status = await self._scheduler.status(_STATUS_TIMEOUT_S)
        except LinkBroken:
            return False, "the scheduler cannot be reached"
        except ServingError as error:
            return False, error.message
        if not status.is_redis_ready:
            return False, "redis cannot be reached"
        for role in (Role.PREFILL, Role.DECODE):
            if not any(service.ready for service in status.services if service.role == role.value):
                return False, f"no {role.value} worker is ready"
        if not status.max_request_tokens:
            return False, "no prefill worker has the KV layout of a decode worker"
        return True, ""

    async def status(self) -> FleetStatus | None:
        """None where the scheduler cannot be reached."""
        try:
            return await self._scheduler.status(_STATUS_TIMEOUT_S)
        except (LinkBroken, ServingError):
            return None


class StatusPage:
    """GET /status of the admin port."""

    def __init__(
        self,
        fleet: FleetView,
        *,
        gateway_id: str,
        address: str,
        admin_url: Callable[[], str],
        peers: str,
        is_ready: Callable[[], Awaitable[tuple[bool, str]]],
        redis_url: str,
        redis_pid: Callable[[], Awaitable[int | None]],
    ) -> None:
        """`redis_pid` gives None where Redis cannot be reached, 0 where it does not tell.

        `peers`: admin URLs of the system's other gateways, with commas between.
        """
        self._fleet = fleet
        self._gateway_id = gateway_id
        self._address = address
        self._admin_url = admin_url
        self._peers = [url.strip() for url in peers.split(",") if url.strip()]
        self._is_ready = is_ready
        self._redis_address = _without_secrets(redis_url)
        self._redis_pid = redis_pid

    async def __call__(self) -> Mapping[str, Any]:
        status = await self._fleet.status()
        ready, _ = await self._is_ready()
        redis_pid = await self._redis_pid()
        gateway = ServiceInfo(
            role=Role.GATEWAY.value,
            id=self._gateway_id,
            pid=os.getpid(),
            address=self._address,
            admin_url=self._admin_url(),
            ready=ready,
        )
        redis = ServiceInfo(
            role=Role.REDIS.value,
            id="redis",
            pid=redis_pid or 0,
            address=self._redis_address,
            admin_url="",
            ready=redis_pid is not None,
        )
        others = () if status is None else status.services
        services = (gateway, *(service for service in others if service.role != Role.REDIS.value), redis)
        return {
            "services": [_service_object(service) for service in services],
            "queue": status.queue if status else 0,
            "requests": status.requests if status else {},
            "blocks": status.blocks if status else {},
            "sequences": status.sequences if status else {},
            "unreleased": status.unreleased if status else 0,
            "peers": self._peers,
        }


def _service_object(service: ServiceInfo) -> dict[str, str | int | bool]:
    return {
        "role": service.role,
        "id": service.id,
        "pid": service.pid,
        "address": service.address,
        "admin_url": service.admin_url,
        "ready": service.ready,
    }


def _without_secrets(url: str) -> str:
    """host:port, or the path of a socket."""
    parts = urlsplit(url)
    if not parts.hostname:
        return parts.path
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or 6379}"
