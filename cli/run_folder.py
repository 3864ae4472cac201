"""The folder of one run of `firsttoken up`: a log file a child. Old runs are removed, long logs are turned over."""

import os
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path

MAX_RUNS = 10  # enough to look back at yesterday's trouble
MAX_LOG_BYTES = 32 * 1024 * 1024  # with one older file beside it: at most 64 MiB a child
TAIL_BYTES = 16 * 1024
OWNER_ONLY = stat.S_IRWXU


class RunFolder:
    """Made by `create`; the name ends in the pid of its `up`, so that a run that lives is never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, home: Path) -> "RunFolder":
        """Raises OSError where the home cannot be written."""
        runs = home / "run"
        runs.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        _remove_old(runs)
        path = runs / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
        path.mkdir(mode=OWNER_ONLY)
        return cls(path)

    def log_path(self, child_id: str) -> Path:
        """Where a child's stdout and stderr go, over all its restarts."""
        return self.path / f"{child_id}.log"

    def log_size(self, child_id: str) -> int:
        """In bytes, 0 before the first start."""
        path = self.log_path(child_id)
        return path.stat().st_size if path.exists() else 0

    def tail(self, child_id: str, max_lines: int, *, begin: int = 0) -> list[str]:
        """The last lines that a child wrote after the first `begin` bytes; reads a bounded piece of the file."""
        try:
            with self.log_path(child_id).open("rb") as log:
                log.seek(max(begin, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read(TAIL_BYTES).decode(errors="replace").splitlines()[-max_lines:]
        except FileNotFoundError:
            return []

    def turn_over_long_logs(self) -> None:
        """Copy and truncate: the children append to an open file and notice nothing."""
        for log in self.path.glob("*.log"):
            if log.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)


def _remove_old(runs: Path) -> None:
    """All but the newest MAX_RUNS - 1, so that with the new one MAX_RUNS are there."""
    folders = sorted(path for path in runs.iterdir() if path.is_dir())
    for folder in folders[: -(MAX_RUNS - 1)]:
        if not _is_alive(folder.name.rpartition("-")[2]):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
