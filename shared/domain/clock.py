"""Time as an argument. The real clock is made in `shared.process`; tests hand in one that jumps."""

from typing import Protocol


class Clock(Protocol):
    """Inside the system time is monotonic; wall clock appears in Redis and logs only."""

    def monotonic(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    def unix_ms(self) -> int:
        """Wall clock in milliseconds."""
        ...
