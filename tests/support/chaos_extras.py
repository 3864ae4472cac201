"""Processes of a run that `up` does not start: a scheduler that stands by, and workers whose link to it is ours.

Each is a copy of one of `up`'s, by another name and with other settings, on a leash, and is started again when it ends.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import processes
from tests.support.chaos_links import child_id_of
from tests.support.cluster import Cluster

RESTART_AFTER_S = 0.5
STOPS_WITHIN_S = 60.0  # a drain, on the busiest machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """`like`: the process that it copies."""

    child_id: str
    like: str
    settings: Mapping[str, str]


@asynccontextmanager
async def running(cluster: Cluster, extras: Sequence[Extra]) -> AsyncGenerator[None]:
    """Beside the cluster's own; drained at the end. Raises AssertionError for one that does not end."""
    stopping = asyncio.Event()
    pids = {child_id_of(pid): pid for pid in cluster.pids()}
    async with asyncio.TaskGroup() as group:
        try:
            for extra in extras:
                named = {"FIRSTTOKEN_WORKER_ID": extra.child_id}
                environ = _environ_of(pids[extra.like]) | named | dict(extra.settings)
                command = processes.command_line(pids[extra.like]).split()
                group.create_task(_keep(cluster, extra.child_id, command, environ, stopping))
            yield
        finally:
            stopping.set()


def _environ_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs)


async def _keep(
    cluster: Cluster, child_id: str, command: Sequence[str], environ: Mapping[str, str], stopping: asyncio.Event
) -> None:
    folder = cluster.log_folder
    assert folder is not None
    leash = [sys.executable, "-P", "-m", "cli.leash", str(os.getpid())]
    while not stopping.is_set():
        with (folder / f"{child_id}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *leash, *command, env=dict(environ), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            ended, stopped = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stopping.wait())
            await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(STOPS_WITHIN_S):
                    await ended
        finally:
            if process.returncode is None:
                process.kill()
        if not stopping.is_set():
            await asyncio.sleep(RESTART_AFTER_S)
