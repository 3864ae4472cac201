"""When a scheduler takes, keeps and loses the lease. Time comes from a clock, waiting is the caller's.

    STANDBY --(Redis reachable without a lease for 3 s)--> ACTIVE --(another holds it, or came after)--> LOST

Redis away: a standby starts its 3 s again when it is back; the active one goes on under its epoch and, at the first
renewal that gets through, has its lease again, even on an empty Redis.
"""

from enum import Enum, auto

from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, Incarnation
from shared.obs.logs import get_logger
from shared.state.leadership import Leadership

RENEW_INTERVAL_S = 1.0  # three chances within the lease's 3 s
# The active scheduler renews within a second of Redis coming back, so it is there before any standby (decisions §3).
ABSENT_WAIT_S = 3.0
LOOK_INTERVAL_S = 0.2

_log = get_logger("lease")


class LeaseState(Enum):
    """Of one scheduler. LOST is final: the process must end, others have a higher epoch."""

    STANDBY = auto()
    ACTIVE = auto()
    LOST = auto()


class LeaseKeeper:
    """Call `step` again and again, with the waits that it returns, until LOST or the end; then release the lease.

    `is_redis_reachable` is what the last step saw. `absent_wait_s` may be 0 only where no other scheduler can exist.
    """

    def __init__(
        self,
        leadership: Leadership,
        clock: Clock,
        *,
        holder: Incarnation,
        address: str,
        absent_wait_s: float = ABSENT_WAIT_S,
    ) -> None:
        self._leadership = leadership
        self._clock = clock
        self._holder = holder
        self._address = address
        self._absent_wait_s = absent_wait_s
        self._absent_since: float | None = None
        self.state = LeaseState.STANDBY
        self.epoch = Epoch(0)
        self.epoch_seen = Epoch(0)
        """The highest that a worker or gateway has reported, if it is above ours: goes back with the lease."""
        self.is_redis_reachable = False

    async def step(self) -> float:
        """One look or one renewal. Returns the seconds until the next one is due."""
        try:
            if self.state is LeaseState.STANDBY:
                await self._look()
            elif self.state is LeaseState.ACTIVE:
                await self._renew()
            self.is_redis_reachable = True
        except ServingError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
            self.is_redis_reachable = False
            self._absent_since = None
        return RENEW_INTERVAL_S if self.state is LeaseState.ACTIVE else LOOK_INTERVAL_S

    async def _look(self) -> None:
        if await self._leadership.find() is not None:
            self._absent_since = None
            return
        now = self._clock.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        if now - self._absent_since < self._absent_wait_s:
            return
        epoch = await self._leadership.acquire(self._holder, self._address)
        if epoch is None:  # another one was faster
            self._absent_since = None
            return
        self.epoch = epoch
        self.state = LeaseState.ACTIVE
        _log.info("lease taken", epoch=epoch)

    async def _renew(self) -> None:
        if not await self._leadership.renew():
            self.state = LeaseState.LOST
            _log.error("lease lost", epoch=self.epoch)
