"""The one thread of a worker that touches KV bytes outside its engine's steps."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Copier:
    """Runs pieces of work in order, one at a time. Each transfer has at most one in it, which bounds its queue."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """A future of the running loop. Cancelling it does not stop work that has begun: shield it if so."""
        return asyncio.wrap_future(self._thread.submit(work))

    def close(self) -> None:
        """Returns when the work at hand has; what waits is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
