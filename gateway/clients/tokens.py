"""Output tokens from decode workers: one shared `Decode.Tokens` stream per (address, incarnation). Wire stops here.

What decode must know of a subscription (attached, acknowledged, finished) is kept as a state and not as a queue of
messages: the writer sends what the present call has not been told yet. So nothing grows while a stream is broken, and a
new one is told everything again, from the first token that is still wanted.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from grpc.aio import AioRpcError, StreamStreamCall

from gateway.clients.link import CALL_ERRORS
from shared.aio.backoff import Backoff
from shared.aio.scope import spawn
from shared.codec.errors import detail_to_error
from shared.codec.request import (
    finish_reason_from_wire,
    finish_reason_to_wire,
    key_from_wire,
    key_to_wire,
    logprobs_from_wire,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, RequestKey, TokenId
from shared.domain.refusals import RefusedKind
from shared.domain.request import FinishReason
from shared.domain.sampling import TokenLogprobs
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.rpc.calls import end_call
from shared.rpc.channels import ChannelPool
from shared.wire import decode_pb2, decode_pb2_grpc

# Decode sends at most its outbox (256 tokens) ahead of the acknowledgement; far more means a peer without a bound.
MAX_UNTAKEN_TOKENS = 65_536
# More than requests can end while one write is held up; what is dropped then, decode finds out by its own clock.
MAX_FAREWELLS = 8192
# A message costs both ends more than a token does: acknowledgements wait for others, unless decode has little room. A
# quarter of the outbox (256 tokens) is the least that decode passes on to its engine.
ACK_TOKENS = 64
ACK_WAIT_S = 0.1

TokensCall: TypeAlias = "StreamStreamCall[decode_pb2.TokensUp, decode_pb2.TokensDown]"

_log = get_logger("tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """The next tokens, in order and without gaps. `cached_tokens` counts with the first ones only."""

    ids: tuple[TokenId, ...]
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, or none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnded:
    """`index` is the last token's."""

    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRefused:
    """Nothing more will come; how the request ends is for the scheduler to say."""

    error: ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptClosed:
    """The attempt is over for us: what came before this is all that counts of it."""


TokenEvent: TypeAlias = TokensArrived | SequenceEnded | AttachRefused | AttemptClosed


