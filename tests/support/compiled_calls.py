"""A micro-kernel or a selected one called from Python."""

from typing import Any, cast

import numba


def call(kernel: Any, *arguments: Any, number: int | None = None) -> None:
    """`kernel((arguments))`, or `kernel(number, (arguments))`; arrays are given by their address."""
    values = tuple(each if isinstance(each, int | float) else int(each.ctypes.data) for each in arguments)

    def run(given: Any) -> None:
        kernel(given)

    def run_selected(given: Any) -> None:
        kernel(number, given)

    cast("Any", numba).njit(run if number is None else run_selected)(values)
