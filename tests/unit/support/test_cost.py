"""Tests of `tests.support.cost`."""

import numpy as np

from tests.support.cost import cost_of


def test_lines_and_memory_are_those_of_the_call() -> None:
    """A loop twice as long runs twice its lines; an array shows in the memory though it is gone at the end."""

    def loop(count: int) -> None:
        for _ in range(count):
            pass

    short, long = cost_of(lambda: loop(100)), cost_of(lambda: loop(200))
    array = cost_of(lambda: np.zeros(1_000_000, dtype=np.uint8).fill(1))

    assert 200 == long.num_lines - short.num_lines
    assert short.peak_bytes < 10_000 < 1_000_000 <= array.peak_bytes < 1_010_000
