"""How many failed attempts may be tried again: a share of what was admitted lately, and a few more. Pure.

Each retry computes a prompt once more. Where attempts fail because the system is in trouble, retries of all of them
would double or triple the load on what is left of it; with a budget they add a fifth. Precedents: Envoy's retry budgets
(20 % of the requests under way, at least 3), Finagle's and Linkerd's (20 % over 10 s, and 10 a second).

Losses of workers are not counted: a worker takes everything with it that it held, which may be half of what runs, and
all of it is to go on elsewhere. What bounds them is that no request survives a second one (see `RetryRule`).
"""

from collections import deque


class RetryBudget:
    """The caller brings the time, which never goes back. Kept by the second: the memory is the window's."""

    def __init__(self, *, share: float, floor: int, window_s: float) -> None:
        self._share = share
        self._floor = floor
        self._window_s = window_s
        self._admitted: deque[list[int]] = deque()  # [second, count], oldest first
        self._taken: deque[list[int]] = deque()

    def admitted(self, now: float) -> None:
        """One request more."""
        _count(self._admitted, now)

    def has_room(self, now: float) -> bool:
        """Whether one more attempt may be tried again now."""
        limit = self._floor + self._share * self._num_lately(self._admitted, now)
        return self._num_lately(self._taken, now) + 1 <= limit

    def take(self, now: float) -> None:
        """One attempt is tried again."""
        _count(self._taken, now)

    def _num_lately(self, counts: deque[list[int]], now: float) -> int:
        while counts and counts[0][0] <= now - self._window_s:
            counts.popleft()
        return sum(count for _, count in counts)


def _count(counts: deque[list[int]], now: float) -> None:
    second = int(now)
    if counts and counts[-1][0] >= second:
        counts[-1][1] += 1
    else:
        counts.append([second, 1])
