"""A scheduler and a decode worker in one, for tests of the gateway alone: real gRPC on loopback, no engine.

It plays the script of the prompt as the real decode worker would: never more than `credit` tokens ahead of the
acknowledgement, the end after the last token, the outcome when everything was acknowledged. A test holds it at a place by
clearing an event, and reads what the gateway sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from shared.codec.errors import error_to_detail
from shared.codec.request import logprobs_to_wire, spec_from_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import TokenLogprobs
from shared.rpc.server import serve
from shared.text.script import SCRIPTED_EOS_ID, Script
from shared.wire import common_pb2, decode_pb2, decode_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

DECODE_INCARNATION = 77
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True, kw_only=True)
class FakeRequest:
    """One request as the backend sees it."""

    spec: RequestSpec
    starts: list[scheduler_pb2.Start] = field(default_factory=list)
    cancel_reasons: list[str] = field(default_factory=list)
    attaches: list[decode_pb2.Attach] = field(default_factory=list)
    acked: int = 0
    num_sent: int = 0
    attempt: int = 1
    is_requeued: bool = False
    deliveries: list[scheduler_pb2.Delivered] = field(default_factory=list)
    context: Any = None  # of the Serve stream that counts
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # grpc takes one message of it at a time
    finish: decode_pb2.Finish | None = None
    is_detached: bool = False
    outcome: scheduler_pb2.Outcome | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[TokenId]:
        """The whole answer: up to the end token or `max_tokens`."""
        script = Script.from_prompt(self.spec.prompt_ids)
        ids: list[TokenId] = []
        for token_id in script.output_ids():
            ids.append(token_id)
            if len(ids) == self.spec.max_tokens or (token_id == SCRIPTED_EOS_ID and not self.spec.ignore_eos):
                break
        return ids

    def touch(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class FakeBackend(scheduler_pb2_grpc.SchedulerServicer, decode_pb2_grpc.DecodeServicer):
    """Set its attributes before or while it serves."""

    def __init__(self) -> None:
        self.requests: dict[str, FakeRequest] = {}
        self.arrived = asyncio.Event()
        self.refusal: ServingError | None = None
        # Fails the request after so many tokens, which have been acknowledged: nothing of them is on its way.
        self.failure_after: tuple[int, ServingError] | None = None
        self.failing_suffix = ""  # refusal and failure are for requests whose id ends so
        self.may_admit = _set_event()
        self.may_place = _set_event()
        self.max_tokens_out: int | None = None  # no token beyond it is sent
        self.credit = 256
        self.batch = 1
        self.cached_tokens = 0
        self.gives_logprobs = True  # made up (see `made_up_logprobs`), where a request asks for them
        self.ready_roles = ["prefill", "decode"]
        self.is_redis_ready = True
        self.max_request_tokens = 10_000
        self.confirms_outcome = True
        self.cancel_reply: scheduler_pb2.CancelReply | None = None
        self.cancelled_ids: list[str] = []
        self.num_token_calls = 0
        self.keeps_open = False  # no outcome when everything was acknowledged
        self.tells_end = True  # else the worker is lost between its last token and the word that it was the last
        self.cut_control_on_delivered = False  # breaks the control stream once, as if Delivered had been lost
        self.cut_streams_after: int | None = None  # breaks the token stream once, after so many tokens
        self.address = ""
        self.epoch = 5

    @property
    def only(self) -> FakeRequest:
        """The one request that there was."""
        (request,) = self.requests.values()
        return request

    def let_out(self, max_tokens_out: int | None) -> None:
        """Moves the token beyond which nothing is sent."""
        self.max_tokens_out = max_tokens_out
        for request in self.requests.values():
            request.touch()

    # The generated base types describe the synchronous and the asynchronous API at once.
    async def Serve(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Any
    ) -> None:
        first = await context.read()
        start = first.start
        await self.may_admit.wait()
        if self.refusal is not None and start.spec.request_id.endswith(self.failing_suffix):
            raise self.refusal
        request = self.requests.setdefault(start.spec.request_id, FakeRequest(spec=spec_from_wire(start.spec)))
        request.starts.append(start)
        writing = asyncio.Lock()
        request.context, request.writing = context, writing
        self.arrived.set()
        request.touch()
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read_up(request, context))
            if request.is_requeued:
                await self._ask(request)
            else:
                async with writing:
                    await context.write(self._down(queued=scheduler_pb2.Queued(position=len(self.requests) - 1)))
            place = group.create_task(self._place(request, context, writing))
            while request.outcome is None:
                await request.changed.wait()
            async with writing:  # a task that is cancelled in the middle of a write takes the whole call with it
                place.cancel()
                if self.confirms_outcome:
                    await context.write(self._down(outcome=request.outcome))
            reader.cancel()

    async def _place(self, request: FakeRequest, context: Any, writing: asyncio.Lock) -> None:
        """Each attempt once on each stream."""
        last = 0
        while True:
            while request.is_requeued or request.attempt == last:
                await request.changed.wait()
            await self.may_place.wait()
            last = request.attempt
            placed = scheduler_pb2.Placed(
                attempt=last,
                decode_worker_id="decode-0",
                decode_address=self.address,
                decode_incarnation=DECODE_INCARNATION,
                attach_ticket=b"ticket",
                prefill_worker_id="prefill-0",
            )
            async with writing:
                await context.write(self._down(placed=placed))

    async def _read_up(self, request: FakeRequest, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("delivered"):
                await self._take_delivered(request, message.delivered, context)
            else:
                request.cancel_reasons.append(message.cancel.reason)
                self._end(request, _cancelled())
            request.touch()

    async def requeue(self) -> None:
        """Closes the present attempt of the only request; the next is placed behind what its gateway says it holds."""
        request = self.only
        request.is_requeued = True
        request.touch()
        await self._ask(request)

    async def _ask(self, request: FakeRequest) -> None:
        requeued = scheduler_pb2.Requeued(attempt=request.attempt, reason="preempted")
        context, writing = request.context, request.writing
        async with writing:
            await context.write(self._down(requeued=requeued))

    async def _take_delivered(self, request: FakeRequest, told: scheduler_pb2.Delivered, context: Any) -> None:
        request.deliveries.append(told)
        if self.cut_control_on_delivered:
            self.cut_control_on_delivered = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        assert request.tokens[: len(told.ids)] == list(told.ids)
        if told.complete:
            self._end(request, _finished(told.finish_reason))
        elif request.is_requeued and told.attempt == request.attempt:
            request.attempt += 1
            request.is_requeued = False

    async def Cancel(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: scheduler_pb2.CancelRequest, context: Any
    ) -> scheduler_pb2.CancelReply:
        self.cancelled_ids.append(request.request_id)
        known = self.requests.get(request.request_id)
        if known is None or known.starts[0].key_hash != request.key_hash:
            raise ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request", param="id")
        self._end(known, _cancelled())
        known.touch()
        return self.cancel_reply or scheduler_pb2.CancelReply(
            released=True, outcome=scheduler_pb2.OUTCOME_KIND_CANCELLED, blocks_freed=3
        )

    async def Session(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionUp], context: Any
    ) -> None:
        raise ServingError(ErrorCode.INTERNAL, "no worker dials this")

    async def Status(self, request: scheduler_pb2.StatusRequest, context: Any) -> scheduler_pb2.StatusReply:
        return scheduler_pb2.StatusReply(
            scheduler_epoch=self.epoch,
            services=[
                scheduler_pb2.ServiceStatus(role=role, id=f"{role}-0", pid=7, address="127.0.0.1:1", ready=True)
                for role in ("scheduler", *self.ready_roles)
            ],
            queue=2,
            requests={"decoding": 1},
            blocks=[scheduler_pb2.RoleBlocks(role="decode", states={"free": 9})],
            redis_ready=self.is_redis_ready,
            unreleased=0,
            max_request_tokens=self.max_request_tokens,
        )

    async def Tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[decode_pb2.TokensUp], context: Any
    ) -> None:
        self.num_token_calls += 1
        writing = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            senders: list[asyncio.Task[None]] = []
            while (message := await context.read()) is not grpc.aio.EOF:
                match message.WhichOneof("message"):
                    case "attach":
                        request = self.requests.get(message.attach.key.request_id)
                        is_known = request is not None and message.attach.key.attempt == request.attempt
                        if request is None or not is_known or message.attach.ticket != b"ticket":
                            async with writing:
                                await self._refuse_attach(message.attach, context)
                            continue
                        request.attaches.append(message.attach)
                        request.num_sent = message.attach.from_index - 1
                        request.touch()
                        senders.append(group.create_task(self._send_tokens(request, context, writing)))
                    case "ack":
                        request = self.requests[message.ack.key.request_id]
                        request.acked = max(request.acked, message.ack.index)
                        if request.acked == len(request.tokens) and not self.keeps_open:
                            self._end(request, _finished(self._reason(request)))
                        request.touch()
                    case "finish":
                        request = self.requests[message.finish.key.request_id]
                        request.finish = message.finish
                        self._end(request, _finished(message.finish.reason))
                        request.touch()
                    case "detach":
                        request = self.requests[message.detach.key.request_id]
                        request.is_detached = True
                        request.touch()
                    case _:
                        raise ServingError(ErrorCode.INTERNAL, "not in the protocol")
            for sender in senders:
                sender.cancel()

    async def _send_tokens(self, request: FakeRequest, context: Any, writing: asyncio.Lock) -> None:
        tokens, attempt = request.tokens, request.attempt
        key = common_pb2.RequestKey(request_id=request.spec.request_id, attempt=attempt)
        while request.num_sent < len(tokens) and request.outcome is None:
            if request.is_requeued or request.attempt != attempt:
                return
            is_failing = request.spec.request_id.endswith(self.failing_suffix)
            if self.failure_after is not None and is_failing and request.num_sent >= self.failure_after[0]:
                await self._until_acked(request, self.failure_after[0])
                self._end(request, _failed(self.failure_after[1]))
                request.touch()
                return
            limit = len(tokens) if self.max_tokens_out is None else self.max_tokens_out
            room = min(request.acked + self.credit, limit, len(tokens)) - request.num_sent
            if room <= 0:
                await request.changed.wait()
                continue
            ids = tokens[request.num_sent : request.num_sent + min(room, self.batch)]
            sequence = decode_pb2.SequenceTokens(key=key, first_index=request.num_sent + 1, ids=ids)
            if sequence.first_index == 1 or attempt > 1:
                sequence.cached_tokens = self.cached_tokens
            if self.gives_logprobs and request.spec.sampling.top_logprobs is not None:
                first = request.num_sent + 1
                sequence.logprobs.extend(
                    logprobs_to_wire(made_up_logprobs(index, token_id, request.spec.sampling.top_logprobs))
                    for index, token_id in enumerate(ids, start=first)
                )
            request.num_sent += len(ids)
            if request.num_sent == len(tokens) and self.tells_end:
                sequence.end.CopyFrom(decode_pb2.End(index=len(tokens), reason=self._reason(request)))
            async with writing:
                await context.write(decode_pb2.TokensDown(batch=decode_pb2.TokenBatch(sequences=[sequence])))
            request.touch()
            if self.cut_streams_after is not None and request.num_sent >= self.cut_streams_after:
                self.cut_streams_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def _until_acked(self, request: FakeRequest, index: int) -> None:
        while request.acked < index:
            await request.changed.wait()

    async def _refuse_attach(self, attach: decode_pb2.Attach, context: Any) -> None:
        detail = error_to_detail(ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such attempt"))
        refused = decode_pb2.AttachRefused(key=attach.key, error=detail, session=attach.session)
        await context.write(decode_pb2.TokensDown(refused=refused))

    def _reason(self, request: FakeRequest) -> "common_pb2.FinishReason.ValueType":
        ends_by_eos = request.tokens[-1] == SCRIPTED_EOS_ID and not request.spec.ignore_eos
        return STOP if ends_by_eos else LENGTH

    def _end(self, request: FakeRequest, outcome: scheduler_pb2.Outcome) -> None:
        """The first outcome stands."""
        if request.outcome is None:
            request.outcome = outcome

    def _down(self, **message: Any) -> scheduler_pb2.ServeDown:
        return scheduler_pb2.ServeDown(scheduler_epoch=self.epoch, **message)


def made_up_logprobs(index: int, token_id: TokenId, num_top: int) -> TokenLogprobs:
    """Exact in float32, told apart by the place in the answer; the likeliest are the token and bytes from `A` on."""
    ids = [token_id, *(TokenId(byte) for byte in range(ord("A"), ord("Z")))][:num_top]
    return TokenLogprobs(
        logprob=-index / 8, top=tuple((other, -index / 8 - rank / 4) for rank, other in enumerate(ids))
    )


@contextlib.asynccontextmanager
async def running(backend: FakeBackend, *, port: int = 0) -> AsyncGenerator[FakeBackend]:
    """Serves it while the body runs."""

    def add(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(backend, server)  # pyright: ignore[reportArgumentType]
        decode_pb2_grpc.add_DecodeServicer_to_server(backend, server)  # pyright: ignore[reportArgumentType]

    async with serve(add, host="127.0.0.1", port=port, token="", services=(), grace_s=0.0) as server:
        backend.address = server.address
        yield backend


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _finished(reason: "common_pb2.FinishReason.ValueType") -> scheduler_pb2.Outcome:
    return scheduler_pb2.Outcome(kind=scheduler_pb2.OUTCOME_KIND_FINISHED, finish_reason=reason)


def _cancelled() -> scheduler_pb2.Outcome:
    detail = error_to_detail(ServingError(ErrorCode.CANCELLED, "cancelled"))
    return scheduler_pb2.Outcome(kind=scheduler_pb2.OUTCOME_KIND_CANCELLED, error=detail, blocks_freed=2)


def _failed(error: ServingError) -> scheduler_pb2.Outcome:
    return scheduler_pb2.Outcome(kind=scheduler_pb2.OUTCOME_KIND_FAILED, error=error_to_detail(error))
