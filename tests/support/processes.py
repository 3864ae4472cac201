"""What the operating system says about processes, found by a mark in their environment: it cannot be outrun by a fork."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.polling import eventually

MARK_NAME = "TEST_CLUSTER_MARK"


def marked_pids(mark: str) -> set[int]:
    """Live processes (no zombies) that carry this mark."""
    wanted = f"{MARK_NAME}={mark}".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def command_line(pid: int) -> str:
    """Its arguments, for messages; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def open_file_names(pid: int) -> list[str]:
    """What the descriptors point to, for messages."""
    names: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
    return sorted(names)


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def is_live(pid: int) -> bool:
    """It runs: neither gone nor a zombie."""
    return command_line(pid) != ""


async def wait_gone(pid: int) -> None:
    """Raises AssertionError if a process that was killed still runs after a while."""

    async def probe() -> bool:
        return is_live(pid)

    await eventually(probe, lambda lives: not lives, within_s=40.0, what=f"process {pid} has ended")


def kill_all(pids: set[int]) -> None:
    """SIGKILL to each of these processes that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def frozen(pid: int) -> Generator[Callable[[], None]]:
    """The process stands still (SIGSTOP) until what this gives is called, at the latest until the end."""
    os.kill(pid, signal.SIGSTOP)

    def thaw() -> None:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # killed meanwhile

    try:
        yield thaw
    finally:
        thaw()
