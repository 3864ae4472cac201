"""A worker in a process of its own, under the scheduler of a `worker_pair`."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.support.worker_pair import TOKEN, WorkerPair


@asynccontextmanager
async def worker_process(pair: WorkerPair, role: str, **settings: object) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Connected to the pair's scheduler; killed at the end if it still runs, be it stopped."""
    all_settings: dict[str, object] = {
        "scripted": True,
        "port": 0,
        "admin_port": 0,
        "scheduler": pair.scheduler_address,
        "cluster_token": TOKEN,
        "worker_id": f"{role}-0",
        "kv_pool_mib": 16,
        "transports": ",".join(pair.transports),
        **settings,
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        f"{role}_worker",
        env={
            "PATH": "/usr/bin:/bin",
            **{f"FIRSTTOKEN_{name.upper()}": str(value) for name, value in all_settings.items()},
        },
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await pair.scheduler.until(lambda: any(hello.pid == child.pid for hello in pair.scheduler.hellos))
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
