"""How kernels are compiled: without the interpreter's lock, and with no licence to reorder sums.

Floating-point operations stay as written: no fast-math. Division by zero gives infinity, as in numpy, instead of an
exception that every division would have to test for.
"""

from collections.abc import Callable
from typing import Any, cast

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """The function for calls from compiled code; `warm` keeps on disk what is called from Python."""
    return cast("Any", numba).njit(**_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """The same, made part of each caller. For what calls large kernels: LLVM goes through those again in every caller.

    Without it compiling the step takes four times as long.
    """
    return cast("Any", numba).njit(inline="always", **_OPTIONS)(function)
