"""Restart, drain in order, leave nothing behind: with real processes of a few lines."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import supervisor as supervisor_module
from cli.plan import ChildSpec, DrainStage
from cli.problem import CommandProblem
from cli.run_folder import RunFolder
from cli.supervisor import Supervisor
from shared.aio import scope

# Blocked and waited for: a handler and `pause` would miss a signal that comes between the two.
WAITS = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "print(ID, 'up', flush=True); signal.sigwait({signal.SIGTERM})"
)
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(ID, 'up', flush=True)\nwhile True: signal.pause()"


def _spec(child_id: str, code: str, stage: DrainStage = DrainStage.CORE) -> ChildSpec:
    command = (sys.executable, "-P", "-c", f"ID = {child_id!r}\n{code}")
    return ChildSpec(child_id=child_id, command=command, environ=dict(os.environ), stage=stage)


class _Run:
    """A supervisor, what it said, and its folder."""

    def __init__(self, home: Path, *, drain_timeout_s: float = 60.0) -> None:
        self.said: list[str] = []
        self.folder = RunFolder.create(home)
        self.supervisor = Supervisor(self.folder, drain_timeout_s=drain_timeout_s, say=self.said.append)

    def log(self, child_id: str) -> str:
        path = self.folder.log_path(child_id)
        return path.read_text() if path.exists() else ""

    async def until_up(self, child_id: str, num_starts: int = 1) -> None:
        """It has said so, and the supervisor has it: it may have spoken before its start was seen here."""
        await self.until(lambda: self.log(child_id).count("up") == num_starts and child_id in self.supervisor.pids)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Bounded polling of another process's output."""
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.01)


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_dead_child_is_started_again_and_it_is_said(tmp_path: Path) -> None:
    """One line with how it ended and where its log is; the id is the same, the process a new one."""
    run = _Run(tmp_path)
    async with asyncio.TaskGroup() as group:
        scope.spawn(group, run.supervisor.keep(_spec("decode-0", WAITS)), name="decode-0")
        await run.until_up("decode-0")
        run.supervisor.set_ready()
        first = run.supervisor.pids["decode-0"]
        os.kill(first, 9)
        await run.until_up("decode-0", 2)

        assert first != run.supervisor.pids["decode-0"]
        await run.supervisor.stop()

    (note,) = run.said
    assert "decode-0 ended with signal SIGKILL" in note
    assert str(run.folder.log_path("decode-0")) in note


async def test_drain_goes_stage_by_stage(tmp_path: Path) -> None:
    """The gateway has ended before a worker is told; Redis is last."""
    run = _Run(tmp_path)
    order = tmp_path / "order"
    code = (
        f"import time\n{WAITS}\n"
        "time.sleep(0.1 if ID == 'gateway-0' else 0)\n"
        f"open({str(order)!r}, 'a').write(ID + '\\n')"
    )
    stages = {"redis": DrainStage.STATE, "decode-0": DrainStage.CORE, "gateway-0": DrainStage.EDGE}
    async with asyncio.TaskGroup() as group:
        for child_id, stage in stages.items():
            scope.spawn(group, run.supervisor.keep(_spec(child_id, code, stage)), name=child_id)
        for child_id in stages:
            await run.until_up(child_id)
        await run.supervisor.stop()

    assert ["gateway-0", "decode-0", "redis"] == order.read_text().split()
    assert {} == run.supervisor.pids


async def test_one_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    """After its time, and it is said."""
    run = _Run(tmp_path, drain_timeout_s=0.2)
    async with asyncio.TaskGroup() as group:
        scope.spawn(group, run.supervisor.keep(_spec("decode-0", IGNORES)), name="decode-0")
        await run.until_up("decode-0")
        pid = run.supervisor.pids["decode-0"]
        await run.supervisor.stop()

    assert _has_ended(pid)
    assert ["decode-0 did not stop within 0 s: killed"] == run.said


async def test_bad_settings_end_the_run_at_once(tmp_path: Path) -> None:
    """Exit code 2 does not get better by trying again; the child's last lines are shown."""
    run = _Run(tmp_path)

    with pytest.raises(CommandProblem, match=r"gateway-0 does not start \(exit code 2, 1 tries"):
        await run.supervisor.keep(_spec("gateway-0", "print('FIRSTTOKEN_PORT: not a number'); raise SystemExit(2)"))

    assert ["  gateway-0 | FIRSTTOKEN_PORT: not a number"] == run.said


async def test_a_child_that_never_comes_up_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tries before everything was ready once; then the sentence names the log."""
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY_S", 0.01)
    run = _Run(tmp_path)

    with pytest.raises(CommandProblem) as caught:
        await run.supervisor.keep(_spec("decode-0", "raise SystemExit(1)"))

    assert "decode-0 does not start (exit code 1, 3 tries)" in caught.value.sentence
    assert str(run.folder.log_path("decode-0")) in caught.value.sentence


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a removed log folder is said, and ends neither the others nor, once it is over, this one."""
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY_S", 0.01)
    run = _Run(tmp_path)
    run.supervisor.set_ready()
    run.folder.path.rmdir()

    async with asyncio.TaskGroup() as group:
        scope.spawn(group, run.supervisor.keep(_spec("decode-0", IGNORES)), name="decode-0")
        await run.until(lambda: len(run.said) >= 2)
        run.folder.path.mkdir()
        await run.until_up("decode-0")
        run.supervisor.kill()

    assert run.said[0].startswith("decode-0 cannot be started: ")
    assert "starting it again" in run.said[1]


async def test_kill_ends_everything_at_once(tmp_path: Path) -> None:
    """Also what a child started itself, as long as it stayed in its group."""
    run = _Run(tmp_path)
    code = (
        "import subprocess, sys, signal\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(inner.pid, 'up', flush=True); signal.pause()"
    )
    async with asyncio.TaskGroup() as group:
        scope.spawn(group, run.supervisor.keep(_spec("decode-0", code)), name="decode-0")
        await run.until_up("decode-0")
        inner = int(run.log("decode-0").split()[0])
        run.supervisor.kill()

    await run.supervisor.end_all()
    assert {} == run.supervisor.pids
    await run.until(lambda: _has_ended(inner) or _is_zombie(inner))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_stop_during_the_backoff_starts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait before a restart ends at once when the run does."""
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY_S", 60.0)
    monkeypatch.setattr(supervisor_module, "MAX_RESTART_DELAY_S", 60.0)
    run = _Run(tmp_path)
    run.supervisor.set_ready()
    async with asyncio.TaskGroup() as group:
        scope.spawn(group, run.supervisor.keep(_spec("decode-0", "raise SystemExit(1)")), name="decode-0")
        await run.until(lambda: bool(run.said))
        await run.supervisor.stop()

    assert {} == run.supervisor.pids
