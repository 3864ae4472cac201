"""What a process has open, by kind: connections to Redis, connections of clients and scrapers, other connections, the rest.

Read from /proc, so that nobody's own word counts.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """Counts of one process at one moment."""

    redis: int
    """Connections to the store: as many as calls were made at once, up to a bound of the client's."""
    scrapes: int
    """Connections to the admin port: the one who counts is among them."""
    connections: int
    """All others: clients, and one a peer that it has met."""
    memory: int
    """Segments without a name in a file system: a sender of KV keeps some for its next transfers."""
    others: int
    """Files, pipes, epoll, sockets that are not connected."""
    names: tuple[str, ...]
    """All of them, for messages."""


def open_files(pid: int, *, redis_port: int, admin_port: int) -> OpenFiles:
    """Raises FileNotFoundError where the process has ended."""
    ports = _connections()
    counts: Counter[str] = Counter()
    names: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue  # closed meanwhile: it was the listing's own, or is no leak
        pair = ports.get(name.removeprefix("socket:[").rstrip("]")) if name.startswith("socket:[") else None
        if pair is None:
            kind = "memory" if name.startswith("/memfd:") else "others"
        else:
            name = f"tcp {pair[0]} to {pair[1]}"
            kind = "redis" if pair[1] == redis_port else "scrapes" if pair[0] == admin_port else "connections"
        counts[kind] += 1
        names.append(name)
    return OpenFiles(
        redis=counts["redis"],
        scrapes=counts["scrapes"],
        connections=counts["connections"],
        memory=counts["memory"],
        others=counts["others"],
        names=tuple(sorted(names)),
    )


def _connections() -> Mapping[str, tuple[int, int]]:
    """Local and remote port of each connection of this machine, by inode."""
    found: dict[str, tuple[int, int]] = {}
    for table in _TCP_TABLES:
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != _LISTEN:
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                found[fields[9]] = (local, remote)
    return found
