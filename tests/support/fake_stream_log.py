"""The log of resumable answers in memory, with the fences of the real one."""

import asyncio
from dataclasses import replace
from typing import cast

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId
from shared.domain.logged import LoggedTokens, LogHead
from shared.domain.request import Outcome
from shared.state.client import state_unavailable
from shared.state.stream_log import LoggedAnswer, LogMissing, StreamLog

NO_TOKENS = LoggedTokens(first_index=1, ids=(), attempt=Attempt(0))


class FakeStreamLog:
    """`is_away` makes every call fail; without `may_answer` tokens wait."""

    def __init__(self) -> None:
        self.is_away = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_waiting = 0
        self.answers: dict[RequestId, LoggedAnswer] = {}
        self.num_writes = 0

    @property
    def as_real(self) -> StreamLog:
        return cast(StreamLog, self)

    @property
    def only(self) -> LoggedAnswer:
        """The one log that there is."""
        (answer,) = self.answers.values()
        return answer

    async def write(self, head: LogHead, session: int, tokens: LoggedTokens) -> None:
        self._check(head.spec.request_id, session)
        held = self.answers.get(head.spec.request_id)
        if held is not None and held.session == session and held.outcome is not None:
            return
        self.answers[head.spec.request_id] = LoggedAnswer(session=session, head=head, tokens=tokens, outcome=None)

    async def append(self, request_id: RequestId, session: int, tokens: LoggedTokens) -> None:
        self.num_waiting += 1
        await self.may_answer.wait()
        self.num_waiting -= 1
        self._check(request_id, session)
        held = self.answers.get(request_id)
        if held is None or held.tokens.last_index + 1 != tokens.first_index:
            raise LogMissing
        joined = replace(
            tokens,
            first_index=1,
            ids=held.tokens.ids + tokens.ids,
            logprobs=held.tokens.logprobs + tokens.logprobs,
            cached_tokens=held.tokens.cached_tokens if held.tokens.ids else tokens.cached_tokens,
        )
        self.answers[request_id] = replace(held, tokens=joined)

    async def end(self, request_id: RequestId, session: int, num_tokens: int, outcome: Outcome) -> None:
        self._check(request_id, session)
        held = self.answers.get(request_id)
        if held is None or held.tokens.last_index != num_tokens:
            raise LogMissing
        if held.outcome is None:
            self.answers[request_id] = replace(held, outcome=outcome)

    async def take_over(self, request_id: RequestId, key_hash: str) -> LoggedAnswer | None:
        if self.is_away:
            raise state_unavailable()
        held = self.answers.get(request_id)
        if held is None or held.head.key_hash != key_hash:
            return None
        if held.outcome is None:
            held = self.answers[request_id] = replace(held, session=held.session + 1)
            return held
        return replace(held, session=0)

    def _check(self, request_id: RequestId, session: int) -> None:
        self.num_writes += 1
        if self.is_away:
            raise state_unavailable()
        held = self.answers.get(request_id)
        if held is not None and held.session > session:
            raise ServingError(ErrorCode.SUPERSEDED, "a newer reader took over")
