"""Who holds blocks and a place on this worker, until when, and who has ended. Pure: the caller brings the time.

A reservation that is not committed is a lease: it ends by itself when its transfer has given no sign for `lease_s`.
Blocks go back here and nowhere else, and only by a call that says that no copy and no step can touch them any more.
"""

from dataclasses import dataclass

from shared.domain.ids import BlockId, RequestKey, TransferId
from shared.kv.block_pool import BlockPool
from shared.transfer.tombstones import Tombstone, Tombstones

LEASE_S = 10.0  # ten of prefill's keep-alives: a worker that is gone costs its peers this long at most


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks for prompt and answer, held for one transfer."""

    key: RequestKey
    transfer_id: TransferId
    attach_ticket: bytes
    blocks: tuple[BlockId, ...]
    last_sign_at: float
    is_committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Not now: `free_blocks` is 0 where places, not blocks, have run out."""

    needed_blocks: int
    free_blocks: int


class Reservations:
    """The holders of blocks by (request, attempt), at most `max_sequences`, and the tombstones of those that ended."""

    def __init__(
        self, *, pool: BlockPool, max_sequences: int, lease_s: float = LEASE_S, tombstones: Tombstones | None = None
    ) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self._lease_s = lease_s
        self._held: dict[RequestKey, Reservation] = {}
        self._tombstones = tombstones or Tombstones()

    def __len__(self) -> int:
        """Holders of blocks."""
        return len(self._held)

    def find(self, key: RequestKey) -> Reservation | None:
        return self._held.get(key)

    def grant(
        self, key: RequestKey, *, num_blocks: int, transfer_id: TransferId, attach_ticket: bytes, now: float
    ) -> Reservation | Refusal:
        """Takes the blocks, all or none. Raises ValueError for a pair that holds some or has ended: ask first."""
        if key in self._held or self.has_ended(key, now):
            raise ValueError(f"{key} is not new")
        if len(self._held) >= self._max_sequences:
            return Refusal(needed_blocks=num_blocks, free_blocks=0)
        blocks = self._pool.reserve(num_blocks)
        if blocks is None:
            return Refusal(needed_blocks=num_blocks, free_blocks=self._pool.num_free)
        reservation = Reservation(
            key=key, transfer_id=transfer_id, attach_ticket=attach_ticket, blocks=blocks, last_sign_at=now
        )
        self._held[key] = reservation
        return reservation

    def sign(self, key: RequestKey, now: float) -> None:
        """Something of the transfer arrived: the lease runs anew."""
        reservation = self._held.get(key)
        if reservation is not None:
            reservation.last_sign_at = max(reservation.last_sign_at, now)

    def commit(self, key: RequestKey) -> None:
        """The lease becomes possession. Raises KeyError where nothing is held, ValueError the second time."""
        reservation = self._held[key]
        if reservation.is_committed:
            raise ValueError(f"{key} is committed already")
        self._pool.activate(reservation.blocks)
        reservation.is_committed = True

    def expired(self, now: float) -> tuple[RequestKey, ...]:
        """Leases that have run out; they hold their blocks until `free`."""
        return tuple(
            key
            for key, held in self._held.items()
            if not held.is_committed and now - held.last_sign_at >= self._lease_s
        )

    def free(self, key: RequestKey) -> int:
        """Gives the blocks back and says how many; 0 where nothing is held. Nothing may touch them any more."""
        reservation = self._held.pop(key, None)
        return 0 if reservation is None else self._pool.free(reservation.blocks)

    def bury(self, key: RequestKey, now: float, *, computed_tokens: int = 0) -> None:
        """The attempt has ended here: what arrives late of it is refused. Raises ValueError while it holds blocks."""
        if key in self._held:
            raise ValueError(f"{key} still holds blocks")
        self._tombstones.bury(key, now, computed_tokens=computed_tokens)

    def tombstone(self, key: RequestKey, now: float) -> Tombstone | None:
        return self._tombstones.find(key, now)

    def has_ended(self, key: RequestKey, now: float) -> bool:
        return self._tombstones.find(key, now) is not None

    def ended(self, now: float) -> tuple[RequestKey, ...]:
        """The ends of the last 60 s."""
        return self._tombstones.keys(now)
