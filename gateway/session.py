"""One request from its valid question to its one end.

    control line ──Queued, Placed, Requeued, Outcome──▶ ┌─────────┐ ──Head, Frames──▶ client link ──▶ socket
                 ◀─Delivered, cancel─────────────────── │ session │ ◀─taken, gone, stalled──┘
    token stream ──tokens, end────────────────────────▶ │         │
                 ◀─acknowledge, finish───────────────── └─────────┘

A request may take several attempts. The text goes on where it was: the next attempt is placed behind the tokens that
are held here, and only when the client has taken all of them, so that a reader that is slow holds no worker.

A resumable answer may take several sessions, here or at other gateways, one after the other: each goes on from the log
that the one before has written, shows what its client lacks, and fences the older ones by its number. One without its
client waits a while for the next, acknowledges nothing meanwhile, and then cancels.

The answer has its end when a finish or an error was put for the client, or the client is gone; the session has its own
when the scheduler has said the outcome too, or has not said it in time. Nothing in here makes tasks outside its scope.
"""

import asyncio
from collections.abc import Sequence

from gateway.answer import ClientLink, Frame
from gateway.answer_log import AnswerLog
from gateway.answer_text import TextPart
from gateway.answer_writer import AnswerWriter
from gateway.attempts import Attempts
from gateway.clients.scheduler import Delivered, Placed, Queued, Requeued
from gateway.clients.tokens import (
    AttachRefused,
    AttemptClosed,
    SequenceEnded,
    TokensArrived,
    TokenSubscription,
)
from gateway.control import ControlLine
from gateway.ending import Ending
from gateway.intake import Intake
from gateway.journal import Journal
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from gateway.services import Resumption, Services
from gateway.timeouts import deadline_to_unix_ms
from shared.aio.scope import cancel_and_wait, spawn, stop_when
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestKey
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState, Usage
from shared.obs.logs import get_logger
from shared.state.stream_log import superseded

# The client has its answer; the record's end follows by one message. Longer means a scheduler that is away.
_OUTCOME_WAIT_S = 5.0
# The word of a failure comes by the scheduler, tokens come directly: what was computed before may be a moment behind,
# on a busy machine a few tenths of a second.
_LAST_TOKENS_S = 0.5
# After a refused attach: time for the scheduler to say how the attempt ended (a lost worker takes it 5 s, and it may
# be a new one that has to be found and to adopt the request first).
_REFUSED_WAIT_S = 30.0

_log = get_logger("session")


