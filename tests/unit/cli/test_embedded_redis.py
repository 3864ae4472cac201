"""The embedded Valkey as a child."""

import asyncio
import os
from pathlib import Path

import pytest

from cli import checks
from cli.checks import wait_for_redis
from cli.child import Child
from cli.embedded_redis import plan_redis
from cli.plan import DrainStage
from cli.run_folder import RunFolder


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the start of two processes, one behind the other: a hang alone takes longer."""
    monkeypatch.setattr(checks, "REDIS_TIMEOUT_S", 60.0)


async def test_the_planned_child_serves_its_url_again_after_a_restart(tmp_path: Path) -> None:
    """Same port, empty store: the scheduler writes its live records again. Its log is where the notes say."""
    folder = RunFolder.create(tmp_path)
    spec, url = plan_redis(folder, os.environ)

    assert DrainStage.STATE is spec.stage
    for _ in range(2):
        child = await Child.start(spec, folder.log_path(spec.child_id))
        await wait_for_redis(url)
        child.terminate()
        async with asyncio.timeout(30):
            assert 0 == await child.wait()
    assert folder.tail(spec.child_id, 5)


async def test_the_server_can_be_recognised_by_its_environment(tmp_path: Path) -> None:
    """As every other child: a server that is left over could be found by whose run it was."""
    folder = RunFolder.create(tmp_path)
    spec, url = plan_redis(folder, {**os.environ, "MARK_OF_THE_RUN": "7"})

    child = await Child.start(spec, folder.log_path(spec.child_id))
    await wait_for_redis(url)

    environ = await asyncio.to_thread(Path(f"/proc/{child.pid}/environ").read_bytes)
    assert b"MARK_OF_THE_RUN=7" in environ.split(b"\0")
    child.kill()
    await child.wait()
