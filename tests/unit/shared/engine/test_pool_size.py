"""Tests of `shared.engine.pool_size`."""

from pathlib import Path

import pytest

from shared.engine.pool_size import pool_bytes

MIB = 1 << 20


def _machine(
    root: Path,
    *,
    total_mib: int | None = 8192,
    left_mib: int | None = 4096,
    group_max: str | None = None,
    group_used_mib: int = 100,
) -> Path:
    """A folder that looks like the root of a machine."""
    (root / "proc").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    lines = ["HugePages_Total:       0", "strange"]
    if total_mib is not None:
        lines.append(f"MemTotal:       {total_mib * 1024} kB")
    if left_mib is not None:
        lines.append(f"MemAvailable:   {left_mib * 1024} kB")
    (root / "proc/meminfo").write_text("\n".join(lines))
    if group_max is not None:
        (root / "sys/fs/cgroup/memory.max").write_text(f"{group_max}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{group_used_mib * MIB}\n")
    return root


@pytest.mark.parametrize("limit_mib", [1, 512, 8192])
def test_a_limit_is_taken_as_it_is(tmp_path: Path, limit_mib: int) -> None:
    """Up to all the memory there is; what others use at the moment does not matter."""
    assert limit_mib * MIB == pool_bytes(limit_mib, root=_machine(tmp_path))


def test_without_a_limit_it_is_a_quarter_of_what_is_left(tmp_path: Path) -> None:
    """A control group without a limit changes nothing."""
    assert 1024 * MIB == pool_bytes(0, root=_machine(tmp_path, group_max="max"))


def test_a_control_group_counts_where_it_has_less(tmp_path: Path) -> None:
    """2,100 MiB of which 100 are used; and one that is full leaves nothing."""
    assert 500 * MIB == pool_bytes(0, root=_machine(tmp_path / "a", group_max=str(2100 * MIB)))
    assert 0 == pool_bytes(0, root=_machine(tmp_path / "b", group_max=str(50 * MIB)))


@pytest.mark.parametrize(("group_max", "total"), [(None, 8192), (str(2048 * MIB), 2048)])
def test_more_than_there_is_is_refused(tmp_path: Path, group_max: str | None, total: int) -> None:
    """With both numbers, at the start, and not by the kernel later."""
    root = _machine(tmp_path, group_max=group_max)
    with pytest.raises(ValueError, match=f"8193 MiB is more than the memory of {total} MiB"):
        pool_bytes(8193, root=root)


def test_a_system_that_tells_nothing_needs_a_limit(tmp_path: Path) -> None:
    """Then any is taken."""
    assert 512 * MIB == pool_bytes(512, root=tmp_path)
    with pytest.raises(ValueError, match="give the size"):
        pool_bytes(0, root=tmp_path)
