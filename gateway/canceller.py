"""Cancel by id, from any gateway: the scheduler is asked, and a mark is left in Redis for one that is away."""

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

_log = get_logger("canceller")
_OWED = CancelAnswer(is_released=False, state=None, blocks_freed=0)


class Canceller:
    """`cancellations` None = no Redis: only a scheduler can be asked."""

    def __init__(self, scheduler: SchedulerClient, cancellations: Cancellations | None) -> None:
        self._scheduler = scheduler
        self._cancellations = cancellations

    async def cancel(self, request_id: RequestId, reason: CancelReason) -> CancelAnswer:
        """Waits up to 2 s for the release. Raises ServingError: unknown, or neither scheduler nor Redis is there."""
        # Side by side, so that a Redis that is away does not hold up the cancel.
        async with asyncio.TaskGroup() as group:
            marking = spawn(group, self.leave_mark(request_id, reason), name=f"mark {request_id}")
            told = await self._ask(request_id, reason)
        is_marked = marking.result()
        match told:
            case LinkBroken():
                if not is_marked:
                    raise told.told
                return _OWED
            case ServingError():
                await self._clear(request_id)
                raise told
            case CancelAnswer():
                if told.is_released:
                    await self._clear(request_id)
                return told

    async def cancel_answers(self, request_id: RequestId, reason: CancelReason) -> CancelAnswer:
        """As `cancel`; a question with several answers is known to the scheduler by their ids alone, so they are asked
        for where nobody knows the question's. The answers together have released what all of them have.
        """
        ids = [child_id(request_id, choice) for choice in range(MAX_CHOICES)]
        try:
            answer = await self.cancel(request_id, reason)
            if answer is _OWED:  # no scheduler can say which ids there are: marks for all that there may be
                async with asyncio.TaskGroup() as group:
                    for one in ids:
                        spawn(group, self.leave_mark(one, reason), name=f"mark {one}")
            return answer
        except ServingError as error:
            if error.code is not ErrorCode.REQUEST_NOT_FOUND:
                raise
            unknown = error
        async with asyncio.TaskGroup() as group:
            asking = [spawn(group, self._cancel_one(one, reason), name=f"cancel {one}") for one in ids]
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

    async def _cancel_one(self, request_id: RequestId, reason: CancelReason) -> CancelAnswer | ServingError:
        """A failure as a value, so that it does not end the others."""
        try:
            return await self.cancel(request_id, reason)
        except ServingError as error:
            return error

    async def leave_mark(self, request_id: RequestId, reason: CancelReason) -> bool:
        """Whether a scheduler will find it."""
        if self._cancellations is None:
            return False
        try:
            await self._cancellations.mark(request_id, reason)
        except ServingError as error:
            _log.warning("cancel mark not written", request_id=request_id, code=error.code.value)
            return False
        return True

    async def _ask(self, request_id: RequestId, reason: CancelReason) -> CancelAnswer | ServingError | LinkBroken:
        try:
            return await self._scheduler.cancel(request_id, reason)
        except (ServingError, LinkBroken) as failure:
            return failure

    async def _clear(self, request_id: RequestId) -> None:
        """Nobody needs the mark any more; one that stays is only read in vain until it expires."""
        if self._cancellations is None:
            return
        try:
            await self._cancellations.clear(request_id)
        except ServingError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
