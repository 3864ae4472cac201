"""How much memory a KV pool may take, from what the machine and the process's control group have left."""

from pathlib import Path

_ROOT = Path("/")
# Of what is free when a worker starts, when nobody says how much: two workers start at about the same time, and
# weights, prompts under way and the page cache of the model's file want the other half.
SHARE = 4


def pool_bytes(limit_mib: int, *, root: Path = _ROOT) -> int:
    """The bytes for a pool: `limit_mib`, or a quarter of the memory that is left when that is 0.

    Raises ValueError for a limit above the memory there is, which would end the process later and without a word.
    """
    total, left = _memory(root)
    if limit_mib == 0:
        if left is None:
            raise ValueError("how much memory is left cannot be read on this system: give the size of the KV pool")
        return left // SHARE
    wanted = limit_mib << 20
    if total is not None and wanted > total:
        raise ValueError(f"a KV pool of {limit_mib} MiB is more than the memory of {total >> 20} MiB")
    return wanted


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Bytes in all and bytes left: the least of the machine's and the control group's; None where neither is known."""
    machine = _meminfo(root)
    group_total = _number(root / "sys/fs/cgroup/memory.max")
    group_used = _number(root / "sys/fs/cgroup/memory.current")
    totals = [machine.get("MemTotal"), group_total]
    lefts = [
        machine.get("MemAvailable"),
        None if group_total is None or group_used is None else max(group_total - group_used, 0),
    ]
    return _least(totals), _least(lefts)


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    named = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(rest.split()[0]) << 10 for name, rest in named if rest.split() and rest.split()[0].isdigit()}


def _number(path: Path) -> int | None:
    """None for a file that is not there and for `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _least(numbers: list[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
