"""One request from its valid question to its one end.

    control line ──Queued, Placed, Requeued, Outcome──▶ ┌─────────┐ ──Head, Frames──▶ client link ──▶ socket
                 ◀─Delivered, cancel─────────────────── │ session │ ◀─taken, gone, stalled──┘
    token stream ──tokens, end────────────────────────▶ │         │
                 ◀─acknowledge, finish───────────────── └─────────┘

A request may take several attempts. The text goes on where it was: the next attempt is placed behind the tokens that
are held here, and only when the client has taken all of them, so that a reader that is slow holds no worker.

The answer has its end when a finish or an error was put for the client, or the client is gone; the session has its own
when the scheduler has said the outcome too, or has not said it in time. Nothing in here makes tasks outside its scope.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass

from gateway import sse
from gateway.answer import ClientLink, Frame, Head
from gateway.answer_text import TextPart
from gateway.attempts import Attempts
from gateway.canceller import Canceller
from gateway.clients.scheduler import Delivered, Placed, Queued, Requeued, SchedulerClient
from gateway.clients.tokens import (
    AttachRefused,
    AttemptClosed,
    SequenceEnded,
    TokensArrived,
    TokenStreams,
    TokenSubscription,
)
from gateway.control import ControlLine
from gateway.errors import error_body, error_headers, http_status
from gateway.fleet import FleetView
from gateway.intake import AnswerForm, Intake
from gateway.journal import Journal
from gateway.request_id import Identity
from shared.aio.channel import ChannelClosed
from shared.aio.scope import cancel_and_wait, spawn, stop_when
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestKey, TokenId
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState, Usage
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics

# The client has its answer; the record's end follows by one message. Longer means a scheduler that is away.
_OUTCOME_WAIT_S = 5.0
# The word of a failure comes by the scheduler, tokens come directly: what was computed before may be a moment behind.
_LAST_TOKENS_S = 0.1
# After a refused attach: time for the scheduler to say how the attempt ended (a lost worker takes it 5 s).
_REFUSED_WAIT_S = 10.0

_log = get_logger("session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every session uses."""

    clock: Clock
    metrics: Metrics
    scheduler: SchedulerClient
    fleet: FleetView
    tokens: TokenStreams
    canceller: Canceller
    served_model_name: str