class Session:
    """Make it, `spawn` its `run`, hand its `link` to an Answer. `cancel` may be called at any time."""

    def __init__(
        self,
        services: Services,
        intake: Intake,
        identity: Identity,
        journal: Journal,
        *,
        key_hash: str = "",
        resumption: Resumption | None = None,
    ) -> None:
        """`key_hash`: who may cancel it by its id, and resume a resumable answer."""
        self._services = services
        self._intake = intake
        self.deadline = intake.deadline
        self._journal = journal
        self._key_hash = key_hash
        self._id = self.request_id = identity.request_id
        self._resumption = resumption
        logged = None if resumption is None else resumption.logged
        now_s = services.clock.unix_ms() // 1000
        served = ServedForm.from_bytes(logged.head.served) if logged else ServedForm.of(intake, now_s)
        self.log: AnswerLog | None = None
        if intake.is_resumable and services.logs is not None:
            self.log = AnswerLog(
                services.logs,
                key_hash=key_hash,
                served=served.to_bytes(),
                deadline_unix_ms=deadline_to_unix_ms(intake.deadline, services.clock),
                logged=logged,
                on_superseded=self.supersede,
                on_secured=self._on_secured,
            )
        self.link = ClientLink(on_taken=self._on_taken, on_gone=self._on_gone, on_stalled=self._on_stalled)
        self._writer = AnswerWriter(
            intake,
            identity,
            served,
            link=self.link,
            model=services.served_model_name,
            from_index=resumption.from_index if resumption else 0,
        )
        self._control = ControlLine(
            scheduler=services.scheduler,
            clock=services.clock,
            progress=self._progress,
            last_closed=lambda: self._attempts.last_closed,
            session=self._session_number,
            key_hash=key_hash,
            deadline=intake.deadline,
            on_queued=self._on_queued,
            on_placed=self._on_placed,
            on_requeued=self._on_requeued,
        )
        self._attempts = Attempts()
        self._subscription: TokenSubscription | None = None
        self._ending = Ending()
        self._finish_reason: FinishReason | None = None  # the answer's own, or the outcome's
        self._client_gone = asyncio.Event()
        self._is_caught_up = asyncio.Event()  # with the log that was taken over
        self._is_stop_complete = False  # the logged tokens end with a stop string

    @property
    def is_stream(self) -> bool:
        """Whether the client gets its answer bit by bit."""
        return self._writer.is_stream

    @property
    def error(self) -> ServingError | None:
        """Why the answer has no end of its own; None while it is under way and where it has one."""
        return None if self._ending.is_answered else self._ending.error

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._writer.usage

    async def run(self) -> None:
        """To the end, whatever happens; raises nothing but a cancellation."""
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    spawn(group, self._follow_control(), name=f"control {self._id}"),
                    spawn(group, self._pass_on_cancel(), name=f"cancel {self._id}"),
                ]
                if self.log is not None:
                    helpers.append(spawn(group, self.log.keep_whole(), name=f"log {self._id}"))
                    helpers.append(spawn(group, self._await_next_reader(self.log), name=f"grace {self._id}"))
                await self._answer()
                self.link.out.close()
                await self.link.is_over.wait()  # the stall clock bounds it
                self._acknowledge_all()
                await self._await_outcome()
                for helper in helpers:
                    await cancel_and_wait(helper)
        except asyncio.CancelledError:  # the end of a drain
            if not self.link.is_over.is_set():
                self._ending.ask_cancel(CancelReason.SHUTDOWN)
            raise
        except Exception:  # noqa: BLE001 - the top of a session: a bug in one request must not end the others
            _log.exception("session failed", request_id=self._id)
            self._ending.break_off(ServingError(ErrorCode.INTERNAL, "the server failed"))
            if self._ending.error is not None and not self.link.is_over.is_set():
                await self._writer.tell_error(self._ending.error)
        finally:
            self.link.out.close()
            if self._subscription is not None:
                self._subscription.close()
            if self._writer.num_tokens:
                self._journal.usage = self.usage
            self._journal.write(self._ending.state, self.error)

    def cancel(self, reason: CancelReason, error: ServingError) -> None:
        """Ends the request, unless its answer is complete; the first reason counts. `error` is told to the client.

        A resumable one outlives its gateway: its stream ends without an end, and is resumed elsewhere.
        """
        if self._ending.left.is_set() or (reason is CancelReason.SHUTDOWN and self._ending.is_answered):
            return  # what has its end waits for room and for the scheduler's word alone
        if reason is CancelReason.SHUTDOWN and self.log is not None and not self.log.is_behind:
            self._leave()
            self._ending.broken_off.set()
            return
        if self._ending.ask_cancel(reason):
            self._journal.cancel_reason = reason
        self._ending.break_off(error)

    def supersede(self, by: int | None = None) -> None:
        """A newer reader has the answer: nothing more goes upstream, and the client is told, if it has no end yet.

        Nothing where `by`, the number of the other one, is not newer.
        """
        if not self._ending.is_answered and (by is None or by > self._session_number):
            self._leave()
            self._ending.break_off(superseded())

    def _leave(self) -> None:
        self._ending.left.set()
        if self._subscription is not None:
            self._subscription.close()

    async def _await_next_reader(self, log: AnswerLog) -> None:
        """The client is gone: a takeover comes before the end that is written here, or sees it."""
        await self._client_gone.wait()
        await asyncio.sleep(self._services.resumable_grace_s)
        if not self._ending.is_answered and self._ending.error is None:
            error = ServingError(ErrorCode.CANCELLED, "the client left")
            await log.end(Outcome.broken_off(error))
            self.cancel(CancelReason.DISCONNECT, error)

    # ---- the control line

    async def _follow_control(self) -> None:
        outcome: Outcome | None = None
        try:
            limit = 0
            if self._intake.max_tokens is None:
                limit = await self._control.max_request_tokens(self._services.fleet.max_request_tokens)
            spec = self._intake.spec(self._id, limit)
            if self.log is not None:
                await self.log.begin(spec)
            async with stop_when(self._ending.left):
                outcome = await self._control.run(spec)
        except ServingError as error:
            outcome = Outcome.broken_off(error)
        if outcome is None:
            return
        if outcome.error is not None and outcome.error.code is ErrorCode.SUPERSEDED:
            self.supersede()
            return
        self._ending.learn(outcome)
        if self._resumption is not None and outcome.error is None:
            await self._check_resumed_end(outcome)
        if outcome.error is None:
            if self._subscription is None and not self._writer.ids:
                self._ending.break_off(ServingError(ErrorCode.INTERNAL, "the answer was lost on its way"))
                return
            # Without a subscription, or where its attach came too late, what is here is as much as was made.
            self._finish_reason = self._finish_reason or outcome.finish_reason or FinishReason.STOP
            self._attempts.changed.set()
            if self._subscription is not None:
                self._subscription.conclude(self._finish_reason)
        elif outcome.state is RequestState.FAILED and self._subscription is not None:
            await asyncio.sleep(_LAST_TOKENS_S)
            self._ending.break_off(outcome.error)
        else:
            self._ending.break_off(outcome.error)

    async def _check_resumed_end(self, outcome: Outcome) -> None:
        """What an earlier session has acknowledged without writing it (Redis was away) cannot be had any more."""
        await self._is_caught_up.wait()
        if self._subscription is not None:
            await asyncio.sleep(_LAST_TOKENS_S)
        is_whole = self._ending.is_answered or self._is_stop_complete or self._writer.is_whole(outcome.finish_reason)
        if not is_whole:
            self._ending.break_off(ServingError(ErrorCode.INTERNAL, "the answer was lost on its way"))

    async def _pass_on_cancel(self) -> None:
        await self._ending.cancel_asked.wait()
        if self._ending.cancel_reason is not None:
            await self._control.ask_cancel(self._ending.cancel_reason)

    def _on_queued(self, queued: Queued) -> None:
        self._journal.mark_queued()
        self._writer.start(queued.position)

    def _on_placed(self, placed: Placed) -> None:
        self._writer.start(0)
        if self._attempts.placed(placed):
            self._journal.mark_placed(placed.prefill_worker, placed.decode_worker)
            self._cut_closed()

    async def _on_requeued(self, requeued: Requeued) -> None:
        """The relay answers when the client has taken everything; where the answer has its end nobody need wait."""
        self._attempts.requeued(requeued)
        self._cut_closed()
        if self._ending.is_answered:
            await self._answer_question()

    def _cut_closed(self) -> None:
        if self._subscription is not None and self._attempts.is_closed(self._subscription.key.attempt):
            self._subscription.cut()

    async def _await_outcome(self) -> None:
        """A cancel that nobody confirmed is left in Redis, for the scheduler that comes next."""
        if self._ending.left.is_set() or (not self._control.is_known and not self._ending.has_outcome.is_set()):
            return
        try:
            async with asyncio.timeout(_OUTCOME_WAIT_S):
                await self._ending.has_outcome.wait()
        except TimeoutError:
            if self._ending.cancel_reason is not None:
                await self._services.canceller.leave_mark(self._id, self._key_hash, self._ending.cancel_reason)

    # ---- the answer

    async def _answer(self) -> None:
        """Returns when the client has been told an end, or nobody is there to be told."""
        async with stop_when(self._ending.broken_off):
            await self._relay()
        error = self._ending.error
        if error is None:
            return
        if self._ending.left.is_set():  # what is held back is for the newer reader to show, in its place
            await self._writer.tell_error(error)
            return
        if self.log is not None:
            await self.log.end(Outcome.broken_off(error))
            await self._writer.put_again(*self.log.tokens_behind(self._writer.num_tokens))
        await self._writer.tell_error(error, self._writer.flush())

    async def _relay(self) -> None:
        """Attempt by attempt."""
        if self._resumption is not None:
            self._is_stop_complete = await self._writer.show_logged(self._resumption.logged.tokens)
            self._is_caught_up.set()
        while not self._ending.is_answered and self._ending.error is None:
            placed = await self._next_place()
            if placed is None:
                break
            self._subscription = self._services.tokens.attach(
                address=placed.decode_address,
                incarnation=placed.decode_incarnation,
                key=RequestKey(self._id, placed.attempt),
                ticket=placed.attach_ticket,
                from_index=self._writer.num_tokens + 1,
                session=self._session_number,
                acks_at_once=self._intake.has_stop_strings or self._intake.has_logprobs,
            )
            if self._is_stop_complete:  # the session before could not say it any more
                await self._finish_early(self._subscription, [])
            await self._read_attempt(self._subscription)
            if not self._ending.is_answered:  # an answer's last acknowledgement still goes this way
                self._subscription.close()
                self._subscription = None
                self._attempts.close(placed.attempt)
        if self._ending.is_answered:
            await self._answer_question()

    async def _next_place(self) -> Placed | None:
        """Answers the scheduler's question when the client has taken everything; None where the answer has its end."""
        while True:
            self._attempts.changed.clear()
            if self._attempts.next_place is not None:
                return self._attempts.next_place
            if self._finish_reason is not None:
                await self._flush_and_finish(self._finish_reason)
                return None
            if self._has_taken_all:
                await self._answer_question()
            await self._attempts.changed.wait()

    async def _answer_question(self) -> None:
        question, self._attempts.question = self._attempts.question, None
        if question is not None:
            is_stopped = self._is_stop_complete or self._writer.has_end_token
            delivered = Delivered(
                attempt=question.attempt,
                ids=tuple(self._writer.ids),
                cached_tokens=self._writer.cached_tokens,
                complete=FinishReason.STOP if is_stopped else self._finish_reason,
            )
            await self._control.tell_delivered(delivered)

    async def _read_attempt(self, subscription: TokenSubscription) -> None:
        """To the answer's end or the attempt's."""
        while not self._ending.is_answered and self._ending.error is None:
            event = await subscription.get()
            match event:
                case TokensArrived():
                    await self._take_tokens(event, subscription)
                case SequenceEnded():
                    await self._flush_and_finish(event.reason)
                case AttachRefused():
                    await self._await_closing(subscription.key.attempt, event.error)
                    return
                case AttemptClosed():
                    return

    async def _await_closing(self, attempt: Attempt, refusal: ServingError) -> None:
        """Decode knows the attempt no more: the scheduler says why, or its outcome breaks the answer off."""
        if refusal.code is ErrorCode.SUPERSEDED:
            self.supersede()
            return
        if refusal.code is ErrorCode.INVALID_REQUEST:
            # A gateway that is lost acknowledged what Redis, away then, has not: another attempt computes it again.
            self._attempts.close(attempt)
            self._control.dial_again()
            return
        try:
            async with asyncio.timeout(_REFUSED_WAIT_S):
                while not self._attempts.is_closed(attempt) and self._finish_reason is None:
                    self._attempts.changed.clear()
                    await self._attempts.changed.wait()
        except TimeoutError:
            _log.warning("attach refused", request_id=self._id, code=refusal.code.value)
            error = ServingError(ErrorCode.WORKER_LOST, "the answer was lost on its way")
            self.cancel(CancelReason.GATEWAY_LOST, error)

    async def _take_tokens(self, event: TokensArrived, subscription: TokenSubscription) -> None:
        self._journal.mark_first_token()
        if not self._writer.ids:  # a later attempt finds other blocks cached, which is no saving of the client's
            self._writer.cached_tokens = event.cached_tokens
        if self.log is not None:  # into Redis, then to the socket, then acknowledged
            await self.log.append(event, attempt=subscription.key.attempt)
            if self._ending.left.is_set():
                return
        parts = self._writer.feed(event.ids, event.logprobs)
        if parts[-1].is_stop:
            await self._finish_early(subscription, parts)
            return
        await self._writer.put(parts)
        self._acknowledge()

    async def _finish_early(self, subscription: TokenSubscription, parts: Sequence[TextPart]) -> None:
        """By a stop string: decode goes on until it hears of it."""
        subscription.finish(self._writer.num_tokens, FinishReason.STOP)
        await self._finish(parts, FinishReason.STOP, last_index=self._writer.num_tokens)

    async def _flush_and_finish(self, reason: FinishReason) -> None:
        """What was held back counts as one token more."""
        await self._finish(self._writer.flush(), reason, last_index=self._writer.num_tokens + 1)

    async def _finish(self, parts: Sequence[TextPart], reason: FinishReason, *, last_index: int) -> None:
        """The last parts of the text, up to that of token `last_index`, and the end.

        Nothing where the answer was broken off in the same pass of the loop, before the scope's cancel came through:
        the client is told that error behind the text, and an answer has one head and one end.
        """
        if self._ending.error is not None:
            await self._writer.put(parts, last_index=last_index)
            return
        self._ending.is_answered = True  # from here on nothing breaks it off: it only waits for room
        self._finish_reason = reason
        self._attempts.changed.set()
        if self.log is not None:
            await self.log.end(Outcome(state=RequestState.FINISHED, finish_reason=reason))
        await self._writer.put_end(parts, reason, last_index=last_index)

    # ---- acknowledgements

    def _on_taken(self, frame: Frame) -> None:
        if frame.has_text:
            self._journal.mark_first_text_sent(is_stream=self.is_stream)
        if self._writer.taken(frame):
            self._acknowledge()
            if self._has_taken_all:
                self._attempts.changed.set()

    def _acknowledge(self) -> None:
        """Tokens without text of their own count as taken once everything before them is."""
        if not self._client_gone.is_set():
            self._acknowledge_upto(self._writer.num_tokens if self._has_taken_all else self._writer.taken_index)

    @property
    def _has_taken_all(self) -> bool:
        """While no client is there nothing more is taken."""
        return self._writer.has_taken_all and not self._client_gone.is_set()

    def _acknowledge_all(self) -> None:
        if self._ending.is_answered and self._ending.cancel_reason is None:
            self._acknowledge_upto(self._writer.num_tokens)

    def _acknowledge_upto(self, index: int) -> None:
        if self._subscription is not None:
            self._subscription.ack(index if self.log is None else self.log.secured(index))

    def _on_secured(self) -> None:
        """Redis has what it lacked, or is not waited for any longer."""
        self._acknowledge()
        if self.link.is_over.is_set():
            self._acknowledge_all()

    # ---- the client

    def _on_gone(self) -> None:
        if self.log is not None:
            self._client_gone.set()
            return
        self.cancel(CancelReason.DISCONNECT, ServingError(ErrorCode.CANCELLED, "the client left"))

    def _on_stalled(self) -> bytes | None:
        error = ServingError(ErrorCode.SLOW_CLIENT, "the client did not read for too long")
        self.cancel(CancelReason.SLOW_CLIENT, error)
        return self._writer.last_words(error)

    # ---- for the control line

    @property
    def _session_number(self) -> int:
        return 0 if self.log is None else self.log.session

    def _progress(self) -> tuple[Attempt, int]:
        """The last attempt seen and the tokens held."""
        logged = Attempt(0) if self.log is None else self.log.last_attempt
        return max(self._attempts.last_seen, logged), self._writer.num_tokens
