"""How long to wait before the next try. Pure: randomness is handed in, waiting is the caller's."""

from collections.abc import Callable


class Backoff:
    """Doubles from `initial_s` up to `max_s`; each delay is drawn from its upper half, so that peers spread out.

    `random` returns a number in [0, 1), for example `random.random`.
    """

    def __init__(self, *, initial_s: float, max_s: float, random: Callable[[], float]) -> None:
        if not 0 < initial_s <= max_s:
            raise ValueError("initial_s must be above 0 and at most max_s")
        self._initial_s = initial_s
        self._max_s = max_s
        self._random = random
        self._bound_s = initial_s

    def next_delay(self) -> float:
        """Seconds; raises the bound for the next call."""
        delay = self._bound_s * (0.5 + 0.5 * self._random())
        self._bound_s = min(self._bound_s * 2, self._max_s)
        return delay

    def reset(self) -> None:
        """After a success: the next delay is a short one again."""
        self._bound_s = self._initial_s
