"""A clock that stands still until a test moves it."""


class HandClock:
    """Monotonic and wall clock together."""

    def __init__(self, *, monotonic: float = 1000.0, unix_ms: int = 1_800_000_000_000) -> None:
        self._monotonic = monotonic
        self._unix_ms = unix_ms

    def monotonic(self) -> float:
        return self._monotonic

    def unix_ms(self) -> int:
        return self._unix_ms

    def advance(self, seconds: float) -> None:
        """Both move on."""
        self._monotonic += seconds
        self._unix_ms += round(seconds * 1000)

    def set_wall_clock(self, unix_ms: int) -> None:
        """Only the wall clock jumps, as real ones do."""
        self._unix_ms = unix_ms
