"""Blocking work beside the loop."""

import threading

import pytest

from shared.aio.threads import in_passing_thread


async def test_the_thread_is_gone_afterwards() -> None:
    """What it was called with arrives, its result comes back, and no thread more is there than before."""
    before = set(threading.enumerate())
    seen: list[threading.Thread] = []

    def work(number: int, *, factor: int) -> int:
        seen.append(threading.current_thread())
        return number * factor

    assert 42 == await in_passing_thread(work, 6, factor=7)
    assert set(threading.enumerate()) <= before  # a thread of another test may end meanwhile
    assert not seen[0].is_alive()


async def test_what_it_raises_is_raised() -> None:
    """And the thread is gone then, too."""
    before = set(threading.enumerate())

    def fail() -> None:
        raise KeyError("no such model")

    with pytest.raises(KeyError, match="no such model"):
        await in_passing_thread(fail)
    assert set(threading.enumerate()) <= before  # a thread of another test may end meanwhile
