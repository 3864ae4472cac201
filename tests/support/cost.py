"""What a call costs, without a clock: lines of Python, and memory at its peak (numpy's temporary arrays included)."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one call, everything that it calls in Python included."""

    num_lines: int
    peak_bytes: int


def cost_of(call: Callable[[], None]) -> Cost:
    """Runs it twice: once counting lines, once watching memory. Without the collector, which runs others' finalisers."""
    gc.collect()
    gc.disable()
    try:
        return _cost_of(call)
    finally:
        gc.enable()


def _cost_of(call: Callable[[], None]) -> Cost:
    num_lines = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Cost(num_lines=num_lines, peak_bytes=peak - held)
