"""Tokens in, frames for the client out: text, events and end of one answer, and what the client has taken of them."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace

from gateway import sse
from gateway.answer import ClientLink, Frame, Head
from gateway.answer_text import TextPart
from gateway.errors import error_body, error_headers, http_status
from gateway.intake import AnswerForm, Intake
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from shared.aio.channel import ChannelClosed
from shared.domain.errors import ServingError
from shared.domain.ids import TokenId
from shared.domain.logged import LoggedTokens
from shared.domain.request import FinishReason, Usage
from shared.domain.sampling import TokenLogprobs

# Logged tokens that are shown again in one frame: some 10 KiB, so that a slow reader holds little.
_TOKENS_SHOWN_AT_ONCE = 64


class AnswerWriter:
    """Every `put` waits for room in the link; where the client is gone nothing is put.

    The text of a stream leaves with the tokens; of a whole answer it is kept for its one body.
    """

    def __init__(
        self, intake: Intake, identity: Identity, served: ServedForm, *, link: ClientLink, model: str, from_index: int
    ) -> None:
        """`from_index`: of a resumable answer the client has the text of tokens 1..from_index."""
        self._intake = intake
        self._identity = identity
        self._served = served
        self._link = link
        self._model = model
        self._stream = sse.EventStream(served.encoder(identity, model), from_index if intake.is_resumable else None)
        self._parts: list[TextPart] = []  # of a whole answer
        self._unput = b""  # made, and cut off while it waited for room
        self.ids: list[TokenId] = []
        """The whole answer so far."""
        self.cached_tokens = 0
        self._queued_index = 0  # of the last frame that the link was given
        self.taken_index = 0
        """Of the last frame that the socket took."""

    @property
    def is_stream(self) -> bool:
        """Whether the client gets its answer bit by bit."""
        return self._intake.form is not AnswerForm.WHOLE

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def has_taken_all(self) -> bool:
        """A whole answer's tokens are taken when they are in its body."""
        return self.taken_index == self._queued_index

    @property
    def has_end_token(self) -> bool:
        """Whether decode made nothing behind the last token here, though nobody may have said so."""
        intake = self._intake
        eos_ids = () if intake.ignore_eos else intake.eos_ids
        return bool(self.ids) and intake.sampling.is_end(self.ids[-1], index=self.num_tokens, eos_ids=eos_ids)

    def is_whole(self, reason: FinishReason | None) -> bool:
        """Whether an answer without a stop string that ended so can have ended with the last token here."""
        if reason is FinishReason.LENGTH:
            return self.num_tokens == self._intake.max_tokens
        return self.has_end_token

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt_tokens=len(self._intake.prompt_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.cached_tokens,
        )

    def start(self, position: int) -> None:
        """At admission: the headers and a first comment leave, if anyone is there. Later only the position is told."""
        if not self.is_stream:
            return
        match self._stream.state:
            case sse.StreamState.NOT_STARTED:
                self._link.out.try_put(Head(status=200, headers={**sse.HEADERS, **self._identity.headers}))
                self._link.out.try_put(Frame(data=self._stream.start(position)))
            case sse.StreamState.STREAMING if position:
                self._link.out.try_put(Frame(data=sse.queued_comment(position)))
            case _:
                pass

    def feed(self, ids: Sequence[TokenId], all_logprobs: Sequence[TokenLogprobs]) -> list[TextPart]:
        """A part a token, up to the one that completes a stop string. Nothing is put."""
        parts: list[TextPart] = []
        for token_id, logprobs in zip(ids, all_logprobs or (None,) * len(ids), strict=True):
            parts.append(self._intake.text.feed(token_id, logprobs))
            self.ids.append(token_id)
            if parts[-1].is_stop:
                break
        return parts

    async def put(self, parts: Sequence[TextPart], *, last_index: int | None = None) -> None:
        """The text up to that of token `last_index`, by default the newest: one delta a token, also of several."""
        last_index = self.num_tokens if last_index is None else last_index
        if not self.is_stream:
            self._parts += parts
        elif any(part.text for part in parts) and not self._stream.is_over:  # one that stalled has had its last words
            await self._put_text(self._stream.deltas(parts, last_index - len(parts) + 1))

    async def show_logged(self, logged: LoggedTokens) -> bool:
        """All before this session: what the client has goes through the detokenizer alone. As `put_again`."""
        self.start(0)
        self.cached_tokens = logged.cached_tokens
        return await self.put_again(logged.ids, logged.logprobs)

    async def put_again(self, ids: Sequence[TokenId], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Tokens of an earlier session. Whether a stop string ends them. Other answers have their turn in between."""
        parts: list[TextPart] = []
        for start in range(0, len(ids), _TOKENS_SHOWN_AT_ONCE):
            stop = start + _TOKENS_SHOWN_AT_ONCE
            parts = self.feed(ids[start:stop], logprobs[start:stop])
            await self.put(parts)
            await asyncio.sleep(0)  # room is no wait: a log of a whole window would hold up everybody for 0.1 s
        return bool(parts) and parts[-1].is_stop

    def flush(self) -> list[TextPart]:
        """What was held back, for `put_end` or `tell_error`."""
        return [self._intake.text.flush()]

    async def put_end(self, parts: Sequence[TextPart], reason: FinishReason, *, last_index: int) -> None:
        """The last parts of the text, up to that of token `last_index`, and the end, as one frame."""
        if self.is_stream:
            text = self._stream.deltas(parts, last_index - len(parts) + 1)
            data = text + self._stream.finish(reason, self.usage)
            await self._put_text(data, has_text=any(part.text for part in parts))
            return
        choice = sse.choice_object(
            self._intake.choice or 0, [*self._parts, *parts], reason, has_logprobs=self._intake.has_logprobs
        )
        body = sse.completion_object(
            completion_id=self._identity.completion_id,
            model=self._model,
            created_unix_s=self._served.created_unix_s,
            choices=[choice],
            usage=self.usage,
        )
        await self._put_whole(200, {}, json.dumps(body).encode())

    async def tell_error(self, error: ServingError, rest: Sequence[TextPart] = ()) -> None:
        """In the stream where it has started, behind all text, the last of which is `rest`; else as a status."""
        match self._stream.state:
            case sse.StreamState.NOT_STARTED:
                await self._put_whole(http_status(error), error_headers(error), error_body(error))
            case sse.StreamState.STREAMING:
                text = self._stream.deltas(rest, self.num_tokens + 1)
                await self._put(Frame(data=text + self._stream.error(error), has_text=any(part.text for part in rest)))
            case sse.StreamState.DONE | sse.StreamState.ERRORED:
                pass  # a client that has stalled got it already

    def last_words(self, error: ServingError) -> bytes | None:
        """For a client that has stalled; None where its answer cannot be ended well."""
        return self._stream.error(error) if self._stream.state is sse.StreamState.STREAMING else None

    def taken(self, frame: Frame) -> bool:
        """The socket took it. Whether it is about tokens."""
        if frame.token_index is None:
            return False
        self.taken_index = frame.token_index
        return True

    async def _put_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._put(Head(status=status, headers={**headers, **self._identity.headers}))
        await self._put(Frame(data=body, token_index=self.num_tokens, has_text=status == 200))

    async def _put_text(self, data: bytes, *, has_text: bool = True) -> None:
        await self._put(Frame(data=data, token_index=self.num_tokens, has_text=has_text))
        self._queued_index = self.num_tokens

    async def _put(self, item: Head | Frame) -> None:
        """Text that was cut off while it waited goes first: the stream counts it as said."""
        if isinstance(item, Frame):
            if self._unput:
                item = replace(item, data=self._unput + item.data, has_text=True)
            self._unput = item.data
        with contextlib.suppress(ChannelClosed):
            await self._link.out.put(item)
        self._unput = b""
