"""One answer's log, as its session writes it: tokens before their text is shown, the end before it is told.

Redis may be away: the answer goes on as one that cannot be resumed, and the whole log is written when Redis is back.
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


class AnswerLog:
    """Nothing raises; that a newer session has the answer is told by `on_superseded`, perhaps more than once."""

    def __init__(
        self,
        store: StreamLog,
        *,
        key_hash: str,
        served: bytes,
        deadline_unix_ms: int = 0,
        logged: LoggedAnswer | None,
        on_superseded: Callable[[], None],
    ) -> None:
        """`deadline_unix_ms` of a new answer, 0 = none; `logged`: what this session has taken over."""
        self._store = store
        self._key_hash = key_hash
        self._served = served
        self._deadline_unix_ms = deadline_unix_ms
        self._on_superseded = on_superseded
        self.session = FIRST_SESSION if logged is None else logged.session
        self._head = None if logged is None else logged.head
        self._ids: list[TokenId] = [] if logged is None else list(logged.tokens.ids)
        self._logprobs: list[TokenLogprobs] = [] if logged is None else list(logged.tokens.logprobs)
        self._attempt = Attempt(0) if logged is None else logged.tokens.attempt
        self._cached_tokens = 0 if logged is None else logged.tokens.cached_tokens
        self._behind = asyncio.Event()

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
            await asyncio.sleep(backoff.next_delay())
            if await self._catch_up():
                backoff.reset()

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
        self._behind.clear()
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
