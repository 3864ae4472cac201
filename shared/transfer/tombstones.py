"""Memory of ended attempts that refuses whatever of them arrives late. Pure: the caller brings the time."""

from dataclasses import dataclass

from shared.domain.ids import RequestKey
from shared.domain.worker import NO_WORK, Work

LIFETIME_S = 60.0  # longer than any grace, retry or re-dial after which something of the attempt could still come
MAX_TOMBSTONES = 16_384  # 60 s at 270 ended attempts a second, far above what a worker does; about 5 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """`work`: what this worker had done for the attempt."""

    expires_at: float
    work: Work


class Tombstones:
    """At most `max_items`; the oldest goes first, which is safe: what it refused is then refused as unknown."""

    def __init__(self, *, lifetime_s: float = LIFETIME_S, max_items: int = MAX_TOMBSTONES) -> None:
        self._lifetime_s = lifetime_s
        self._max_items = max_items
        self._by_key: dict[RequestKey, Tombstone] = {}  # in the order of their expiry

    def __len__(self) -> int:
        return len(self._by_key)

    def bury(self, key: RequestKey, now: float, *, work: Work = NO_WORK) -> None:
        """Starts the lifetime, again where the attempt was buried before."""
        self._by_key.pop(key, None)
        self._by_key[key] = Tombstone(expires_at=now + self._lifetime_s, work=work)
        self._drop_old(now)

    def find(self, key: RequestKey, now: float) -> Tombstone | None:
        self._drop_old(now)
        return self._by_key.get(key)

    def keys(self, now: float) -> tuple[RequestKey, ...]:
        """The attempts that have ended within the lifetime, oldest first."""
        self._drop_old(now)
        return tuple(self._by_key)

    def _drop_old(self, now: float) -> None:
        while self._by_key:
            oldest = next(iter(self._by_key))
            if len(self._by_key) <= self._max_items and self._by_key[oldest].expires_at > now:
                return
            del self._by_key[oldest]
