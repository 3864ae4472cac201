"""Compiled kernels are loaded from the cache by every process after the first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.model.kernels.cpu import warm
from shared.model.kernels.cpu.warm import cache_folder, load_kernels

_PROGRAM = """
import sys
from shared.model.kernels.cpu.warm import load_kernels, num_compiled
told = []
load_kernels(told.append)
print(told, num_compiled(), "torch" in sys.modules)
"""


@pytest.mark.timeout(300)  # the first run on a machine compiles the kernels
def test_a_second_process_compiles_nothing() -> None:
    """It says nothing of compiling, numba has not compiled, and torch is not loaded."""
    load_kernels()
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=250)
    assert result.stdout.split("\n")[0] == "[] 0 False"


def test_once_a_process() -> None:
    """A second call gives the same function, and the folder is named by sources and machine alone."""
    assert load_kernels() is load_kernels()
    assert cache_folder() == cache_folder()
    assert any(cache_folder().rglob("*.nbc"))


def test_old_versions_go_also_while_others_drop_them(tmp_path: Path) -> None:
    """The newest stay. One that is gone between the list and the look at it ends no start of a worker."""
    for age in range(12):
        (tmp_path / str(age)).mkdir()
        os.utime(tmp_path / str(age), (1000 - age, 1000 - age))
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")  # listed, and then not there
    warm._drop_old(tmp_path)  # pyright: ignore[reportPrivateUsage]
    assert {str(age) for age in range(8)} == {each.name for each in tmp_path.iterdir() if each.exists()}
