"""A worker and a gateway that speak the scheduler's protocol and do no work: a test says what they say."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc.aio

from shared.codec.request import spec_to_wire
from shared.domain.ids import RequestId, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.support.cancelled_calls import say_first

ANSWER_S = 60.0  # everything is on loopback; only a bug takes this long


def make_spec(request_id: str = "r1", *, prompt: int = 20, max_tokens: int = 10) -> RequestSpec:
    """A request of so many tokens."""
    return RequestSpec(
        request_id=RequestId(request_id),
        prompt_ids=tuple(TokenId(n) for n in range(prompt)),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=1),
    )


class FakeWorker:
    """One session of one worker start."""

    def __init__(self, call: Any, worker_id: str, incarnation: int, num_blocks: int) -> None:
        self._call = call
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.num_blocks = num_blocks
        self.commands_seen = 0
        self.next_number = 1
        self.acked = 0
        self.is_welcome = False

    async def say(self, **message: Any) -> None:
        await self._call.write(scheduler_pb2.SessionUp(**message))

    async def heartbeat(
        self, *, free: int | None = None, queued: int = 0, sequences: Mapping[str, int] | None = None
    ) -> None:
        await self.say(
            heartbeat=scheduler_pb2.Heartbeat(
                commands_seen=self.commands_seen,
                blocks={"free": self.num_blocks if free is None else free},
                sequences=sequences or {},
                queued_prompt_tokens=queued,
            )
        )

    async def report(self, key: common_pb2.RequestKey, *, number: int | None = None, **event: Any) -> int:
        """Sends an event; its number."""
        if number is None:
            number, self.next_number = self.next_number, self.next_number + 1
        await self.say(event=scheduler_pb2.WorkerEvent(number=number, key=key, **event))
        return number

    async def _down(self) -> scheduler_pb2.SessionDown | None:
        async with asyncio.timeout(ANSWER_S):
            down = await self._call.read()
        return None if down is grpc.aio.EOF else cast(scheduler_pb2.SessionDown, down)

    async def command(self) -> scheduler_pb2.Command:
        """The next command; acknowledgements before it are noted."""
        while True:
            down = await self._down()
            assert down is not None, "the session was closed"
            match down.WhichOneof("message"):
                case "command":
                    self.commands_seen = down.command.number
                    return down.command
                case "ack":
                    self.acked = down.ack.upto
                case _:
                    self.is_welcome = True

    async def wait_welcome(self) -> None:
        """The first message of a session."""
        down = await self._down()
        assert down is not None, "the session was closed"
        assert "welcome" == down.WhichOneof("message")
        self.is_welcome = True

    async def wait_acked(self, number: int) -> None:
        while self.acked < number:
            down = await self._down()
            assert down is not None, "the session was closed"
            assert "ack" == down.WhichOneof("message")
            self.acked = down.ack.upto

    async def wait_closed(self) -> None:
        """By the scheduler, or by its end; it commands nothing before that."""
        with suppress(grpc.aio.AioRpcError):
            while (down := await self._down()) is not None:
                assert "command" != down.WhichOneof("message")

    async def reserve(self) -> common_pb2.RequestKey:
        """Decode: takes the Reserve and grants it."""
        key, _ = await self.reserve_behind()
        return key

    async def reserve_behind(self) -> tuple[common_pb2.RequestKey, list[int]]:
        """The same, with the tokens that were delivered before."""
        command = await self.command()
        assert "reserve" == command.WhichOneof("command")
        await self.report(
            command.key,
            reserved=scheduler_pb2.Reserved(
                target=scheduler_pb2.KvTarget(
                    worker_id=self.worker_id,
                    address="127.0.0.1:1",
                    incarnation=self.incarnation,
                    transfer_id=7,
                    transports=["grpc"],
                ),
                attach_ticket=b"ticket",
            ),
        )
        return command.key, list(command.reserve.delivered_ids)

    async def release(self, kind: str, *, blocks_freed: int, computed_tokens: int = 0) -> int:
        """Takes the Abort or Release and answers it; the number of the answer."""
        command = await self.command()
        assert kind == command.WhichOneof("command")
        return await self.report(
            command.key, released=scheduler_pb2.Released(blocks_freed=blocks_freed, computed_tokens=computed_tokens)
        )


@asynccontextmanager
async def worker_session(
    channel: grpc.aio.Channel,
    role: str,
    *,
    worker_id: str = "",
    incarnation: int = 1,
    num_blocks: int = 10,
    epoch: int = 0,
    inventory: list[scheduler_pb2.InventoryEntry] | None = None,
) -> AsyncGenerator[FakeWorker]:
    """Hello, inventory and a first heartbeat; the session is cancelled at the end."""
    call: Any = scheduler_pb2_grpc.SchedulerStub(channel).Session()
    worker = FakeWorker(call, worker_id or f"{role}-0", incarnation, num_blocks)
    try:
        await worker.say(
            hello=scheduler_pb2.WorkerHello(
                role=common_pb2.ROLE_PREFILL if role == "prefill" else common_pb2.ROLE_DECODE,
                worker_id=worker.worker_id,
                incarnation=incarnation,
                address="127.0.0.1:1",
                admin_url="http://127.0.0.1:2",
                pid=3,
                layout=common_pb2.KvLayout(
                    num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=16, numerics=b"n"
                ),
                num_blocks=num_blocks,
                max_sequences=8,
                token_budget=256,
                scheduler_epoch=epoch,
            )
        )
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # A scheduler that resigns at the hello may be gone by now: that is for the test to see.
            await worker.say(inventory=scheduler_pb2.Inventory(entries=inventory or []))
            await worker.heartbeat()
        yield worker
    finally:
        call.cancel()


class FakeGateway:
    """One Serve stream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def cancel(self, reason: str = "disconnect") -> None:
        await self._call.write(scheduler_pb2.ServeUp(cancel=scheduler_pb2.CancelAsked(reason=reason)))

    async def deliver(self, **delivered: Any) -> None:
        """Answers Requeued."""
        await self._call.write(scheduler_pb2.ServeUp(delivered=scheduler_pb2.Delivered(**delivered)))

    async def read(self) -> scheduler_pb2.ServeDown | None:
        """The next message; None at the end of the stream."""
        async with asyncio.timeout(ANSWER_S):
            down = await self._call.read()
        return None if down is grpc.aio.EOF else cast(scheduler_pb2.ServeDown, down)

    async def expect(self, kind: str) -> scheduler_pb2.ServeDown:
        """The next message, which must be of this kind; repeated positions are passed over."""
        while True:
            down = await self.read()
            assert down is not None, "the stream ended"
            told = down.WhichOneof("message")
            if told == "queued" and kind != "queued":
                continue
            assert kind == told
            return down


@asynccontextmanager
async def serve_stream(
    channel: grpc.aio.Channel, spec: RequestSpec, *, last_attempt_seen: int = 0, epoch: int = 0, key_hash: str = ""
) -> AsyncGenerator[FakeGateway]:
    """A Serve stream whose Start is written; cancelled at the end."""
    call: Any = scheduler_pb2_grpc.SchedulerStub(channel).Serve()
    try:
        start = scheduler_pb2.Start(
            spec=spec_to_wire(spec),
            gateway_incarnation=9,
            last_attempt_seen=last_attempt_seen,
            scheduler_epoch=epoch,
            key_hash=key_hash,
        )
        await say_first(call, scheduler_pb2.ServeUp(start=start))
        yield FakeGateway(call)
    finally:
        call.cancel()
