"""The `Decode.Tokens` streams: one a gateway, on it a batch of tokens an engine step.

Nothing is queued here. A stream knows which of its sequences have news and reads their outboxes from the next unsent
index when it gets to write: a slow stream gets fewer, larger batches, and the outboxes bound what is on the way.
"""

import asyncio

from grpc import aio
from structlog.typing import FilteringBoundLogger

from decode_worker.sequence import HeldSequence
from decode_worker.service import DecodeService
from shared.aio.scope import spawn
from shared.codec.errors import error_to_detail
from shared.codec.request import (
    finish_reason_from_wire,
    finish_reason_to_wire,
    key_from_wire,
    key_to_wire,
    logprobs_to_wire,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestKey
from shared.wire import decode_pb2, decode_pb2_grpc

_Context = aio.ServicerContext[decode_pb2.TokensUp, decode_pb2.TokensDown]


class TokenStream:
    """What one gateway reads; a `TokenReader`."""

    def __init__(self) -> None:
        self._news: dict[RequestKey, HeldSequence] = {}
        self._last_parts: list[decode_pb2.SequenceTokens] = []  # of sequences that have failed, an outbox each at most
        self._wake = asyncio.Event()

    def touch(self, sequence: HeldSequence) -> None:
        self._news[sequence.key] = sequence
        self._wake.set()

    def flush(self, sequence: HeldSequence) -> None:
        part = self._unsent(sequence)
        if part is not None:
            self._last_parts.append(part)
            self._wake.set()

    async def next_batch(self) -> decode_pb2.TokenBatch:
        """Waits for news; everything unsent of every sequence that has some, in one message."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, {}
            last_parts, self._last_parts = self._last_parts, []
            parts = last_parts + [part for sequence in news.values() if (part := self._unsent(sequence)) is not None]
            if parts:
                return decode_pb2.TokenBatch(sequences=parts)

    def _unsent(self, sequence: HeldSequence) -> decode_pb2.SequenceTokens | None:
        """Marks it as sent. None where there is nothing, or another stream reads the sequence by now."""
        if sequence.reader is not self:
            return None
        outbox = sequence.outbox
        first_index = max(sequence.next_unsent, outbox.acked_upto + 1)  # a Finish has taken the rest
        tokens = outbox.read(first_index)
        end = None if sequence.is_end_sent else outbox.end
        if not tokens and end is None:
            return None
        sequence.next_unsent = first_index + len(tokens)
        sequence.is_end_sent = outbox.end is not None
        return decode_pb2.SequenceTokens(
            key=key_to_wire(sequence.key),
            first_index=first_index,
            ids=[token.token_id for token in tokens],
            end=decode_pb2.End(index=end.index, reason=finish_reason_to_wire(end.reason)) if end else None,
            cached_tokens=sequence.cached_tokens if first_index == 1 else 0,
            logprobs=[logprobs_to_wire(token.logprobs) for token in tokens if token.logprobs is not None],
        )


class DecodeTokens(decode_pb2_grpc.DecodeServicer):
    """The servicer of `Decode`."""

    def __init__(self, service: DecodeService, log: FilteringBoundLogger) -> None:
        self._service = service
        self._log = log

    # A coroutine that reads and writes, where the generated type wants a generator: both directions run at once.
    async def Tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: _Context
    ) -> None:
        stream = TokenStream()
        writing = asyncio.Lock()  # grpc takes one message at a time
        try:
            async with asyncio.TaskGroup() as group:
                writer = spawn(group, _write(stream, context, writing), name="tokens writer")
                await self._read(stream, context, writing)
                writer.cancel()
        finally:
            self._service.detach_all(stream)

    async def _read(self, stream: TokenStream, context: _Context, writing: asyncio.Lock) -> None:
        while (message := await context.read()) is not aio.EOF:
            match message.WhichOneof("message"):
                case "attach":
                    refused = self._attach(stream, message.attach)
                    if refused is not None:
                        async with writing:
                            await context.write(decode_pb2.TokensDown(refused=refused))
                case "ack":
                    self._service.ack(key_from_wire(message.ack.key), message.ack.index, stream, message.ack.session)
                case "finish":
                    self._finish(stream, message.finish)
                case "detach":
                    self._service.detach(key_from_wire(message.detach.key), stream)
                case _:  # what a newer gateway may add
                    self._log.warning("unknown message from a gateway")

    def _attach(self, stream: TokenStream, attach: decode_pb2.Attach) -> decode_pb2.AttachRefused | None:
        try:
            self._service.attach(
                key_from_wire(attach.key),
                ticket=attach.ticket,
                from_index=attach.from_index,
                reader=stream,
                session=attach.session,
            )
        except ServingError as error:
            return _refusal(attach, error)
        return None

    def _finish(self, stream: TokenStream, finish: decode_pb2.Finish) -> None:
        key = key_from_wire(finish.key)
        reason = finish_reason_from_wire(finish.reason)
        try:
            if reason is None:
                raise ServingError(ErrorCode.INVALID_REQUEST, "Finish without a reason")
            self._service.finish(key, finish.index, reason, stream, finish.session)
        except ServingError as error:  # the stream is shared: one gateway's mistake about one answer must not end it
            self._log.warning("finish refused", key=str(key), reason=error.message)


def _refusal(attach: decode_pb2.Attach, error: ServingError) -> decode_pb2.AttachRefused:
    return decode_pb2.AttachRefused(key=attach.key, error=error_to_detail(error), session=attach.session)


async def _write(stream: TokenStream, context: _Context, writing: asyncio.Lock) -> None:
    while True:
        batch = await stream.next_batch()
        async with writing:
            await context.write(decode_pb2.TokensDown(batch=batch))
