"""A bounded, closable queue between tasks of one loop (Python 3.11 has no `Queue.shutdown`).

A full channel makes its writers wait; a closed one refuses writers at once and lets readers take what is left.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """Nothing can be put any more, or, for a reader, nothing is left."""


class Channel(Generic[T]):
    """At most `max_items` wait in it. Items leave in the order in which they came in."""

    def __init__(self, max_items: int) -> None:
        if max_items < 1:
            raise ValueError("max_items must be at least 1")
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def put(self, item: T) -> None:
        """Waits for room. Raises ChannelClosed once the channel is closed, also when that happens during the wait."""
        while not self.try_put(item):
            if self._is_closed:
                raise ChannelClosed
            await _wait_turn(self._writers)

    def try_put(self, item: T) -> bool:
        """False, and nothing done, when the channel is full or closed."""
        if self._is_closed or len(self._items) >= self._max_items:
            return False
        self._items.append(item)
        _wake_first(self._readers)
        return True

    async def get(self) -> T:
        """Waits for an item. Raises ChannelClosed when the channel is closed and drained."""
        while not self._items:
            if self._is_closed:
                raise ChannelClosed
            await _wait_turn(self._readers)
        item = self._items.popleft()
        _wake_first(self._writers)
        return item

    def close(self) -> None:
        """No more items; a second call does nothing."""
        self._is_closed = True
        for waiters in (self._readers, self._writers):
            while waiters:
                _wake_first(waiters)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Ends when the channel is closed and drained."""
        while True:
            try:
                item = await self.get()
            except ChannelClosed:
                return
            yield item


async def _wait_turn(waiters: deque[asyncio.Future[None]]) -> None:
    waiter = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    except asyncio.CancelledError:
        if waiter.cancelled():
            if waiter in waiters:  # else it was passed over already
                waiters.remove(waiter)
        else:  # woken and cancelled at once: the turn belongs to the next one, or nobody would take it
            _wake_first(waiters)
        raise


def _wake_first(waiters: deque[asyncio.Future[None]]) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return
