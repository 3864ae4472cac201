"""A request's line to the scheduler, with a scheduler that the test plays."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import (
    ControlEvent,
    ControlStream,
    Delivered,
    Placed,
    Queued,
    Requeued,
    SchedulerClient,
    Start,
)
from gateway.control import ControlLine
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams
from shared.process import RealClock
from tests.support.hand_clock import HandClock

SPEC = RequestSpec(request_id=RequestId("R"), prompt_ids=(TokenId(1),), max_tokens=4, sampling=SamplingParams(seed=1))
QUEUED = Queued(position=0)
PLACED = Placed(
    attempt=Attempt(1),
    decode_worker=WorkerId("d"),
    decode_address="127.0.0.1:1",
    decode_incarnation=Incarnation(1),
    attach_ticket=b"t",
    prefill_worker=WorkerId("p"),
)
FINISHED = Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.STOP)
BROKEN = LinkBroken("test")
WAIT = object()

Step = ControlEvent | Exception | object


class FakeStream:
    """Plays its steps: an event is read, an exception raised, WAIT waits for a cancel."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self.cancels: list[CancelReason] = []
        self.deliveries: list[Delivered] = []
        self.is_closed = False
        self._cancelled = asyncio.Event()

    async def read(self) -> ControlEvent:
        """The next step."""
        step = self._steps.pop(0)
        if step is WAIT:
            await self._cancelled.wait()
            return await self.read()
        if isinstance(step, Exception):
            raise step
        return cast("ControlEvent", step)

    async def ask_cancel(self, reason: CancelReason) -> None:
        """Remembered."""
        self.cancels.append(reason)
        self._cancelled.set()

    async def tell_delivered(self, delivered: Delivered) -> None:
        """Remembered."""
        self.deliveries.append(delivered)

    def close(self) -> None:
        """Remembered; a read ends as at a broken line."""
        self.is_closed = True
        self._steps[:0] = [BROKEN]
        self._cancelled.set()


class FakeScheduler:
    """Each dial gives the next stream, or raises."""

    def __init__(self, *dials: list[Step] | Exception, clock: HandClock | None = None) -> None:
        """Each dial takes 4 s of `clock`."""
        self._clock = clock
        self._dials = list(dials)
        self.starts: list[Start] = []
        self.streams: list[FakeStream] = []
        self.num_looks = 0

    def look_again(self) -> None:
        """Counted."""
        self.num_looks += 1

    async def serve(self, start: Start, *, on_leaving: Callable[[], None]) -> ControlStream:
        """The last entry is repeated."""
        self.starts.append(start)
        on_leaving()
        if self._clock is not None:
            self._clock.advance(4.0)
        dial = self._dials.pop(0) if len(self._dials) > 1 else self._dials[0]
        if isinstance(dial, Exception):
            raise dial
        self.streams.append(FakeStream(dial))
        return cast("ControlStream", self.streams[-1])


def line(
    scheduler: FakeScheduler,
    *,
    clock: Clock | None = None,
    progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    last_closed: Callable[[], int] = lambda: 0,
    on_queued: Callable[[Queued], None] = lambda _queued: None,
    on_placed: Callable[[Placed], None] = lambda _placed: None,
    on_requeued: Callable[[Requeued], None] = lambda _requeued: None,
) -> ControlLine:
    """A line to it."""

    async def requeued(told: Requeued) -> None:
        on_requeued(told)

    return ControlLine(
        scheduler=cast("SchedulerClient", scheduler),
        clock=clock or RealClock(),
        progress=progress,
        last_closed=last_closed,
        on_queued=on_queued,
        on_placed=on_placed,
        on_requeued=requeued,
    )


async def test_events_arrive_in_order_and_the_outcome_ends_it() -> None:
    """And the stream is closed."""
    seen: list[ControlEvent] = []
    scheduler = FakeScheduler([QUEUED, Queued(position=2), PLACED, FINISHED])

    outcome = await line(scheduler, on_queued=seen.append, on_placed=seen.append).run(SPEC)

    assert FINISHED == outcome
    assert [QUEUED, Queued(position=2), PLACED] == seen
    assert scheduler.streams[0].is_closed


async def test_a_broken_stream_is_dialled_again_with_what_is_known() -> None:
    """Attempt and tokens held go with the new Start."""
    scheduler = FakeScheduler([QUEUED, PLACED, BROKEN], BROKEN, [PLACED, FINISHED])
    told = iter([(0, 0), (1, 7), (1, 9)])

    outcome = await line(scheduler, progress=lambda: next(told)).run(SPEC)

    assert FINISHED == outcome
    assert [(0, 0), (1, 7), (1, 9)] == [(start.last_attempt_seen, start.tokens_held) for start in scheduler.starts]
    assert all(stream.is_closed for stream in scheduler.streams)
    assert 2 == scheduler.num_looks


async def test_an_attempt_that_was_closed_here_is_told_on_a_new_stream() -> None:
    """At once; also where it is closed while the line is dialled."""
    closed = [0]
    scheduler = FakeScheduler([PLACED, WAIT], [Requeued(attempt=Attempt(1), reason=""), FINISHED])

    def close_it(_placed: Placed) -> None:
        closed[0] = 1
        subject.dial_again()

    subject = line(scheduler, last_closed=lambda: closed[0], on_placed=close_it)
    assert FINISHED == await subject.run(SPEC)
    assert [0, 1] == [start.last_attempt_closed for start in scheduler.starts]

    told = iter([0, 1, 1, 1])
    scheduler = FakeScheduler([PLACED, FINISHED], [FINISHED])
    assert FINISHED == await line(scheduler, last_closed=lambda: next(told)).run(SPEC)
    assert [0, 1] == [start.last_attempt_closed for start in scheduler.starts]


