"""The waiting queue: the one place where requests wait, bounded in requests and in prompt tokens, oldest first.

It knows nothing of workers. Order is the order of admission; a request that comes back (its reservation was refused)
takes its old place.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.domain.ids import RequestId, WorkerId
from shared.domain.worker import WorkerRef, num_tokens_at_start


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One waiting request. Mutable: placement leaves its memory here."""

    request_id: RequestId
    num_prompt_tokens: int
    max_total_tokens: int
    num_delivered: int = 0
    """Output tokens that its gateway holds."""
    order: int = 0
    is_written: bool = False
    """Its admitted record is in Redis: it may be placed."""
    passed_over_at: float | None = None
    """Since when younger requests have been placed before it."""
    held_pair: tuple[WorkerId, WorkerId] | None = None
    """Prefill and decode worker that are kept for it; see `scheduler.placement`."""
    refusals: dict[WorkerId, tuple[int, float]] = field(default_factory=dict[WorkerId, tuple[int, float]])
    """Decode workers that refused it: free blocks as they said then, and when."""
    avoided: set[WorkerRef] = field(default_factory=set[WorkerRef])
    """Workers on which an attempt of it has failed."""
    awaited_until: float | None = None
    """Adopted, and its gateway has not come back: until then nobody behind it is placed."""
    unservable_since: float | None = None
    asked_delivered_at: float | None = None
    """Since when its gateway has been asked what it holds; it is not placed before the answer."""
    told_position: int | None = None

    @property
    def is_placeable(self) -> bool:
        return self.is_written and self.asked_delivered_at is None

    @property
    def num_tokens_at_start(self) -> int:
        """What its sequence begins with at decode."""
        return num_tokens_at_start(self.num_prompt_tokens, self.num_delivered)


class Waiting:
    """Owner of the waiters. The bounds hold at admission; whoever comes back always finds room."""

    def __init__(self, *, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._waiters: list[Waiter] = []
        self._by_id: dict[RequestId, Waiter] = {}
        self._next_order = 1
        self._num_prompt_tokens = 0

    def can_admit(self, num_prompt_tokens: int) -> bool:
        """A prompt larger than the token bound is admitted to an empty queue only: it would never fit otherwise."""
        if len(self._waiters) >= self._max_requests:
            return False
        return not self._waiters or self._num_prompt_tokens + num_prompt_tokens <= self._max_prompt_tokens

    def admit(self, waiter: Waiter) -> None:
        """Put at the end. The caller has asked `can_admit`."""
        waiter.order = self._next_order
        self._next_order += 1
        self._insert(waiter)

    def put_back(self, waiter: Waiter) -> None:
        """Put where it was."""
        self._insert(waiter)

    def remove(self, request_id: RequestId) -> Waiter | None:
        """Take out; None where it does not wait."""
        waiter = self._by_id.pop(request_id, None)
        if waiter is None:
            return None
        del self._waiters[self._index(waiter)]
        self._num_prompt_tokens -= waiter.num_prompt_tokens
        return waiter

    def get(self, request_id: RequestId) -> Waiter | None:
        return self._by_id.get(request_id)

    def position(self, request_id: RequestId) -> int:
        """Requests in front of it; 0 where it does not wait."""
        waiter = self._by_id.get(request_id)
        return 0 if waiter is None else self._index(waiter)

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Oldest first, over a copy: taking out while iterating is fine."""
        return iter(tuple(self._waiters))

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    def check(self) -> None:
        """Raises AssertionError where the counts or the order are wrong."""
        orders = [waiter.order for waiter in self._waiters]
        assert orders == sorted(set(orders)), "order of admission"
        assert {waiter.request_id for waiter in self._waiters} == set(self._by_id), "index"
        assert sum(waiter.num_prompt_tokens for waiter in self._waiters) == self._num_prompt_tokens, "token count"

    def _insert(self, waiter: Waiter) -> None:
        if waiter.request_id in self._by_id:
            raise ValueError(f"{waiter.request_id} waits already")
        insort(self._waiters, waiter, key=lambda each: each.order)
        self._by_id[waiter.request_id] = waiter
        self._num_prompt_tokens += waiter.num_prompt_tokens

    def _index(self, waiter: Waiter) -> int:
        return bisect_left(self._waiters, waiter.order, key=lambda each: each.order)
