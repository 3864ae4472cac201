"""Waits until a service's admin port says that it is ready, and says what is missing meanwhile."""

import asyncio
from collections.abc import Callable

import httpx

OK = 200
POLL_S = 0.1
CALL_TIMEOUT_S = 3.0  # the probe itself answers within 2 s


async def wait_until_ready(admin_url: str, wait_for: Callable[[str], None]) -> None:
    """Polls `/readyz` for ever: the caller bounds it. `wait_for` hears the reason of each answer that is not ready."""
    async with httpx.AsyncClient(base_url=admin_url, timeout=CALL_TIMEOUT_S, trust_env=False) as client:
        while True:
            reason = await ask_readiness(client)
            if reason is None:
                return
            wait_for(reason)
            await asyncio.sleep(POLL_S)


async def ask_readiness(client: httpx.AsyncClient) -> str | None:
    """None = ready; else why not. Never raises for a service that is not there."""
    try:
        answer = await client.get("/readyz")
    except httpx.HTTPError:
        return "the gateway starts"
    if answer.status_code == OK:
        return None
    try:
        document: object = answer.json()
    except ValueError:
        return f"the gateway is not ready (it answers {answer.status_code})"
    match document:
        case {"reason": str(reason)} if reason:
            return reason
        case _:
            return "the gateway is not ready"