class TokenSubscription:
    """One attempt's tokens. Made by `TokenStreams.attach`; `close` it always."""

    def __init__(
        self,
        stream: "TokenStream",
        key: RequestKey,
        ticket: bytes,
        from_index: int,
        session: int = 0,
        *,
        acks_at_once: bool = False,
    ) -> None:
        """`acks_at_once`: decode has room for few tokens, and waits for each acknowledgement."""
        self.key = key
        self._acks_at_once = acks_at_once
        self._session = session
        self._stream = stream
        self._ticket = ticket
        self._next_index = from_index
        self._acked_index = from_index - 1
        self._finish: tuple[int, FinishReason] | None = None
        self._events: deque[TokenEvent] = deque()
        self._num_untaken = 0
        self._arrived = asyncio.Event()
        self._is_over = False
        self._is_refused = False
        self._told_attach = False
        self._told_ack = 0
        self._told_finish = False

    @property
    def next_index(self) -> int:
        """Of the first token that has not come yet."""
        return self._next_index

    async def get(self) -> TokenEvent:
        """The next event, all tokens that are there as one. Nothing comes after another one: do not ask again."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        while isinstance(event, TokensArrived) and self._events and isinstance(self._events[0], TokensArrived):
            more = self._events[0]
            self._events.popleft()
            event = replace(event, ids=event.ids + more.ids, logprobs=event.logprobs + more.logprobs)
        if isinstance(event, TokensArrived):
            self._num_untaken -= len(event.ids)
        return event

    def ack(self, index: int) -> None:
        """All text that comes from tokens 1..index has been taken. Older acknowledgements change nothing."""
        if index > self._acked_index:
            self._acked_index = index
            if self._is_ack_urgent:
                self._stream.wake()
            else:
                self._stream.wake_later()

    @property
    def _is_ack_urgent(self) -> bool:
        return self._acks_at_once or self._is_over or self._acked_index - self._told_ack >= ACK_TOKENS

    def finish(self, index: int, reason: FinishReason) -> None:
        """The answer is complete at `index`: it acknowledges everything, and what lies beyond is not wanted."""
        self._finish = (index, reason)
        self._is_over = True
        self._stream.wake()

    def conclude(self, reason: FinishReason) -> None:
        """The end became known by another way (the scheduler's outcome): what has come is all there is."""
        self._add(SequenceEnded(index=self._next_index - 1, reason=reason))

    def cut(self) -> None:
        """Detach at once; what has come can still be taken, and then AttemptClosed."""
        self._add(AttemptClosed())
        self._stream.remove(self)

    def close(self) -> None:
        self._stream.remove(self)

    def receive(self, message: decode_pb2.SequenceTokens) -> None:
        """Takes what is new in it; a gap is asked for again."""
        if self._is_over:
            return
        if message.ids:
            skipped = self._next_index - message.first_index
            if skipped < 0:
                self._told_attach = False
                self._stream.wake()
                return
            ids = tuple(map(TokenId, message.ids[skipped:]))
            if ids:
                self._next_index += len(ids)
                self._num_untaken += len(ids)
                cached = message.cached_tokens if message.first_index == 1 else 0
                logprobs = tuple(map(logprobs_from_wire, message.logprobs[skipped:]))
                self._add(TokensArrived(ids=ids, cached_tokens=cached, logprobs=logprobs))
        reason = finish_reason_from_wire(message.end.reason) if message.HasField("end") else None
        if reason is not None and message.end.index == self._next_index - 1:
            self._add(SequenceEnded(index=message.end.index, reason=reason))
        elif self._num_untaken > MAX_UNTAKEN_TOKENS:
            self.refuse(ServingError(ErrorCode.INTERNAL, "the server failed"), self._session)

    def refuse(self, error: ServingError, session: int) -> None:
        """Nothing where that was the attach of another session, which this one has replaced here."""
        if session != self._session:
            return
        self._is_refused = True
        self._add(AttachRefused(error=error))

    def forget_told(self) -> None:
        """A new call knows nothing."""
        self._told_attach = False
        self._told_ack = 0
        self._told_finish = False

    def untold(self, *, with_acks: bool = True) -> Iterator[decode_pb2.TokensUp]:
        """What the present call must still be told, marked as told.

        Without `with_acks` no acknowledgement that can wait.
        """
        key = key_to_wire(self.key)
        if self._is_refused:
            return
        if not self._told_attach:  # also after the last token: until all is acknowledged decode keeps the sequence
            self._told_attach = True
            yield decode_pb2.TokensUp(
                attach=decode_pb2.Attach(
                    key=key, from_index=self._next_index, ticket=self._ticket, session=self._session
                )
            )
        if self._finish is not None:
            if not self._told_finish:
                self._told_finish = True
                index, reason = self._finish
                finish = decode_pb2.Finish(
                    key=key, index=index, reason=finish_reason_to_wire(reason), session=self._session
                )
                yield decode_pb2.TokensUp(finish=finish)
        elif self._acked_index > self._told_ack and (with_acks or self._is_ack_urgent):
            self._told_ack = self._acked_index
            ack = decode_pb2.TokenAck(key=key, index=self._acked_index, session=self._session)
            yield decode_pb2.TokensUp(ack=ack)

    def _add(self, event: TokenEvent) -> None:
        if self._is_over:
            return
        self._is_over = not isinstance(event, TokensArrived)
        self._events.append(event)
        self._arrived.set()


class TokenStream:
    """The stream to one worker process. Runs while it is whole or somebody is subscribed."""

    def __init__(self, stub: "decode_pb2_grpc.DecodeAsyncStub", address: str, metrics: Metrics) -> None:
        self._stub = stub
        self._address = address
        self._metrics = metrics
        self._subscriptions: dict[RequestKey, TokenSubscription] = {}
        # Up to three messages for each subscription that ended since the writer last ran.
        self._farewells: deque[decode_pb2.TokensUp] = deque(maxlen=MAX_FAREWELLS)
        self._has_news = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None  # while acknowledgements wait for others
        self._are_acks_due = False

    @property
    def is_idle(self) -> bool:
        return not self._subscriptions

    def wake(self) -> None:
        """There is something to tell."""
        self._has_news.set()

    def wake_later(self) -> None:
        """There is an acknowledgement to tell, within ACK_WAIT_S."""
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_WAIT_S, self._tell_acks)

    def _tell_acks(self) -> None:
        self._ack_timer = None
        self._are_acks_due = True
        self.wake()

    def add(self, subscription: TokenSubscription) -> None:
        self._subscriptions[subscription.key] = subscription
        self.wake()

    def remove(self, subscription: TokenSubscription) -> None:
        if self._subscriptions.get(subscription.key) is subscription:
            # What was not told yet (the last acknowledgement) goes before the farewell.
            del self._subscriptions[subscription.key]
            self._farewells.extend((*subscription.untold(), _detach(subscription.key)))
            self.wake()

    async def run(self) -> None:
        """Dials until nobody is subscribed to a broken stream. The worker may be gone: the scheduler will say so."""
        backoff = Backoff(initial_s=0.05, max_s=1.0, random=random.random)
        while True:
            try:
                await self._run_call(backoff)
            except Exception:  # noqa: BLE001 - other requests' tokens come on the next call
                _log.exception("token stream failed", address=self._address)
            if self.is_idle:
                return
            _log.info("token stream broken", address=self._address, num_subscriptions=len(self._subscriptions))
            await asyncio.sleep(backoff.next_delay())

    async def _run_call(self, backoff: Backoff) -> None:
        """One call, to its end."""
        self._farewells.clear()
        for subscription in self._subscriptions.values():
            subscription.forget_told()
        self.wake()
        call = self._stub.Tokens()
        async with asyncio.TaskGroup() as group:
            writer = spawn(group, self._write(call), name=f"tokens to {self._address}")
            try:
                async for message in _messages(call):
                    backoff.reset()
                    self._dispatch(message)
            finally:
                end_call(call)
                writer.cancel()

    async def _write(self, call: TokensCall) -> None:
        """Ends quietly with the call: the reader sees that too."""
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                with_acks, self._are_acks_due = self._are_acks_due, False
                while self._farewells:
                    await call.write(self._farewells.popleft())
                for subscription in list(self._subscriptions.values()):
                    for message in subscription.untold(with_acks=with_acks):
                        await call.write(message)
        except CALL_ERRORS:
            return

    def _dispatch(self, message: decode_pb2.TokensDown) -> None:
        match message.WhichOneof("message"):
            case "batch":
                for sequence in message.batch.sequences:
                    subscription = self._subscriptions.get(key_from_wire(sequence.key))
                    if subscription is None:
                        self._metrics.refused(RefusedKind.DETACHED_TOKENS)
                    else:
                        subscription.receive(sequence)
            case "refused":
                subscription = self._subscriptions.get(key_from_wire(message.refused.key))
                if subscription is not None:
                    subscription.refuse(detail_to_error(message.refused.error), message.refused.session)
            case None:
                pass  # a newer worker says something that we do not know


