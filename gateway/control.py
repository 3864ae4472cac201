"""One request's line to the scheduler. It outlives a broken stream: it is dialled again within a grace.

Before admission the request may wait for an active scheduler; after it a scheduler that stays away ends the request.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from gateway.clients.link import LinkBroken
from gateway.clients.scheduler import ControlStream, Delivered, Placed, Queued, Requeued, SchedulerClient, Start
from shared.aio.backoff import Backoff
from shared.codec.request import timeout_to_wire
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.domain.lifecycle import deadline_exceeded
from shared.domain.request import CancelReason, Outcome, RequestSpec
from shared.obs.logs import get_logger

_log = get_logger("control")
ADMISSION_WAIT_S = 10.0  # decisions §1: without an active scheduler a new request waits this long, then 503
# Nothing runs short without a scheduler, as the tokens come from decode: what is under way waits for the next one. A
# standby is active after 6 s and has settled what it adopted 5 s later; one that is started anew may take longer.
GRACE_S = 30.0


class ControlLine:
    """`run` once; `ask_cancel` at any time. `progress` tells the last attempt seen and the tokens held.

    `last_closed` tells the last attempt of which nothing more is taken: a scheduler that was not there must know.

    `session` is the number of this reader of a resumable answer, 0 for a plain one; `key_hash` says whose request it
    is; at `deadline` its time is over.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerClient,
        clock: Clock,
        progress: Callable[[], tuple[int, int]],
        last_closed: Callable[[], int] = lambda: 0,
        session: int = 0,
        key_hash: str = "",
        deadline: float | None = None,
        on_queued: Callable[[Queued], None],
        on_placed: Callable[[Placed], None],
        on_requeued: Callable[[Requeued], Awaitable[None]],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._progress = progress
        self._last_closed = last_closed
        self._session = session
        self._key_hash = key_hash
        self._deadline = deadline
        self._on_queued = on_queued
        self._on_placed = on_placed
        self._on_requeued = on_requeued
        self._stream: ControlStream | None = None
        self._cancel_reason: CancelReason | None = None
        self._cancel_asked = asyncio.Event()
        self._is_known = False
        self._give_up_at = clock.monotonic() + ADMISSION_WAIT_S

    @property
    def is_known(self) -> bool:
        """May the scheduler have the request? False until a Start begins to leave."""
        return self._is_known

    async def max_request_tokens(self, ask: Callable[[], Awaitable[int]]) -> int:
        """What the largest KV pool holds, by `ask`. Waits for a scheduler. Raises ServingError."""
        backoff = _backoff()
        while True:
            try:
                async with asyncio.timeout(max(0.0, self._give_up_at - self._clock.monotonic())):
                    return await ask()
            except LinkBroken as broken:
                await self._pause(backoff, broken)
            except TimeoutError:
                raise LinkBroken("no answer in time").told from None

    async def run(self, spec: RequestSpec) -> Outcome:
        """To the outcome. Raises ServingError where none came: refused, cancelled early, no scheduler in time."""
        backoff = _backoff()
        while True:
            try:
                return await self._run_stream(spec, backoff)
            except LinkBroken as broken:
                self._scheduler.look_again()
                await self._pause(backoff, broken)

    async def ask_cancel(self, reason: CancelReason) -> None:
        """Told at once where there is a stream, else first thing on the next. Only the first reason counts."""
        if self._cancel_reason is not None:
            return
        self._cancel_reason = reason
        self._cancel_asked.set()
        if self._stream is not None:
            with contextlib.suppress(LinkBroken, ServingError):  # `run` sees the same and dials again
                await self._stream.ask_cancel(reason)

    async def tell_delivered(self, delivered: Delivered) -> None:
        """Once, where there is a stream: on the next one the scheduler asks again unless it has heard it."""
        if self._stream is not None:
            with contextlib.suppress(LinkBroken, ServingError):
                await self._stream.tell_delivered(delivered)

    def dial_again(self) -> None:
        """An attempt was closed here: the scheduler learns it from the next Start."""
        if self._stream is not None:
            self._stream.close()

    async def _run_stream(self, spec: RequestSpec, backoff: Backoff) -> Outcome:
        """One stream, to its end."""
        last_attempt, tokens_held = self._progress()
        has_heard = False
        try:
            async with asyncio.timeout(max(0.0, self._give_up_at - self._clock.monotonic())) as patience:
                start = Start(
                    spec=spec,
                    last_attempt_seen=last_attempt,
                    tokens_held=tokens_held,
                    last_attempt_closed=self._last_closed(),
                    session=self._session,
                    key_hash=self._key_hash,
                    timeout_ms=timeout_to_wire(self._deadline, self._clock.monotonic()),
                )
                async with contextlib.AsyncExitStack() as stack:
                    stream = await self._dial(start)
                    stack.callback(stream.close)
                    # No await between these two lines: `ask_cancel` has either seen the stream or left its reason.
                    self._stream, reason = stream, self._cancel_reason
                    if self._last_closed() != start.last_attempt_closed:
                        raise LinkBroken("outdated")  # closed while it was dialled
                    if reason is not None:
                        await stream.ask_cancel(reason)
                    while True:
                        event = await stream.read()
                        if isinstance(event, Outcome) and not has_heard and _is_draining(event):
                            raise LinkBroken("draining", event.error)  # another one takes its place
                        has_heard = True
                        patience.reschedule(None)
                        backoff.reset()
                        _log_told(spec.request_id, event)
                        match event:
                            case Queued():
                                self._on_queued(event)
                            case Requeued():
                                await self._on_requeued(event)
                            case Placed():
                                self._on_placed(event)
                            case Outcome():
                                return event
        except TimeoutError:
            raise LinkBroken("no answer in time") from None
        finally:
            self._stream = None
            if has_heard:
                self._give_up_at = self._clock.monotonic() + GRACE_S

    async def _dial(self, start: Start) -> ControlStream:
        """Known from the moment in which the Start begins to leave: who ends in it still has to cancel."""
        was_known = self._is_known

        def set_known() -> None:
            self._is_known = True

        try:
            return await self._scheduler.serve(start, on_leaving=set_known)
        except (LinkBroken, ServingError):
            self._is_known = was_known
            raise

    async def _pause(self, backoff: Backoff, broken: LinkBroken) -> None:
        """Waits for the next try. Raises what the client is to be told where there is none."""
        delay_s = backoff.next_delay()
        if self._clock.monotonic() + delay_s >= self._give_up_at:
            raise broken.told
        if self._is_known:
            await asyncio.sleep(delay_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._cancel_asked.wait()
            if self._cancel_reason is CancelReason.DEADLINE:
                raise deadline_exceeded()
            raise ServingError(ErrorCode.CANCELLED, "cancelled before it was admitted")


def _log_told(request_id: RequestId, event: Queued | Requeued | Placed | Outcome) -> None:
    attempt = event.attempt if isinstance(event, Requeued | Placed) else None
    state = event.state.value if isinstance(event, Outcome) else None
    code = event.error.code.value if isinstance(event, Outcome) and event.error is not None else None
    _log.debug("told", what=type(event).__name__, request_id=request_id, attempt=attempt, state=state, code=code)


def _is_draining(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code is ErrorCode.DRAINING


def _backoff() -> Backoff:
    return Backoff(initial_s=0.05, max_s=1.0, random=random.random)
