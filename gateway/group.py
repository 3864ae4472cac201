"""Several answers to one question (`n` > 1): a session each, as children `<id>.0`, `<id>.1`, ... of one client.

    child sessions ──Heads, Frames──▶ ┌───────┐ ──one Head, all Frames──▶ client link ──▶ socket
                   ◀─taken, gone───── │ group │ ◀─taken, gone, stalled──┘
                                      └───────┘

Scheduler and workers know nothing of it. The head leaves when every child is admitted, and the first child that fails
ends all: the client gets every answer or one error.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

from gateway import sse
from gateway.answer import ClientLink, Frame, Head
from gateway.errors import error_body, error_headers, http_status
from gateway.intake import AnswerForm, Intake
from gateway.journal import Journal
from gateway.request_id import Identity
from gateway.services import Services
from gateway.session import Session
from shared.aio.channel import ChannelClosed
from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import CancelReason, RequestState, Usage


class SessionGroup:
    """Looks like a `Session`: make it, `spawn` its `run`, hand its `link` to an Answer."""

    def __init__(
        self,
        services: Services,
        intake: Intake,
        identity: Identity,
        journal: Journal,
        child_journal: Callable[[Identity], Journal],
        *,
        key_hash: str = "",
    ) -> None:
        """`intake` has children; `child_journal` makes the journal of one."""
        self._services = services
        self._intake = intake
        self.deadline = intake.deadline
        self._identity = identity
        self._journal = journal
        self._created_unix_s = services.clock.unix_ms() // 1000
        self.link = ClientLink(on_taken=self._on_taken, on_gone=self._on_gone, on_stalled=self._on_stalled)
        identities = [identity.child(choice) for choice in range(len(intake.children))]
        self._children = [
            Session(services, question, child, child_journal(child), key_hash=key_hash)
            for question, child in zip(intake.children, identities, strict=True)
        ]
        self._bodies: list[bytes] = [b""] * len(self._children)  # of whole answers
        self._num_admitted = 0
        self._has_head = False
        """A stream has begun: its client hears of an error in it, behind all text."""
        self._is_settled = asyncio.Event()
        """All are admitted, or one has failed."""
        self._error: ServingError | None = None
        self._is_ended = False

    @property
    def is_stream(self) -> bool:
        """Whether the client gets its answers bit by bit."""
        return self._intake.form is not AnswerForm.WHOLE

    def cancel(self, reason: CancelReason, error: ServingError) -> None:
        """Ends all answers that are not complete; the first reason counts."""
        if self._journal.cancel_reason is None:
            self._journal.cancel_reason = reason
        for child in self._children:
            child.cancel(reason, error)

    async def run(self) -> None:
        """To the end of the last child; raises nothing but a cancellation."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice, child in enumerate(self._children):
                    spawn(group, child.run(), name=f"session {self._identity.request_id}.{choice}")
                async with asyncio.TaskGroup() as pumps:
                    for choice, child in enumerate(self._children):
                        spawn(pumps, self._pump(choice, child), name=f"choice {self._identity.request_id}.{choice}")
                await self._tell_end()
                self.link.out.close()
                await self.link.is_over.wait()  # the stall clock bounds it
                for child in self._children:
                    child.link.is_over.set()
        finally:
            self.link.out.close()
            self._journal.usage = self._usage()
            self._journal.write(self._end_state(), self._error)

    async def _pump(self, choice: int, child: Session) -> None:
        """Everything of one child to the client, until it has ended."""
        with contextlib.suppress(ChannelClosed):
            while True:
                item = await child.link.out.get()
                match item:
                    case Head(status=200):
                        self._admit()
                    case Head():
                        break
                    case Frame():
                        await self._is_settled.wait()
                        await self._pass_on(choice, child, item)
        if child.error is not None:
            self._fail(child.error)

    async def _pass_on(self, choice: int, child: Session, frame: Frame) -> None:
        if self._error is not None and not self._has_head:
            return
        if not self.is_stream:
            self._bodies[choice] = frame.data
            child.link.on_taken(frame)  # taking it into the body is taking
        elif frame.data:
            await self.link.out.put(replace(frame, choice=choice))

    def _admit(self) -> None:
        self._num_admitted += 1
        if self._num_admitted < len(self._children) or self._is_settled.is_set():
            return
        if self.is_stream:
            self._has_head = self.link.out.try_put(Head(status=200, headers={**sse.HEADERS, **self._identity.headers}))
        self._is_settled.set()

    def _fail(self, error: ServingError) -> None:
        """The first error counts; the other children are cancelled, and end a stream with the text that they have."""
        if self._error is not None:
            return
        self._error = error
        self._is_settled.set()
        sibling = ServingError(ErrorCode.CANCELLED, "another answer to the same question failed")
        for child in self._children:
            if child.error is None:
                child.cancel(CancelReason.SIBLING, sibling)
            if not self._has_head:
                _end_link(child)

    async def _tell_end(self) -> None:
        """The one end of all answers, or the one error."""
        with contextlib.suppress(ChannelClosed):
            if self._error is None:
                self._is_ended = True
                if self.is_stream:
                    await self.link.out.put(Frame(data=self._encoder().end(self._usage())))
                else:
                    await self._put_whole(200, {}, self._whole())
            elif self._has_head:
                await self.link.out.put(Frame(data=self._encoder().error(self._error)))
            else:
                await self._put_whole(http_status(self._error), error_headers(self._error), error_body(self._error))

    async def _put_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self.link.out.put(Head(status=status, headers={**headers, **self._identity.headers}))
        await self.link.out.put(Frame(data=body))

    def _whole(self) -> bytes:
        answer = sse.completion_object(
            completion_id=self._identity.completion_id,
            model=self._services.served_model_name,
            created_unix_s=self._created_unix_s,
            choices=[json.loads(body)["choices"][0] for body in self._bodies],
            usage=self._usage(),
        )
        return json.dumps(answer).encode()

    def _encoder(self) -> sse.OpenAiEncoder:
        return sse.OpenAiEncoder(
            completion_id=self._identity.completion_id,
            model=self._services.served_model_name,
            created_unix_s=self._created_unix_s,
            include_usage=self._intake.include_usage,
        )

    def _usage(self) -> Usage:
        """The prompt once, all answers; cached is what no child had to compute."""
        usages = [child.usage for child in self._children]
        return Usage(
            prompt_tokens=len(self._intake.prompt_ids),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=min(usage.cached_tokens for usage in usages),
        )

    def _end_state(self) -> RequestState:
        if self._is_ended and self._error is None:
            return RequestState.FINISHED
        is_cancelled = self._journal.cancel_reason not in (None, CancelReason.DEADLINE) or (
            self._error is not None and self._error.code is ErrorCode.CANCELLED
        )
        return RequestState.CANCELLED if is_cancelled else RequestState.FAILED

    # ---- the client

    def _on_taken(self, frame: Frame) -> None:
        if self.is_stream:
            self._children[frame.choice].link.on_taken(frame)

    def _on_gone(self) -> None:
        self.cancel(CancelReason.DISCONNECT, ServingError(ErrorCode.CANCELLED, "the client left"))
        for child in self._children:
            _end_link(child)

    def _on_stalled(self) -> bytes | None:
        error = ServingError(ErrorCode.SLOW_CLIENT, "the client did not read for too long")
        is_under_way = self.is_stream and not self._is_ended and self._error is None
        self.cancel(CancelReason.SLOW_CLIENT, error)
        for child in self._children:
            _end_link(child)
        return self._encoder().error(error) if is_under_way else None


def _end_link(child: Session) -> None:
    """Nobody reads on: its session waits for nothing more."""
    child.link.out.close()
    child.link.is_over.set()