class TokenStreams:
    """All streams of this gateway, by worker process."""

    def __init__(self, pool: ChannelPool, group: asyncio.TaskGroup, metrics: Metrics) -> None:
        """Streams run in `group`, which outlives every request."""
        self._pool = pool
        self._group = group
        self._metrics = metrics
        self._streams: dict[tuple[str, Incarnation], TokenStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(
        self,
        *,
        address: str,
        incarnation: Incarnation,
        key: RequestKey,
        ticket: bytes,
        from_index: int,
        session: int = 0,
        acks_at_once: bool = False,
    ) -> TokenSubscription:
        """Tokens of `key` from `from_index` on, as soon as the worker sends them. Never waits."""
        place = (address, incarnation)
        stream = self._streams.get(place)
        if stream is None:
            stub = decode_pb2_grpc.DecodeStub(self._pool.get(address))
            stream = self._streams[place] = TokenStream(stub, address, self._metrics)
            task = spawn(self._group, self._run(place, stream), name=f"tokens from {address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        subscription = TokenSubscription(stream, key, ticket, from_index, session, acks_at_once=acks_at_once)
        stream.add(subscription)
        return subscription

    def close(self) -> None:
        """Ends all streams; call it when no session is left."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, place: tuple[str, Incarnation], stream: TokenStream) -> None:
        try:
            await stream.run()
        finally:
            del self._streams[place]
        address, _ = place
        if not any(address == other for other, _ in self._streams):
            await self._pool.drop(address)  # the worker is gone, or its next start has the port


def _detach(key: RequestKey) -> decode_pb2.TokensUp:
    return decode_pb2.TokensUp(detach=decode_pb2.Detach(key=key_to_wire(key)))


async def _messages(call: TokensCall) -> AsyncIterator[decode_pb2.TokensDown]:
    """Ends where the call ends, however it does."""
    try:
        async for message in call:
            yield message
    except AioRpcError:
        return
