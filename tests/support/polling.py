"""The one way in which a test waits for another process: it looks until something holds, within a stated time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.02


async def eventually(probe: Callable[[], Awaitable[T]], holds: Callable[[T], bool], *, within_s: float, what: str) -> T:
    """The first value of `probe` for which `holds` is true. Raises AssertionError, with the last value, after `within_s`.

    A probe that raises OSError or LookupError counts as not holding: what it asks for may be on its way down or up.
    """
    clock = asyncio.get_running_loop()
    deadline = clock.time() + within_s
    last: object = None
    while True:
        try:
            last = value = await probe()
            if holds(value):
                return value
        except (OSError, EOFError, LookupError) as error:
            last = error
        if clock.time() >= deadline:
            raise AssertionError(f"not within {within_s} s: {what}; last seen: {last!r}")
        await asyncio.sleep(INTERVAL_S)