async def test_delivered_is_told_where_there_is_a_stream() -> None:
    """Without one nothing is kept: the scheduler asks again on the next."""
    requeued = Requeued(attempt=Attempt(1), reason="preempted")
    delivered = Delivered(attempt=Attempt(1), ids=(TokenId(7),), cached_tokens=0, complete=None)
    scheduler = FakeScheduler([PLACED, requeued, WAIT, FINISHED])
    asked = asyncio.Event()
    control = line(scheduler, on_requeued=lambda _told: asked.set())
    await control.tell_delivered(delivered)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(control.run(SPEC))
        await asked.wait()
        await control.tell_delivered(delivered)
        await control.ask_cancel(CancelReason.DELETE)

    assert FINISHED == running.result()
    assert [delivered] == scheduler.streams[0].deliveries


async def test_a_refusal_is_final() -> None:
    """Words of the scheduler's are not asked for twice."""
    refusal = ServingError(ErrorCode.OVERLOADED, "full")
    scheduler = FakeScheduler([refusal])

    with pytest.raises(ServingError) as caught:
        await line(scheduler).run(SPEC)

    assert refusal is caught.value
    assert 1 == len(scheduler.starts)


async def test_a_scheduler_that_drains_is_asked_again_until_another_is_there() -> None:
    """Its refusal is no answer: the next one admits."""
    error = ServingError(ErrorCode.DRAINING, "the scheduler takes no new requests")
    draining: list[Step] = [Outcome(state=RequestState.FAILED, error=error)]
    scheduler = FakeScheduler(draining, list(draining), [QUEUED, PLACED, FINISHED])

    assert FINISHED == await line(scheduler).run(SPEC)
    assert (3, 2) == (len(scheduler.starts), scheduler.num_looks)


async def test_where_no_other_scheduler_comes_the_client_hears_that_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time that a new request may wait, and so before its headers."""
    monkeypatch.setattr("gateway.control.ADMISSION_WAIT_S", 0.2)
    error = ServingError(ErrorCode.DRAINING, "the scheduler takes no new requests")
    dials: list[list[Step]] = [[Outcome(state=RequestState.FAILED, error=error)] for _ in range(99)]
    scheduler = FakeScheduler(*dials)
    with pytest.raises(ServingError) as caught:
        await line(scheduler).run(SPEC)
    assert error == caught.value


async def test_without_a_scheduler_it_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the broken link says; not before several tries: the third is the first behind 10 s."""
    monkeypatch.setattr("gateway.control.ADMISSION_WAIT_S", 10.0)
    told = ServingError(ErrorCode.STATE_UNAVAILABLE, "nobody knows where it is")
    clock = HandClock()
    scheduler = FakeScheduler(LinkBroken("test", told), clock=clock)

    with pytest.raises(ServingError) as caught:
        await line(scheduler, clock=clock).run(SPEC)

    assert told is caught.value
    assert 3 == len(scheduler.starts)


async def test_after_admission_the_grace_bounds_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that stays away ends the request, although the admission wait is long over or far away."""
    monkeypatch.setattr("gateway.control.GRACE_S", 0.3)
    scheduler = FakeScheduler([QUEUED, PLACED, BROKEN], BROKEN)

    with pytest.raises(ServingError) as caught:
        async with asyncio.timeout(30):
            await line(scheduler).run(SPEC)

    assert ErrorCode.NO_CAPACITY == caught.value.code


async def test_a_cancel_is_told_at_once_and_only_once() -> None:
    """The first reason stands."""
    cancelled = Outcome(state=RequestState.CANCELLED, error=ServingError(ErrorCode.CANCELLED, "cancelled"))
    scheduler = FakeScheduler([QUEUED, WAIT, cancelled])
    admitted = asyncio.Event()
    control = line(scheduler, on_queued=lambda _queued: admitted.set())
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(control.run(SPEC))
        await admitted.wait()
        await control.ask_cancel(CancelReason.DISCONNECT)
        await control.ask_cancel(CancelReason.SHUTDOWN)

    assert cancelled == running.result()
    assert [CancelReason.DISCONNECT] == scheduler.streams[0].cancels


async def test_a_cancel_without_an_outcome_is_repeated_on_the_next_stream() -> None:
    """The stream that heard it broke."""
    cancelled = Outcome(state=RequestState.CANCELLED, error=ServingError(ErrorCode.CANCELLED, "cancelled"))
    scheduler = FakeScheduler([QUEUED, WAIT, BROKEN], [cancelled])
    admitted = asyncio.Event()
    control = line(scheduler, on_queued=lambda _queued: admitted.set())
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(control.run(SPEC))
        await admitted.wait()
        await control.ask_cancel(CancelReason.DELETE)

    assert cancelled == running.result()
    assert [[CancelReason.DELETE], [CancelReason.DELETE]] == [stream.cancels for stream in scheduler.streams]


async def test_a_cancel_before_any_scheduler_was_there_ends_it_at_once() -> None:
    """Nobody knows the request, so nobody needs to be told."""
    scheduler = FakeScheduler(BROKEN)
    control = line(scheduler)
    await control.ask_cancel(CancelReason.DISCONNECT)

    with pytest.raises(ServingError) as caught:
        async with asyncio.timeout(30):
            await control.run(SPEC)

    assert ErrorCode.CANCELLED == caught.value.code
    assert not control.is_known


async def test_the_largest_pool_is_asked_for_until_someone_answers() -> None:
    """Within the admission's wait."""
    answers: list[int | LinkBroken] = [BROKEN, BROKEN, 99]

    async def ask() -> int:
        answer = answers.pop(0)
        if isinstance(answer, LinkBroken):
            raise answer
        return answer

    assert 99 == await line(FakeScheduler(BROKEN)).max_request_tokens(ask)
