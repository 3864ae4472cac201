"""Who holds a TCP port of this machine, by the operating system's word: the proxies of a run cut one process off."""

import math
import time
from collections.abc import Callable, Collection, Iterable
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
    """Asked at new connections, so that processes are looked for at most once a second. May be asked in a thread."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._names: dict[int, str] = {}
        self._looked_at = -math.inf

    def of(self, port: int) -> str:
        """Which process has a socket with this port on its own side, by name; empty where none has."""
        return self.names([port]).get(port, "")

    def names(self, ports: Collection[int]) -> dict[int, str]:
        """The same of several, by one look. It takes some 50 ms where thousands of connections are remembered."""
        wanted = {f"socket:[{inode}]": port for inode, port in _inodes(ports).items()}
        if not wanted:
            return {}
        if time.monotonic() - self._looked_at > LOOK_INTERVAL_S:
            self._names = {pid: child_id_of(pid) for pid in self._pids()}
            self._looked_at = time.monotonic()
        found: dict[int, str] = {}
        for pid, name in list(self._names.items()):
            with suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        port = wanted.get(str(entry.readlink()))
                        if port is not None:
                            found.setdefault(port, name)
        return found


def _inodes(ports: Collection[int]) -> dict[str, int]:
    """By inode: the port on its own side."""
    found: dict[str, int] = {}
    for table in ("tcp", "tcp6"):  # grpc's sockets are of the second kind, also for IPv4
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, _, _, _, _, _, _, inode, *_ = line.split(maxsplit=10)
            port = int(local.rpartition(":")[2], 16)
            if port in ports and inode != "0":
                found[inode] = port
    return found
