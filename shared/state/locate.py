"""Where the active scheduler is: a fixed address, or the lease record in Redis."""

from shared.domain.errors import ErrorCode, ServingError
from shared.state.client import state_unavailable
from shared.state.leadership import Leadership, SchedulerLocation


class SchedulerLocator:
    """For gateways and workers. Exactly one of `leadership` and `fixed` must be given."""

    def __init__(self, leadership: Leadership | None, fixed: str | None) -> None:
        if (leadership is None) == (fixed is None):
            raise ValueError("give either a leadership or a fixed address")
        self._leadership = leadership
        self._fixed = fixed
        self._last_known: SchedulerLocation | None = None

    async def locate(self) -> str:
        """host:port. The last known one while Redis is away or holds no lease: dialling a dead scheduler does no harm.

        An answer that was slow names no scheduler that a later look has seen replaced.

        Raises ServingError STATE_UNAVAILABLE if none was ever known.
        """
        if self._leadership is None:
            assert self._fixed is not None
            return self._fixed
        try:
            location = await self._leadership.find()
        except ServingError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE or self._last_known is None:
                raise
            return self._last_known.address
        known = self._last_known
        if location is not None and (known is None or location.epoch >= known.epoch):
            self._last_known = location
        if self._last_known is None:
            raise state_unavailable()
        return self._last_known.address
