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
KEY = "a"
RELEASED = CancelAnswer(is_released=True, state=RequestState.CANCELLED, blocks_freed=3)
OWED = CancelAnswer(is_released=False, state=RequestState.CANCELLED, blocks_freed=1)
UNKNOWN = ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request")
AWAY = ServingError(ErrorCode.STATE_UNAVAILABLE, "away")


class FakeScheduler:
    """Answers every cancel in one way."""

    def __init__(self, answer: CancelAnswer | Exception) -> None:
        self._answer = answer

    async def cancel(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> CancelAnswer:
        """As the client does."""
        assert (ID, KEY, CancelReason.DELETE) == (request_id, key_hash, reason)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class FakeMarks:
    """Redis: there or away."""

    def __init__(self, *, is_away: bool = False, of_others: frozenset[str] = frozenset()) -> None:
        self.is_away = is_away
        self.of_others = of_others
        self.marks: dict[RequestId, CancelReason] = {}
        self.num_marked = 0

    async def mark(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> None:
        """Sets it, unless the request is another's."""
        self._require()
        if key_hash != KEY or request_id in self.of_others:
            raise UNKNOWN
        self.num_marked += 1
        self.marks[request_id] = reason

    async def clear(self, request_id: RequestId, key_hash: str) -> None:
        """Takes it away."""
        self._require()
        self.marks.pop(request_id, None)

    def _require(self) -> None:
        if self.is_away:
            raise AWAY


def canceller(answer: CancelAnswer | Exception, marks: FakeMarks | None) -> Canceller:
    """With that scheduler and that Redis."""
    return Canceller(cast("SchedulerClient", FakeScheduler(answer)), cast("Cancellations | None", marks))


async def test_a_released_request_leaves_no_mark() -> None:
    """It was there while it was of use."""
    marks = FakeMarks()

    assert RELEASED == await canceller(RELEASED, marks).cancel(ID, KEY, CancelReason.DELETE)
    assert (1, {}) == (marks.num_marked, marks.marks)


async def test_an_owed_release_keeps_the_mark() -> None:
    """For the scheduler that comes next, should this one go."""
    marks = FakeMarks()

    assert OWED == await canceller(OWED, marks).cancel(ID, KEY, CancelReason.DELETE)
    assert {ID: CancelReason.DELETE} == marks.marks


class GroupScheduler:
    """Knows the requests with these ids."""

    def __init__(self, known: dict[str, CancelAnswer | Exception]) -> None:
        self._known = known
        self.asked: list[RequestId] = []

    async def cancel(self, request_id: RequestId, key_hash: str, reason: CancelReason) -> CancelAnswer:
        """As the client does."""
        self.asked.append(request_id)
        answer = self._known.get(request_id, UNKNOWN)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def cancelled(known: dict[str, CancelAnswer | Exception]) -> CancelAnswer:
    """What `cancel_answers` says of R, with no mark left for ids that are unknown."""
    marks = FakeMarks()
    subject = Canceller(cast("SchedulerClient", GroupScheduler(known)), cast("Cancellations", marks))
    answer = await subject.cancel_answers(ID, KEY, CancelReason.DELETE)
    assert set(marks.marks) <= set(known)
    return answer


async def test_a_request_with_one_answer_is_asked_for_once() -> None:
    """Its children would be asked for in vain."""
    scheduler = GroupScheduler({"R": RELEASED})
    subject = Canceller(cast("SchedulerClient", scheduler), None)

    assert RELEASED == await subject.cancel_answers(ID, KEY, CancelReason.DELETE)
    assert ["R"] == scheduler.asked


async def test_all_answers_to_a_question_are_cancelled() -> None:
    """Freed together; released when all are; cancelled when one of them was."""
    finished = CancelAnswer(is_released=True, state=RequestState.FINISHED, blocks_freed=0)

    assert CancelAnswer(is_released=True, state=RequestState.CANCELLED, blocks_freed=6) == await cancelled(
        {"R.0": RELEASED, "R.1": finished, "R.2": RELEASED}
    )
    assert CancelAnswer(is_released=False, state=RequestState.CANCELLED, blocks_freed=4) == await cancelled(
        {"R.0": RELEASED, "R.1": OWED}
    )
    assert finished == await cancelled({"R.0": finished, "R.1": finished})


async def test_an_answer_that_cannot_be_cancelled_now_is_owed() -> None:
    """The others are; where none can be, the failure is the answer."""
    failure = ServingError(ErrorCode.INTERNAL, "broken")

    assert CancelAnswer(is_released=False, state=RequestState.CANCELLED, blocks_freed=3) == await cancelled(
        {"R.0": RELEASED, "R.1": failure}
    )
    with pytest.raises(ServingError) as caught:
        await cancelled({"R.1": failure})

    assert failure == caught.value


async def test_without_a_scheduler_all_answers_are_marked() -> None:
    """The one that comes next knows them by their ids alone."""
    marks = FakeMarks()
    answer = await canceller(LinkBroken("test"), marks).cancel_answers(ID, KEY, CancelReason.DELETE)

    assert (False, None) == (answer.is_released, answer.state)
    assert {"R", *(f"R.{choice}" for choice in range(8))} == set(marks.marks)


async def test_a_question_that_nobody_knows_is_404() -> None:
    """Neither itself nor an answer to it."""
    with pytest.raises(ServingError) as caught:
        await cancelled({})

    assert ErrorCode.REQUEST_NOT_FOUND is caught.value.code


async def test_an_unknown_request_is_404_and_leaves_no_mark() -> None:
    """Nobody can fill the store with ids."""
    marks = FakeMarks()
    with pytest.raises(ServingError) as caught:
        await canceller(UNKNOWN, marks).cancel(ID, KEY, CancelReason.DELETE)

    assert UNKNOWN == caught.value
    assert {} == marks.marks


async def test_without_a_scheduler_the_mark_is_the_cancel() -> None:
    """Accepted, not done: 202."""
    marks = FakeMarks()
    answer = await canceller(LinkBroken("test"), marks).cancel(ID, KEY, CancelReason.DELETE)

    assert (False, None, 0) == (answer.is_released, answer.state, answer.blocks_freed)
    assert {ID: CancelReason.DELETE} == marks.marks


@pytest.mark.parametrize("name", ["R", "R.1"])
async def test_without_a_scheduler_the_record_tells_whose_it_is(name: str) -> None:
    """CAN-04: another's is 404 then, too, also where only the answers to the question have records."""
    marks = FakeMarks(of_others=frozenset({name}))
    with pytest.raises(ServingError) as caught:
        await canceller(LinkBroken("test"), marks).cancel_answers(ID, KEY, CancelReason.DELETE)

    assert ErrorCode.REQUEST_NOT_FOUND is caught.value.code
    assert (set() if name == "R" else {"R", *(f"R.{choice}" for choice in (0, *range(2, 8)))}) == set(marks.marks)


@pytest.mark.parametrize("marks", [None, FakeMarks(is_away=True)])
async def test_with_nobody_there_it_is_refused(marks: FakeMarks | None) -> None:
    """What was asked for will not happen, so it must not look as if."""
    with pytest.raises(ServingError) as caught:
        await canceller(LinkBroken("test"), marks).cancel(ID, KEY, CancelReason.DELETE)

    assert ErrorCode.NO_CAPACITY == caught.value.code


@pytest.mark.parametrize("marks", [None, FakeMarks(is_away=True)])
async def test_redis_away_does_not_matter_where_the_scheduler_answers(marks: FakeMarks | None) -> None:
    """Neither for a success nor for an unknown id."""
    assert RELEASED == await canceller(RELEASED, marks).cancel(ID, KEY, CancelReason.DELETE)
    with pytest.raises(ServingError) as caught:
        await canceller(UNKNOWN, marks).cancel(ID, KEY, CancelReason.DELETE)

    assert UNKNOWN == caught.value
