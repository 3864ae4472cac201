"""Cancel by id: whom it reaches, what it leaves behind."""

from typing import cast

import pytest

from gateway.canceller import Canceller
from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import CancelAnswer, SchedulerClient
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.domain.request import CancelReason, RequestState
from shared.state.cancellation import Cancellations

ID = RequestId("R")
RELEASED = CancelAnswer(is_released=True, state=RequestState.CANCELLED, blocks_freed=3)
OWED = CancelAnswer(is_released=False, state=RequestState.CANCELLED, blocks_freed=1)
UNKNOWN = ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request")
AWAY = ServingError(ErrorCode.STATE_UNAVAILABLE, "away")


class FakeScheduler:
    """Answers every cancel in one way."""

    def __init__(self, answer: CancelAnswer | Exception) -> None:
        self._answer = answer

    async def cancel(self, request_id: RequestId, reason: CancelReason) -> CancelAnswer:
        """As the client does."""
        assert (ID, CancelReason.DELETE) == (request_id, reason)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class FakeMarks:
    """Redis: there or away."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.marks: dict[RequestId, CancelReason] = {}
        self.num_marked = 0

    async def mark(self, request_id: RequestId, reason: CancelReason) -> None:
        """Sets it."""
        self._require()
        self.num_marked += 1
        self.marks[request_id] = reason

    async def clear(self, request_id: RequestId) -> None:
        """Takes it away."""
        self._require()
        del self.marks[request_id]

    def _require(self) -> None:
        if self.is_away:
            raise AWAY


def canceller(answer: CancelAnswer | Exception, marks: FakeMarks | None) -> Canceller:
    """With that scheduler and that Redis."""
    return Canceller(cast("SchedulerClient", FakeScheduler(answer)), cast("Cancellations | None", marks))


async def test_a_released_request_leaves_no_mark() -> None:
    """It was there while it was of use."""
    marks = FakeMarks()

    assert RELEASED == await canceller(RELEASED, marks).cancel(ID, CancelReason.DELETE)
    assert (1, {}) == (marks.num_marked, marks.marks)


async def test_an_owed_release_keeps_the_mark() -> None:
    """For the scheduler that comes next, should this one go."""
    marks = FakeMarks()

    assert OWED == await canceller(OWED, marks).cancel(ID, CancelReason.DELETE)
    assert {ID: CancelReason.DELETE} == marks.marks


async def test_an_unknown_request_is_404_and_leaves_no_mark() -> None:
    """Nobody can fill the store with ids."""
    marks = FakeMarks()
    with pytest.raises(ServingError) as caught:
        await canceller(UNKNOWN, marks).cancel(ID, CancelReason.DELETE)

    assert UNKNOWN == caught.value
    assert {} == marks.marks


async def test_without_a_scheduler_the_mark_is_the_cancel() -> None:
    """Accepted, not done: 202."""
    marks = FakeMarks()
    answer = await canceller(LinkBroken("test"), marks).cancel(ID, CancelReason.DELETE)

    assert (False, None, 0) == (answer.is_released, answer.state, answer.blocks_freed)
    assert {ID: CancelReason.DELETE} == marks.marks


@pytest.mark.parametrize("marks", [None, FakeMarks(is_away=True)])
async def test_with_nobody_there_it_is_refused(marks: FakeMarks | None) -> None:
    """What was asked for will not happen, so it must not look as if."""
    with pytest.raises(ServingError) as caught:
        await canceller(LinkBroken("test"), marks).cancel(ID, CancelReason.DELETE)

    assert ErrorCode.NO_CAPACITY == caught.value.code


@pytest.mark.parametrize("marks", [None, FakeMarks(is_away=True)])
async def test_redis_away_does_not_matter_where_the_scheduler_answers(marks: FakeMarks | None) -> None:
    """Neither for a success nor for an unknown id."""
    assert RELEASED == await canceller(RELEASED, marks).cancel(ID, CancelReason.DELETE)
    with pytest.raises(ServingError) as caught:
        await canceller(UNKNOWN, marks).cancel(ID, CancelReason.DELETE)

    assert UNKNOWN == caught.value
