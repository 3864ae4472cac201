"""Kernels compiled ahead: preparation compiles, services load.

One compilation serves all models, modes and cache types. It is kept below the user's home, in a folder named by what
it depends on: the kernels' sources, numba, llvmlite and the CPU.
"""

import hashlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import llvmlite  # pyright: ignore[reportMissingTypeStubs]
import numba
from numba.core import config as _numba_config

from shared.model.kernels.cpu.step import STEP, run
from shared.model.kernels.cpu.vectors import has_avx2

_SOURCES = Path(__file__).parent
_NOT_COMPILED = {"__init__.py", "model.py", "warm.py"}
_HOME = Path("~/.firsttoken/kernels")
_MOST_VERSIONS = 8
"""Folders kept, 1 MB each: several checkouts and environments side by side; the oldest go when one is added."""

_types = cast("Any", numba.types)
_INT_TABLE = _types.Array(_types.int64, 2, "C")
_SIGNATURE = (
    _types.int64,
    _types.Array(cast("Any", numba).from_dtype(STEP), 1, "C"),
    _INT_TABLE,
    _INT_TABLE,
    _types.int64,
)


def cache_folder() -> Path:
    """Where this version's kernels for this machine are kept; numba tells CPUs apart inside it by itself too."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(each for each in _SOURCES.glob("*.py") if each.name not in _NOT_COMPILED):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(f"{numba.__version__} {cast('Any', llvmlite).__version__} {has_avx2()} {platform.machine()}".encode())
    return _HOME.expanduser() / digest.hexdigest()


def load_kernels(report: Callable[[str], None] | None = None) -> Any:
    """The compiled step, from the cache; compiles it where it is not there (told to `report`; tens of seconds).

    Once a process, a second call returns at once. OSError when the cache's folder cannot be written.
    """
    if run.signatures:
        return run
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    _drop_old(folder.parent)
    if report is not None and not any(folder.rglob("*.nbc")):
        report("compiling kernels for this machine, once (up to a minute)")
    # numba asks for the folder when caching is switched on, not when it compiles.
    cast("Any", _numba_config).CACHE_DIR = str(folder)
    run.enable_caching()
    run.compile(_SIGNATURE)
    return run


def _drop_old(versions: Path) -> None:
    """A process that has loaded its kernels needs their files no more."""
    by_age = sorted(versions.iterdir(), key=_changed_at, reverse=True)
    for old in by_age[_MOST_VERSIONS:]:
        shutil.rmtree(old, ignore_errors=True)


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process that starts now has dropped it
        return 0.0


def num_compiled() -> int:
    """Compilations that this process had to do itself."""
    return sum(cast("dict[Any, int]", run.stats.cache_misses).values())
