"""Who holds blocks and a place on this worker, until when, and who has ended. Pure: the caller brings the time.

A reservation that is not committed is a lease: it ends by itself when its transfer has given no sign for `lease_s`.
Blocks go back here and nowhere else, and only by a call that says that no copy and no step can touch them any more.
Blocks of the prefix cache that hold the beginning of a prompt are shared, and read only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.domain.ids import BlockId, RequestKey, TokenId, TransferId
from shared.domain.request import RequestSpec
from shared.domain.worker import NO_WORK, Work
from shared.kv.block_pool import BlockPool
from shared.kv.prefix_cache import PrefixCache
from shared.transfer.tombstones import Tombstones

LEASE_S = 10.0  # ten of prefill's keep-alives: a worker that is gone costs its peers this long at most


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks held for one attempt, in the order of its tokens; the first `num_shared` were computed for others."""

    key: RequestKey
    transfer_id: TransferId
    attach_ticket: bytes
    blocks: tuple[BlockId, ...]
    num_shared: int
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
        self,
        *,
        pool: BlockPool,
        block_size: int,
        max_sequences: int,
        lease_s: float = LEASE_S,
        tombstones: Tombstones | None = None,
    ) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool, block_size)
        self._max_sequences = max_sequences
        self._lease_s = lease_s
        self._held: dict[RequestKey, Reservation] = {}
        self._tombstones = tombstones or Tombstones()

    def __len__(self) -> int:
        """Holders of blocks."""
        return len(self._held)

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_available

    def take_evictions(self) -> int:
        """Cached blocks that gave way since the last call."""
        return self._cache.take_evictions()

    def find(self, key: RequestKey) -> Reservation | None:
        return self._held.get(key)

    def holders(self) -> tuple[RequestKey, ...]:
        """Who holds blocks, oldest reservation first."""
        return tuple(self._held)

    def grant(
        self,
        key: RequestKey,
        spec: RequestSpec,
        *,
        num_blocks: int,
        num_kept: int = 0,
        transfer_id: TransferId,
        attach_ticket: bytes,
        now: float,
    ) -> Reservation | Refusal:
        """Takes `num_blocks`, all or none, so that `num_kept` stay available; those with the prompt's KV come first.

        Raises ValueError for a pair that holds some or has ended: ask first.
        """
        if key in self._held or self.has_ended(key, now):
            raise ValueError(f"{key} is not new")
        if len(self._held) >= self._max_sequences:
            return Refusal(needed_blocks=num_blocks, free_blocks=0)
        shared = self._cache.match(spec.prompt_ids, salt=spec.kv_salt, max_tokens=spec.num_prompt_tokens)
        num_new = num_blocks - len(shared)
        blocks = None if num_new + num_kept > self._pool.num_available else self._pool.reserve(num_new)
        if blocks is None:
            self._pool.free(shared)
            return Refusal(needed_blocks=num_blocks, free_blocks=self._pool.num_available)
        reservation = Reservation(
            key=key,
            transfer_id=transfer_id,
            attach_ticket=attach_ticket,
            blocks=shared + blocks,
            num_shared=len(shared),
            last_sign_at=now,
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
        self._pool.activate(reservation.blocks[reservation.num_shared :])
        reservation.is_committed = True

    def grow(self, key: RequestKey, num_blocks: int) -> tuple[BlockId, ...] | None:
        """More blocks for a committed sequence; all that it holds then, or None where there are too few."""
        reservation = self._held[key]
        if not reservation.is_committed:
            raise ValueError(f"{key} is not committed")
        blocks = self._pool.reserve(num_blocks)
        if blocks is None:
            return None
        self._pool.activate(blocks)
        reservation.blocks += blocks
        return reservation.blocks

    def publish(self, key: RequestKey, token_ids: Sequence[TokenId], *, salt: int) -> None:
        """The first blocks of a committed sequence hold these tokens: whoever begins with them may share the blocks.

        Nothing happens where nothing is held any more.
        """
        reservation = self._held.get(key)
        if reservation is not None:
            self._cache.insert(token_ids, salt=salt, block_ids=reservation.blocks)

    def withdraw(self, key: RequestKey) -> None:
        """The KV in the blocks of a committed sequence is wrong: nobody else may begin with them."""
        self._cache.withdraw(self._held[key].blocks)

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

    def bury(self, key: RequestKey, now: float, *, work: Work = NO_WORK) -> None:
        """The attempt has ended here: what arrives late of it is refused. Raises ValueError while it holds blocks."""
        if key in self._held:
            raise ValueError(f"{key} still holds blocks")
        self._tombstones.bury(key, now, work=work)

    def bury_unknown(self, key: RequestKey, now: float) -> Work:
        """What arrives of an attempt that is not here is refused from now on. The work of one that was."""
        tombstone = self._tombstones.find(key, now)
        if tombstone is None:
            self.bury(key, now)
        return NO_WORK if tombstone is None else tombstone.work

    def has_ended(self, key: RequestKey, now: float) -> bool:
        return self._tombstones.find(key, now) is not None

    def ended(self, now: float) -> tuple[RequestKey, ...]:
        """The ends of the last 60 s."""
        return self._tombstones.keys(now)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, prefix index and holders agree."""
        self._cache.check_integrity()
        num_held = sum(len(held.blocks) for held in self._held.values())
        if num_held < self._pool.num_blocks - self._pool.num_available:
            raise AssertionError("a block is held by nobody that is known")
