"""Cancel by id, from any gateway: the scheduler is asked, and a mark is left in Redis for one that is away.

A request is known to the client that asked for it and to nobody else: the scheduler compares the hash of the client's
key, and so does Redis in its stead.
"""

import asyncio

from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import CancelAnswer, SchedulerClient
from gateway.request_id import child_id
from gateway.schemas import MAX_CHOICES
from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.domain.request import CancelReason, RequestState
from shared.obs.logs import get_logger
from shared.state.cancellation import Cancellations
from shared.state.client import state_unavailable

_log = get_logger("canceller")
_OWED = CancelAnswer(is_released=False, state=None, blocks_freed=0)


class _OfAnother(ServingError):
    """The record of the request names another client: it is there, so it has no answers with ids of their own."""


class Canceller:
    """`cancellations` None = no Redis: only a scheduler can be asked."""

    def __init__(self, scheduler: SchedulerClient, cancellations: Cancellations | None) -> None:
        self._scheduler = scheduler
        self._cancellations = cancellations

    async def cancel(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> CancelAnswer:
        """Waits up to 2 s for the release. Raises ServingError: unknown, another's, or neither scheduler nor Redis is
        there.
        """
        # Side by side, so that a Redis that is away does not hold up the cancel.
        async with asyncio.TaskGroup() as group:
            marking = spawn(group, self._mark(request_id, key_hash, reason), name=f"mark {request_id}")
            told = await self._ask(request_id, key_hash, reason)
        refusal = marking.result()
        match told:
            case LinkBroken():
                if refusal is None:
                    return _OWED
                raise refusal if isinstance(refusal, _OfAnother) else told.told
            case ServingError():
                await self._clear(request_id, key_hash)
                raise told
            case CancelAnswer():
                if told.is_released:
                    await self._clear(request_id, key_hash)
                return told

    async def cancel_answers(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> CancelAnswer:
        """As `cancel`; a question with several answers is known to the scheduler by their ids alone, so they are asked
        for where nobody knows the question's. The answers together have released what all of them have.
        """
        ids = [child_id(request_id, choice) for choice in range(MAX_CHOICES)]
        try:
            answer = await self.cancel(request_id, key_hash, reason)
            if answer is _OWED:  # no scheduler can say which ids there are: marks for all that there may be
                async with asyncio.TaskGroup() as group:
                    marking = [spawn(group, self._mark(one, key_hash, reason), name=f"mark {one}") for one in ids]
                for refusal in (task.result() for task in marking):
                    if isinstance(refusal, _OfAnother):
                        raise refusal
            return answer
        except ServingError as error:
            if error.code is not ErrorCode.REQUEST_NOT_FOUND or isinstance(error, _OfAnother):
                raise
            unknown = error
        async with asyncio.TaskGroup() as group:
            asking = [spawn(group, self._cancel_one(one, key_hash, reason), name=f"cancel {one}") for one in ids]
        answers = [task.result() for task in asking]
        known = [answer for answer in answers if isinstance(answer, CancelAnswer)]
        failures = [answer for answer in answers if isinstance(answer, ServingError)]
        failures = [failure for failure in failures if failure.code is not ErrorCode.REQUEST_NOT_FOUND]
        if not known:
            raise failures[0] if failures else unknown
        return CancelAnswer(
            is_released=not failures and all(answer.is_released for answer in known),
            state=next((answer.state for answer in known if answer.state is not RequestState.FINISHED), known[0].state),
            blocks_freed=sum(answer.blocks_freed for answer in known),
        )

    async def _cancel_one(
        self, request_id: RequestId, key_hash: str, reason: CancelReason
    ) -> CancelAnswer | ServingError:
        """A failure as a value, so that it does not end the others."""
        try:
            return await self.cancel(request_id, key_hash, reason)
        except ServingError as error:
            return error

    async def leave_mark(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> None:
        """For the scheduler that comes next, if Redis is there."""
        await self._mark(request_id, key_hash, reason)

    async def _mark(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> ServingError | None:
        """Why no scheduler will find it; None where it will."""
        if self._cancellations is None:
            return state_unavailable()
        try:
            await self._cancellations.mark(request_id, key_hash, reason)
        except ServingError as error:
            if error.code is ErrorCode.REQUEST_NOT_FOUND:
                return _OfAnother(error.code, error.message, param="id")
            _log.warning("cancel mark not written", request_id=request_id, code=error.code.value)
            return error
        return None

    async def _ask(
        self, request_id: RequestId, key_hash: str, reason: CancelReason
    ) -> CancelAnswer | ServingError | LinkBroken:
        try:
            return await self._scheduler.cancel(request_id, key_hash, reason)
        except (ServingError, LinkBroken) as failure:
            return failure

    async def _clear(self, request_id: RequestId, key_hash: str) -> None:
        """Nobody needs the mark any more; one that stays is only read in vain until it expires."""
        if self._cancellations is None:
            return
        try:
            await self._cancellations.clear(request_id, key_hash)
        except ServingError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
