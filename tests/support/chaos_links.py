"""Who holds a TCP port of this machine, by the operating system's word: the proxies of a run cut one process off."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

LOOK_INTERVAL_S = 1.0
CHILD_NAME = "FIRSTTOKEN_WORKER_ID"  # `up` gives it to every service


def child_id_of(pid: int) -> str:
    """The name that `up` gave it; empty where it has none, or has ended."""
    wanted = f"{CHILD_NAME}=".encode()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(wanted):
                return entry.removeprefix(wanted).decode()
    return ""


class Holders:
    """Asked at each new connection, so that processes are looked for at most once a second."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._names: dict[int, str] = {}
        self._looked_at = -math.inf

    def of(self, port: int) -> str:
        """Which process has a socket with this port on its own side, by name; empty where none has."""
        wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
        if not wanted:
            return ""
        if time.monotonic() - self._looked_at > LOOK_INTERVAL_S:
            self._names = {pid: child_id_of(pid) for pid in self._pids()}
            self._looked_at = time.monotonic()
        for pid, name in self._names.items():
            with suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        if str(entry.readlink()) in wanted:
                            return name
        return ""


def _inodes(port: int) -> set[str]:
    # grpc's sockets are of the second kind, also for IPv4. Thousands of lines on a busy machine: most are not taken apart,
    # since the proxies wait meanwhile.
    ending = f":{port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    fields = [line.split() for lines in tables for line in lines if ending in line]
    return {each[9] for each in fields if each[1].endswith(ending)} - {"0"}
