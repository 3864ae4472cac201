"""Waits until a system is ready for requests with all its workers, and says what is missing meanwhile."""

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import httpx

from cli.status import parse_status

OK = 200
POLL_S = 0.1
CALL_TIMEOUT_S = 3.0  # the gateway's own probe answers within 2 s
NOT_UP = "the gateway starts"


async def wait_until_ready(admin_url: str, num_workers: Mapping[str, int], wait_for: Callable[[str], None]) -> None:
    """Polls the gateway's admin port for ever: the caller bounds it. `wait_for` hears each reason not to be ready.

    `num_workers` is by role: a gateway is ready with one worker of each, a run that was asked for more is not.
    """
    async with httpx.AsyncClient(base_url=admin_url, timeout=CALL_TIMEOUT_S, trust_env=False) as client:
        while True:
            reason = await ask_readiness(client) or await ask_workers(client, num_workers)
            if reason is None:
                return
            wait_for(reason)
            await asyncio.sleep(POLL_S)


async def ask_readiness(client: httpx.AsyncClient) -> str | None:
    """None = ready; else why not. Never raises for a service that is not there."""
    try:
        answer = await client.get("/readyz")
    except httpx.HTTPError:
        return NOT_UP
    if answer.status_code == OK:
        return None
    match _document(answer):
        case {"reason": str(reason)} if reason:
            return reason
        case _:
            return f"the gateway is not ready (it answers {answer.status_code})"


async def ask_workers(client: httpx.AsyncClient, num_workers: Mapping[str, int]) -> str | None:
    """None = all are ready; else how many are."""
    try:
        answer = await client.get("/status")
    except httpx.HTTPError:
        return NOT_UP
    try:
        services = parse_status(_document(answer)).services
    except ValueError:
        return f"the gateway has no status (it answers {answer.status_code})"
    for role, wanted in num_workers.items():
        num_ready = sum(service.role == role and service.ready for service in services)
        if num_ready < wanted:
            return f"{num_ready} of {wanted} {role} workers are ready"
    return None


def _document(answer: httpx.Response) -> object:
    try:
        return cast("object", answer.json())
    except ValueError:
        return None
