"""A second scheduler beside the one that `up` keeps: its settings, other ports, and the lease rules of several."""

import asyncio
import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support import processes
from tests.support.cluster import Service
from tests.support.http_client import exchange
from tests.support.polling import eventually

STOP_WITHIN_S = 60.0
ABSENT_NAME = "FIRSTTOKEN_LEASE_ABSENT_S"


@contextmanager
def standby(of: Service, log: Path = Path(os.devnull)) -> Generator[subprocess.Popen[bytes]]:
    """Runs while the block does, unless it is ended in it."""
    pairs = Path(f"/proc/{of.live_pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    environ = dict(pair.decode().split("=", 1) for pair in pairs)
    if float(environ.get(ABSENT_NAME, 0)) == 0:  # one that knows of no other
        environ[ABSENT_NAME] = "3"
    command = processes.command_line(of.live_pid).split()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def wait_standby(log: Path, *, within_s: float) -> None:
    """The scheduler that writes this log waits for the lease: the last one that was started, and has said so."""

    async def readiness() -> object:
        lines = (await asyncio.to_thread(log.read_text)).splitlines()
        begun = max((number for number, line in enumerate(lines) if '"starting"' in line), default=0)
        for line in lines[begun:]:
            if '"admin pages"' in line:
                return (await exchange(int(json.loads(line)["url"].rsplit(":", 1)[1]), "GET", "/readyz")).json()
        raise LookupError("it is only starting")

    await eventually(
        readiness,
        lambda said: said == {"ready": False, "reason": "waiting for the lease"},
        within_s=within_s,
        what=f"the scheduler of {log.name} waits for the lease",
    )
