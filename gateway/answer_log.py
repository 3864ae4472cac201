"""One answer's log, as its session writes it: tokens before their text is shown, the end before it is told.

Redis may be away: the answer goes on, and the whole log is written when Redis is back. For a while decode keeps what
Redis lacks, so that another gateway which Redis answers can go on; longer than that, or further than decode has room
for beside what it computes, and the answer is one that cannot be resumed until the log is whole again.
"""

import asyncio
import random
from collections.abc import Callable

from gateway.clients.tokens import TokensArrived
from shared.aio.backoff import Backoff
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, TokenId
from shared.domain.logged import LoggedTokens, LogHead
from shared.domain.request import Outcome, RequestSpec
from shared.domain.sampling import TokenLogprobs
from shared.state.stream_log import FIRST_SESSION, LoggedAnswer, LogMissing, StreamLog

# A store that stood still, a broken connection, a restart on the same machine are over by then. Less than what a
# session whose client has everything waits for its outcome (5 s).
HOLD_S = 3.0
# Half of what decode keeps for a reader (256): an answer does not stand still because its log is behind.
MAX_HELD_TOKENS = 128


class AnswerLog:
    """Nothing raises. That a newer session has the answer is told by `on_superseded`, perhaps more than once; that
    `secured` has grown without an append, by `on_secured`.
    """

    def __init__(
        self,
        store: StreamLog,
        *,
        key_hash: str,
        served: bytes,
        deadline_unix_ms: int = 0,
        logged: LoggedAnswer | None,
        on_superseded: Callable[[], None],
        on_secured: Callable[[], None],
    ) -> None:
        """`deadline_unix_ms` of a new answer, 0 = none; `logged`: what this session has taken over."""
        self._store = store
        self._key_hash = key_hash
        self._served = served
        self._deadline_unix_ms = deadline_unix_ms
        self._on_superseded = on_superseded
        self._on_secured = on_secured
        self.session = FIRST_SESSION if logged is None else logged.session
        self._head = None if logged is None else logged.head
        self._ids: list[TokenId] = [] if logged is None else list(logged.tokens.ids)
        self._logprobs: list[TokenLogprobs] = [] if logged is None else list(logged.tokens.logprobs)
        self._attempt = Attempt(0) if logged is None else logged.tokens.attempt
        self._cached_tokens = 0 if logged is None else logged.tokens.cached_tokens
        self._num_stored = len(self._ids)
        self._behind = asyncio.Event()
        self._is_holding = True  # while behind

    @property
    def is_behind(self) -> bool:
        """Redis lacks some of it: nobody may take over now."""
        return self._behind.is_set()

    @property
    def last_attempt(self) -> Attempt:
        """Of which tokens are logged."""
        return self._attempt

    def tokens_behind(self, num_tokens: int) -> tuple[list[TokenId], list[TokenLogprobs]]:
        """What is logged of the answer beyond its first `num_tokens`."""
        return self._ids[num_tokens:], self._logprobs[num_tokens:]

    def secured(self, index: int) -> int:
        """How many of the answer's first `index` tokens nobody need keep for a reader at another gateway."""
        is_held = self.is_behind and self._is_holding and index - self._num_stored <= MAX_HELD_TOKENS
        return min(index, self._num_stored) if is_held else index

    async def begin(self, spec: RequestSpec) -> None:
        """Before the scheduler hears of the request. Nothing is written where the log was taken over."""
        if self._head is None:
            self._head = LogHead(
                spec=spec,
                key_hash=self._key_hash,
                served=self._served,
                deadline_unix_ms=self._deadline_unix_ms,
            )
            self._behind.set()
            await self._catch_up()

    async def append(self, arrived: TokensArrived, *, attempt: Attempt) -> None:
        """Returns when they are in Redis, or Redis is known to be away."""
        first_index = len(self._ids) + 1
        if first_index == 1:
            self._cached_tokens = arrived.cached_tokens
        self._ids += arrived.ids
        self._logprobs += arrived.logprobs
        self._attempt = attempt
        if self._head is None or self.is_behind:
            return
        tokens = LoggedTokens(
            first_index=first_index,
            ids=arrived.ids,
            logprobs=arrived.logprobs,
            attempt=attempt,
            cached_tokens=arrived.cached_tokens,
        )
        try:
            await self._store.append(self._head.spec.request_id, self.session, tokens)
        except LogMissing:
            self._behind.set()
            await self._catch_up()
        except ServingError as error:
            self._fail(error)
        else:
            self._num_stored = tokens.last_index

    async def end(self, outcome: Outcome) -> None:
        """How the answer ends, unless that is there already."""
        if self._head is None or (self.is_behind and not await self._catch_up()):
            return
        for _ in range(2):  # once more where the log had to be written again
            try:
                await self._store.end(self._head.spec.request_id, self.session, len(self._ids), outcome)
            except LogMissing:
                self._behind.set()
                if not await self._catch_up():
                    return
            except ServingError as error:
                self._fail(error)
                return
            else:
                return

    async def keep_whole(self) -> None:
        """Runs beside the session: writes the log again when Redis is back."""
        backoff = Backoff(initial_s=0.1, max_s=1.0, random=random.random)
        while True:
            await self._behind.wait()
            timer = asyncio.get_running_loop().call_later(HOLD_S, self._hold_no_longer)
            try:
                while self.is_behind:
                    await asyncio.sleep(backoff.next_delay())
                    await self._catch_up()
            finally:
                timer.cancel()
            backoff.reset()
            self._is_holding = True

    def _hold_no_longer(self) -> None:
        self._is_holding = False
        self._on_secured()

    async def _catch_up(self) -> bool:
        """Writes the whole log, once. False where Redis lacks some of it still."""
        if self._head is None:
            return False
        num_tokens = -1
        while num_tokens < len(self._ids):  # more may have come while it was written
            num_tokens = len(self._ids)
            tokens = LoggedTokens(
                first_index=1,
                ids=tuple(self._ids),
                logprobs=tuple(self._logprobs),
                attempt=self._attempt,
                cached_tokens=self._cached_tokens,
            )
            try:
                await self._store.write(self._head, self.session, tokens)
            except ServingError as error:
                self._fail(error)
                return False
            self._num_stored = num_tokens
        self._behind.clear()
        self._on_secured()
        return True

    def _fail(self, error: ServingError) -> None:
        match error.code:
            case ErrorCode.SUPERSEDED:
                self._behind.clear()  # it is another's now
                self._on_superseded()
            case ErrorCode.STATE_UNAVAILABLE:
                self._behind.set()
            case _:
                raise error