class Session:
    """Make it, `spawn` its `run`, hand its `link` to an Answer. `cancel` may be called at any time."""

    def __init__(self, services: Services, intake: Intake, identity: Identity, journal: Journal) -> None:
        self._services = services
        self._intake = intake
        self._identity = identity
        self._journal = journal
        self._id = identity.request_id
        self._created_unix_s = services.clock.unix_ms() // 1000
        self._stream = sse.EventStream(self._encoder())
        self.link = ClientLink(on_taken=self._on_taken, on_gone=self._on_gone, on_stalled=self._on_stalled)
        self._control = ControlLine(
            scheduler=services.scheduler,
            clock=services.clock,
            progress=lambda: (self._attempts.last_seen, self._num_tokens),
            on_queued=self._on_queued,
            on_placed=self._on_placed,
            on_requeued=self._on_requeued,
        )
        self._attempts = Attempts()
        self._subscription: TokenSubscription | None = None
        self._parts: list[TextPart] = []  # of a whole answer
        self._ids: list[TokenId] = []  # the whole answer so far
        self._cached_tokens = 0
        self._queued_index = 0  # of the last frame that the link was given
        self._taken_index = 0  # of the last frame that the socket took
        self._break_error: ServingError | None = None
        self._is_broken_off = asyncio.Event()
        self._is_answered = False
        self._finish_reason: FinishReason | None = None  # the answer's own, or the outcome's
        self._cancel_reason: CancelReason | None = None
        self._cancel_asked = asyncio.Event()
        self._outcome: Outcome | None = None
        self._has_outcome = asyncio.Event()

    @property
    def is_stream(self) -> bool:
        """Whether the client gets its answer bit by bit."""
        return self._intake.form is not AnswerForm.WHOLE

    @property
    def _num_tokens(self) -> int:
        return len(self._ids)

    @property
    def error(self) -> ServingError | None:
        """Why the answer has no end of its own; None while it is under way and where it has one."""
        return None if self._is_answered else self._break_error

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt_tokens=len(self._intake.prompt_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self._cached_tokens,
        )

    async def run(self) -> None:
        """To the end, whatever happens; raises nothing but a cancellation."""
        try:
            async with asyncio.TaskGroup() as group:
                helpers = (
                    spawn(group, self._follow_control(), name=f"control {self._id}"),
                    spawn(group, self._pass_on_cancel(), name=f"cancel {self._id}"),
                )
                await self._answer()
                self.link.out.close()
                await self.link.is_over.wait()  # the stall clock bounds it
                self._acknowledge_all()
                await self._await_outcome()
                for helper in helpers:
                    await cancel_and_wait(helper)
        except Exception:  # noqa: BLE001 - the top of a session: a bug in one request must not end the others
            _log.exception("session failed", request_id=self._id)
            self._break_off(ServingError(ErrorCode.INTERNAL, "the server failed"))
            if self._break_error is not None and not self.link.is_over.is_set():
                await self._tell_error(self._break_error)
        finally:
            self.link.out.close()
            if self._subscription is not None:
                self._subscription.close()
            if self._num_tokens:
                self._journal.usage = self.usage
            self._journal.write(self._end_state(), self._break_error if not self._is_answered else None)

    def cancel(self, reason: CancelReason, error: ServingError) -> None:
        """Ends the request, unless its answer is complete; the first reason counts. `error` is told to the client."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
            self._journal.cancel_reason = reason
            self._cancel_asked.set()
        self._break_off(error)

    # ---- the control line

    async def _follow_control(self) -> None:
        try:
            limit = 0
            if self._intake.max_tokens is None:
                limit = await self._control.max_request_tokens(self._services.fleet.max_request_tokens)
            outcome = await self._control.run(self._intake.spec(self._id, limit))
        except ServingError as error:
            kind = RequestState.CANCELLED if error.code is ErrorCode.CANCELLED else RequestState.FAILED
            outcome = Outcome(state=kind, error=error)
        self._outcome = outcome
        self._has_outcome.set()
        if outcome.error is None:
            if self._subscription is not None and outcome.finish_reason is not None:
                self._subscription.conclude(outcome.finish_reason)
            elif self._ids and outcome.finish_reason is not None:  # as many tokens as were asked for
                self._finish_reason = self._finish_reason or outcome.finish_reason
                self._attempts.changed.set()
            else:
                self._break_off(ServingError(ErrorCode.INTERNAL, "the answer was lost on its way"))
        elif outcome.state is RequestState.FAILED and self._subscription is not None:
            await asyncio.sleep(_LAST_TOKENS_S)
            self._break_off(outcome.error)
        else:
            self._break_off(outcome.error)

    async def _pass_on_cancel(self) -> None:
        await self._cancel_asked.wait()
        if self._cancel_reason is not None:
            await self._control.ask_cancel(self._cancel_reason)

    def _on_queued(self, queued: Queued) -> None:
        self._journal.mark_queued()
        self._start_stream(queued.position)

    def _on_placed(self, placed: Placed) -> None:
        self._start_stream(0)
        if self._attempts.placed(placed):
            self._journal.mark_placed(placed.prefill_worker, placed.decode_worker)
            self._cut_closed()

    async def _on_requeued(self, requeued: Requeued) -> None:
        """The relay answers when the client has taken everything; where the answer has its end nobody need wait."""
        self._attempts.requeued(requeued)
        self._cut_closed()
        if self._is_answered:
            await self._answer_question()

    def _cut_closed(self) -> None:
        if self._subscription is not None and self._attempts.is_closed(self._subscription.key.attempt):
            self._subscription.cut()

    async def _await_outcome(self) -> None:
        """A cancel that nobody confirmed is left in Redis, for the scheduler that comes next."""
        if not self._control.is_known and not self._has_outcome.is_set():
            return
        try:
            async with asyncio.timeout(_OUTCOME_WAIT_S):
                await self._has_outcome.wait()
        except TimeoutError:
            if self._cancel_reason is not None:
                await self._services.canceller.leave_mark(self._id, self._cancel_reason)

    # ---- the answer

    async def _answer(self) -> None:
        """Returns when the client has been told an end, or nobody is there to be told."""
        async with stop_when(self._is_broken_off):
            await self._relay()
        if self._break_error is not None:
            await self._tell_error(self._break_error)

    async def _relay(self) -> None:
        """Attempt by attempt."""
        while not self._is_answered and self._break_error is None:
            placed = await self._next_place()
            if placed is None:
                break
            self._subscription = self._services.tokens.attach(
                address=placed.decode_address,
                incarnation=placed.decode_incarnation,
                key=RequestKey(self._id, placed.attempt),
                ticket=placed.attach_ticket,
                from_index=self._num_tokens + 1,
            )
            await self._read_attempt(self._subscription)
            if not self._is_answered:  # an answer's last acknowledgement still goes this way
                self._subscription.close()
                self._subscription = None
                self._attempts.close(placed.attempt)
        if self._is_answered:
            await self._answer_question()

    async def _next_place(self) -> Placed | None:
        """Answers the scheduler's question when the client has taken everything; None where the answer has its end."""
        while True:
            self._attempts.changed.clear()
            if self._attempts.next_place is not None:
                return self._attempts.next_place
            if self._finish_reason is not None:
                await self._finish([self._intake.text.flush()], self._finish_reason)
                return None
            if self._has_taken_all:
                await self._answer_question()
            await self._attempts.changed.wait()

    async def _answer_question(self) -> None:
        question, self._attempts.question = self._attempts.question, None
        if question is not None:
            delivered = Delivered(
                attempt=question.attempt,
                ids=tuple(self._ids),
                cached_tokens=self._cached_tokens,
                complete=self._finish_reason,
            )
            await self._control.tell_delivered(delivered)

    async def _read_attempt(self, subscription: TokenSubscription) -> None:
        """To the answer's end or the attempt's."""
        while not self._is_answered and self._break_error is None:
            event = await subscription.get()
            match event:
                case TokensArrived():
                    await self._take_tokens(event, subscription)
                case SequenceEnded():
                    await self._finish([self._intake.text.flush()], event.reason)
                case AttachRefused():
                    await self._await_closing(subscription.key.attempt, event.error)
                    return
                case AttemptClosed():
                    return

    async def _await_closing(self, attempt: Attempt, refusal: ServingError) -> None:
        """Decode knows the attempt no more: the scheduler says why, or its outcome breaks the answer off."""
        try:
            async with asyncio.timeout(_REFUSED_WAIT_S):
                while not self._attempts.is_closed(attempt):
                    self._attempts.changed.clear()
                    await self._attempts.changed.wait()
        except TimeoutError:
            _log.warning("attach refused", request_id=self._id, code=refusal.code.value)
            error = ServingError(ErrorCode.WORKER_LOST, "the answer was lost on its way")
            self.cancel(CancelReason.GATEWAY_LOST, error)

    async def _take_tokens(self, event: TokensArrived, subscription: TokenSubscription) -> None:
        self._journal.mark_first_token()
        if not self._ids:  # a later attempt finds other blocks cached, which is no saving of the client's
            self._cached_tokens = event.cached_tokens
        parts: list[TextPart] = []
        all_logprobs = event.logprobs or (None,) * len(event.ids)
        for token_id, logprobs in zip(event.ids, all_logprobs, strict=True):  # one delta a token, also of several
            part = self._intake.text.feed(token_id, logprobs)
            parts.append(part)
            self._ids.append(token_id)
            if part.is_stop:
                subscription.finish(self._num_tokens, FinishReason.STOP)
                await self._finish(parts, FinishReason.STOP)
                return
        if not self.is_stream:
            self._parts += parts
        elif any(part.text for part in parts):
            await self._put_text(b"".join(map(self._stream.delta, parts)))
        self._acknowledge()

    async def _finish(self, parts: list[TextPart], reason: FinishReason) -> None:
        """The last parts of the text and the end, as one frame.

        Nothing where the answer was broken off in the same pass of the loop, before the scope's cancel came through:
        the client is told that error, and an answer has one head and one end.
        """
        if self._break_error is not None:
            return
        usage = self.usage
        self._is_answered = True  # from here on nothing breaks it off: it only waits for room
        self._finish_reason = reason
        self._attempts.changed.set()
        if not self.is_stream:
            choice = sse.choice_object(
                self._intake.choice or 0, [*self._parts, *parts], reason, has_logprobs=self._intake.has_logprobs
            )
            body = sse.completion_object(
                completion_id=self._identity.completion_id,
                model=self._services.served_model_name,
                created_unix_s=self._created_unix_s,
                choices=[choice],
                usage=usage,
            )
            await self._put_whole(200, {}, json.dumps(body).encode())
        else:
            data = b"".join(map(self._stream.delta, parts)) + self._stream.finish(reason, usage)
            await self._put_text(data, has_text=any(part.text for part in parts))

    async def _tell_error(self, error: ServingError) -> None:
        """In the stream where it has started, else as a status."""
        match self._stream.state:
            case sse.StreamState.NOT_STARTED:
                await self._put_whole(http_status(error), error_headers(error), error_body(error))
            case sse.StreamState.STREAMING:
                await self._put(Frame(data=self._stream.error(error)))
            case sse.StreamState.DONE | sse.StreamState.ERRORED:
                pass  # a client that has stalled got it already

    async def _put_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._put(Head(status=status, headers={**headers, **self._identity.headers}))
        await self._put(Frame(data=body, token_index=self._num_tokens, has_text=status == 200))

    async def _put_text(self, data: bytes, *, has_text: bool = True) -> None:
        await self._put(Frame(data=data, token_index=self._num_tokens, has_text=has_text))
        self._queued_index = self._num_tokens

    async def _put(self, item: Head | Frame) -> None:
        """Waits for room; where the client is gone nothing is put."""
        with contextlib.suppress(ChannelClosed):
            await self.link.out.put(item)

    def _start_stream(self, position: int) -> None:
        """At admission: the headers and a first comment leave. Later only the position is told."""
        if not self.is_stream or self.link.out.is_closed:
            return
        match self._stream.state:
            case sse.StreamState.NOT_STARTED:
                self.link.out.try_put(Head(status=200, headers={**sse.HEADERS, **self._identity.headers}))
                self.link.out.try_put(Frame(data=self._stream.start(position)))
            case sse.StreamState.STREAMING if position:
                self.link.out.try_put(Frame(data=sse.queued_comment(position)))
            case _:
                pass

    # ---- acknowledgements

    def _on_taken(self, frame: Frame) -> None:
        if frame.has_text:
            self._journal.mark_first_text_sent(is_stream=self.is_stream)
        if frame.token_index is not None:
            self._taken_index = frame.token_index
            self._acknowledge()
            if self._has_taken_all:
                self._attempts.changed.set()

    def _acknowledge(self) -> None:
        """Tokens without text of their own count as taken once everything before them is."""
        if self._subscription is not None:
            self._subscription.ack(self._num_tokens if self._has_taken_all else self._taken_index)

    @property
    def _has_taken_all(self) -> bool:
        """A whole answer's tokens are taken when they are in its body."""
        return self._taken_index == self._queued_index

    def _acknowledge_all(self) -> None:
        if self._subscription is not None and self._is_answered and self._cancel_reason is None:
            self._subscription.ack(self._num_tokens)

    # ---- the client

    def _on_gone(self) -> None:
        self.cancel(CancelReason.DISCONNECT, ServingError(ErrorCode.CANCELLED, "the client left"))

    def _on_stalled(self) -> bytes | None:
        error = ServingError(ErrorCode.SLOW_CLIENT, "the client did not read for too long")
        self.cancel(CancelReason.SLOW_CLIENT, error)
        if self._stream.state is sse.StreamState.STREAMING:
            return self._stream.error(error)
        return None

    # ---- ends

    def _break_off(self, error: ServingError) -> None:
        """The answer ends with an error, unless it has an end. The first error counts."""
        if self._break_error is None and not self._is_answered:
            self._break_error = error
            self._is_broken_off.set()

    def _end_state(self) -> RequestState:
        if self._outcome is not None and not self._is_answered:
            return self._outcome.state
        if self._cancel_reason is not None:
            return RequestState.CANCELLED
        return RequestState.FINISHED if self._is_answered else RequestState.FAILED

    def _encoder(self) -> sse.EventEncoder:
        if self._intake.form is AnswerForm.NAMED_EVENTS:
            return sse.NamedEventEncoder(request_id=self._id)
        return sse.OpenAiEncoder(
            completion_id=self._identity.completion_id,
            model=self._services.served_model_name,
            created_unix_s=self._created_unix_s,
            include_usage=self._intake.include_usage,
            choice=self._intake.choice,
        )
