"""The scheduler's lease in Redis: who is the active one, where it is reached, under which epoch.

Every step is one script. When to take the lease is `LeaseKeeper`'s business (lease.py).
"""

from dataclasses import dataclass

from shared.domain.clock import Clock
from shared.domain.ids import Epoch, Incarnation
from shared.state.client import Script, StateClient
from shared.state.keys import EPOCH, EPOCH_TTL_MS, LEASE, LEASE_TTL_MS

_ACQUIRE = Script("acquire_lease", LEASE, EPOCH)
_RENEW = Script("renew_lease", LEASE, EPOCH)
_RELEASE = Script("release_lease", LEASE, EPOCH)
NO_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLocation:
    """The active scheduler: host:port of its gRPC server, and its epoch."""

    address: str
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    holder: Incarnation
    address: str
    epoch: Epoch


class Leadership:
    """Methods raise ServingError STATE_UNAVAILABLE when Redis is away; what is held then stays held."""

    def __init__(self, client: StateClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._lease: _Lease | None = None

    async def acquire(self, holder: Incarnation, address: str) -> Epoch | None:
        """Takes the lease for 3 s under a higher epoch than any before; None if another holds it."""
        reply = await self._client.run(
            _ACQUIRE,
            [holder, address, self._clock.unix_ms(), LEASE_TTL_MS, EPOCH_TTL_MS],
        )
        if not reply:
            return None
        self._lease = _Lease(holder=holder, address=address, epoch=Epoch(int(reply)))
        return self._lease.epoch

    async def renew(self) -> bool:
        """For 3 s more under the same epoch, also on a Redis that came back empty. False: it is lost for good."""
        if self._lease is None:
            return False
        reply = await self._client.run(
            _RENEW,
            [self._lease.holder, self._lease.address, self._lease.epoch, LEASE_TTL_MS, EPOCH_TTL_MS],
        )
        if reply != 1:
            self._lease = None
        return reply == 1

    async def release(self, epoch_seen: Epoch = NO_EPOCH) -> None:
        """Gives the lease back so that a standby need not wait for its end. Nothing happens if it is not held.

        The next one, perhaps this process started again, gets an epoch above `epoch_seen`: what workers have seen is
        known to a Redis that was emptied, too.
        """
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._client.run(_RELEASE, [lease.holder, epoch_seen, EPOCH_TTL_MS])

    async def find(self) -> SchedulerLocation | None:
        """The active scheduler; None if there is none now."""
        address, epoch = await self._client.call("HMGET", LEASE, "address", "epoch")
        if address is None or epoch is None:
            return None
        try:
            return SchedulerLocation(address=address.decode(), epoch=Epoch(int(epoch)))
        except ValueError:  # no scheduler of ours wrote it
            return None
