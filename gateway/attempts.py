"""Which attempt of a request counts: the place where its tokens are to be had next, and what the scheduler asks.

An attempt is closed by the scheduler's Requeued, by a newer place, or by its reader; nothing more is taken of it then.
"""

import asyncio

from gateway.clients.scheduler import Placed, Requeued
from shared.domain.ids import Attempt


class Attempts:
    """Told by the control line, read by the relay. `changed` is set by whatever may let the relay go on."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.question: Requeued | None = None
        """Not answered yet; told again on each new control stream until it is."""
        self._place: Placed | None = None
        self._closed = Attempt(0)

    @property
    def last_seen(self) -> Attempt:
        return max(self._closed, self._place.attempt if self._place else Attempt(0))

    @property
    def last_closed(self) -> Attempt:
        return self._closed

    @property
    def next_place(self) -> Placed | None:
        """Of an attempt that is not closed."""
        return self._place if self._place is not None and not self.is_closed(self._place.attempt) else None

    def is_closed(self, attempt: Attempt) -> bool:
        return attempt <= self._closed

    def placed(self, place: Placed) -> bool:
        """False where it was told before: the same place is told again on each new control stream."""
        if place.attempt <= self.last_seen:
            return False
        self.close(Attempt(place.attempt - 1))
        self._place = place
        return True

    def requeued(self, question: Requeued) -> None:
        self.question = question
        self.close(question.attempt)

    def close(self, attempt: Attempt) -> None:
        """With all before it."""
        self._closed = max(self._closed, attempt)
        self.changed.set()
