"""Requests that came before the first workers, or beside a slow Redis: held for a moment instead of refused.

A scheduler that has just started knows no worker for a second or three, while all of them dial it, and so do all
gateways: Redis may well miss its time then. Whoever is held here is not admitted: no record, no place in the queue, no
`Queued` (so its gateway can still answer with a status).
"""

from collections.abc import Iterator

from scheduler.messages import StartReceived, StreamId
from shared.domain.ids import RequestId


class Lobby:
    """Open for `hold_s` after the first look at the time, for at most `max_requests`."""

    def __init__(self, *, hold_s: float, max_requests: int) -> None:
        self._hold_s = hold_s
        self._max_requests = max_requests
        self._opened_at: float | None = None
        self._starts: dict[RequestId, StartReceived] = {}

    def is_open(self, now: float) -> bool:
        return self.age_s(now) < self._hold_s

    def age_s(self, now: float) -> float:
        """Since the first look."""
        if self._opened_at is None:
            self._opened_at = now
        return now - self._opened_at

    def hold(self, start: StartReceived) -> bool:
        """False where it is full. A second Start of a request takes the place of the first."""
        if start.spec.request_id not in self._starts and len(self._starts) >= self._max_requests:
            return False
        self._starts[start.spec.request_id] = start
        return True

    def take(self, request_id: RequestId) -> StartReceived | None:
        """Out of the lobby; None where it is not there."""
        return self._starts.pop(request_id, None)

    def drop(self, stream: StreamId) -> None:
        """Its gateway has gone."""
        for request_id, start in self._starts.items():
            if start.stream == stream:
                del self._starts[request_id]
                return

    def get(self, request_id: RequestId) -> StartReceived | None:
        return self._starts.get(request_id)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[StartReceived]:
        """Over a copy: taking out while iterating is fine. In the order of their ids, which tell when they were asked:
        those of an earlier scheduler's queue may have come in any.
        """
        return iter([self._starts[request_id] for request_id in sorted(self._starts)])
