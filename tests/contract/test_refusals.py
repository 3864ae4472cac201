"""Late, doubled and foreign words to real services, while an answer runs: each is counted by its kind, and is in no answer.

Frames and first tokens are in test_kv_transfer.py, older schedulers in test_worker_pair.py and test_scheduler_process.py.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from gateway.clients.tokens import SequenceEnded, TokensArrived, TokenStreams, TokenSubscription
from shared.codec.request import key_to_wire, spec_to_wire
from shared.domain.ids import Incarnation
from shared.domain.refusals import RefusedKind
from shared.engine.kv_digest import digest_layout
from shared.kv.memory import KvMemory
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.wire import common_pb2, decode_pb2, decode_pb2_grpc, scheduler_pb2
from tests.support.refusals import refused, until_refused
from tests.support.worker_pair import expected_ids, key_of, scripted_engine, scripted_spec, worker_pair

RUNNING = scripted_spec("running", ["a", "b", "c"], repeat=30, step_ms=10)
KEY = key_of("running")


async def test_commands_that_come_late_or_to_the_wrong_role() -> None:
    """A Reserve and a Prefill that their Abort has overtaken take nothing, nor do those of another role."""
    late = scripted_spec("late")
    async with worker_pair() as pair:
        gateway = await pair.gateway()
        await gateway.attach(KEY, (reserved := await pair.place(RUNNING)).attach_ticket)
        await pair.scheduler.idle("prefill-0", 1024)  # its transfer has said its last: nothing of it is late
        job = scheduler_pb2.Prefill(spec=spec_to_wire(late), target=reserved.target)
        for worker_id in ("decode-0", "prefill-0"):
            assert (await pair.release(worker_id, key_of("late"), abort=True)).blocks_freed == 0
        for _ in range(2):
            await pair.ask(late)
            await pair.scheduler.send("prefill-0", key_of("late"), prefill=job)
        await pair.scheduler.send("decode-0", key_of("late", 2), prefill=job)
        await pair.scheduler.send("prefill-0", key_of("late", 2), reserve=scheduler_pb2.Reserve(spec=job.spec))
        await until_refused(pair.decode.metrics, RefusedKind.UNKNOWN_COMMAND)
        await until_refused(pair.prefill.metrics, RefusedKind.UNKNOWN_COMMAND)
        await gateway.ended(KEY)

        assert expected_ids(RUNNING) == gateway.ids["running"]
        assert {RefusedKind.LATE_RESERVE: 2, RefusedKind.UNKNOWN_COMMAND: 1} == refused(pair.decode.metrics)
        assert {RefusedKind.LATE_PREFILL: 2, RefusedKind.UNKNOWN_COMMAND: 1} == refused(pair.prefill.metrics)
        names = [
            event.WhichOneof("event")
            for worker_id in ("decode-0", "prefill-0")
            for attempt in (1, 2)
            for event in pair.scheduler.events(worker_id, key_of("late", attempt))
        ]
        assert ["released", "released"] == names


async def test_what_other_readers_say_does_not_count() -> None:
    """A ticket of another attempt, an older session, a stream that was replaced, an acknowledgement that is none."""
    async with worker_pair() as pair:
        reader, other = await pair.gateway(), await pair.gateway()
        reader.acks_at_once = other.acks_at_once = False
        ticket = (await pair.place(RUNNING)).attach_ticket
        await pair.scheduler.idle("prefill-0", 1024)  # its transfer has said its last: nothing of it is late
        await other.attach(KEY, ticket, session=1)
        await other.until(lambda: len(other.ids["running"]) >= 1)
        await reader.attach(KEY, ticket, session=2)
        await reader.until(lambda: len(reader.ids["running"]) >= 5)
        await other.attach(KEY, b"x" * len(ticket), session=3)
        await other.attach(KEY, ticket, session=1)
        await other.until(lambda: len(other.refused) == 2)
        await other.ack(KEY, 5)
        await other.finish(KEY, 2)
        await until_refused(pair.decode.metrics, RefusedKind.LATE_READER, 2)
        await reader.finish(KEY, 2, session=1)
        await reader.ack(KEY, 5, session=1)
        await reader.ack(KEY, 3)
        await reader.ack(KEY, 3)
        await reader.ack(KEY, 2)
        await reader.ack(KEY, 10_000)
        await until_refused(pair.decode.metrics, RefusedKind.LATE_ACK, 3)
        await reader.ended(KEY)
        assert expected_ids(RUNNING) == reader.ids["running"]
        await reader.ack(KEY, len(expected_ids(RUNNING)))
        await pair.scheduler.event("decode-0", KEY, "sequence_done")
        await pair.release("decode-0", KEY)
        await reader.ack(KEY, len(expected_ids(RUNNING)))
        await until_refused(pair.decode.metrics, RefusedKind.LATE_READER, 3)

        assert {
            RefusedKind.BAD_TICKET: 1,
            RefusedKind.STALE_SESSION: 3,
            RefusedKind.LATE_READER: 3,
            RefusedKind.LATE_ACK: 3,
        } == refused(pair.decode.metrics)
        assert [] == reader.refused


async def test_a_pair_that_does_not_fit_is_refused_by_both() -> None:
    """PDX-03: told by the scheduler to hand KV to a worker with other blocks, prefill is turned away, and both say so."""
    unlike = scripted_engine(64, memory=KvMemory(digest_layout(32), 64))
    async with worker_pair(prefill_engine=unlike) as pair:
        await pair.place(RUNNING)
        failed = (await pair.scheduler.event("prefill-0", KEY, "attempt_failed")).attempt_failed

        assert "KV_CORRUPT" == failed.error.code
        # Frames and token 1 may each try to shake hands before the attempt has failed.
        assert [RefusedKind.HANDSHAKE] == list(refused(pair.decode.metrics)) == list(refused(pair.prefill.metrics))
        await pair.release("decode-0", KEY, abort=True)
        await pair.scheduler.idle("decode-0", 1024)


class StubbornDecode(decode_pb2_grpc.DecodeServicer):
    """Sends what the test says, whoever has attached or detached."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[decode_pb2.TokensUp] = asyncio.Queue()
        self.downs: asyncio.Queue[decode_pb2.TokensDown] = asyncio.Queue()

    async def Tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: "aio.ServicerContext[decode_pb2.TokensUp, decode_pb2.TokensDown]"
    ) -> None:
        """Until the gateway goes."""
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send(context))
            while (up := await context.read()) is not aio.EOF:
                self.ups.put_nowait(up)
            sender.cancel()

    async def _send(self, context: "aio.ServicerContext[decode_pb2.TokensUp, decode_pb2.TokensDown]") -> None:
        while True:
            await context.write(await self.downs.get())

    async def told(self, kind: str) -> None:
        """Waits for the next message of that kind."""
        async with asyncio.timeout(60):
            while (await self.ups.get()).WhichOneof("message") != kind:
                pass

    def send(self, *parts: tuple[str, int, int, list[int]], end: int | None = None) -> None:
        """One batch: of each request and attempt the ids from an index on; `end`: of the last of them."""
        sequences = [
            decode_pb2.SequenceTokens(key=key_to_wire(key_of(name, attempt)), first_index=first, ids=ids)
            for name, attempt, first, ids in parts
        ]
        if end is not None:
            sequences[-1].end.CopyFrom(decode_pb2.End(index=end, reason=common_pb2.FINISH_REASON_STOP))
        self.downs.put_nowait(decode_pb2.TokensDown(batch=decode_pb2.TokenBatch(sequences=sequences)))


@asynccontextmanager
async def _streams(metrics: Metrics) -> AsyncGenerator[tuple[StubbornDecode, TokenStreams, str]]:
    decode, pool = StubbornDecode(), ChannelPool("")

    def add(server: aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)

    async with (
        serve(add, host="127.0.0.1", port=0, token="", services=(), grace_s=0.0) as server,
        asyncio.TaskGroup() as group,
    ):
        streams = TokenStreams(pool, group, metrics)
        yield decode, streams, server.address
        streams.close()
        await pool.close()


async def _answer(subscription: TokenSubscription) -> list[int]:
    """All tokens up to the end."""
    ids: list[int] = []
    async with asyncio.timeout(60):
        while not isinstance(event := await subscription.get(), SequenceEnded):
            assert isinstance(event, TokensArrived)
            ids += event.ids
    return ids


@pytest.mark.parametrize("gone_attempt", [1, 2])
async def test_tokens_of_a_closed_attempt_are_dropped_by_the_gateway(gone_attempt: int) -> None:
    """A worker that stood still sends what it made for an attempt that goes on elsewhere; doubled ones count once."""
    metrics = Metrics("gateway", "gateway")
    async with _streams(metrics) as (decode, streams, address):
        attached = [
            streams.attach(
                address=address, incarnation=Incarnation(1), key=key_of(name, attempt), ticket=b"t", from_index=first
            )
            for name, attempt, first in (("r", gone_attempt, 1), ("r", 3, 3), ("s", 1, 1))
        ]
        gone, moved, other = attached
        for _ in attached:
            await decode.told("attach")
        decode.send(("r", gone_attempt, 1, [10, 11]), ("s", 1, 1, [1]))
        await gone.get()
        gone.close()
        await decode.told("detach")
        decode.send(("r", gone_attempt, 3, [66]), ("r", 3, 3, [12]), ("s", 1, 1, [1, 2]))
        decode.send(("r", gone_attempt, 1, [66, 66, 66]), ("r", 3, 3, [12, 13]), end=4)
        decode.send(("s", 1, 1, [1, 2, 3]), end=3)

        assert ([12, 13], [1, 2, 3]) == (await _answer(moved), await _answer(other))
        assert {RefusedKind.DETACHED_TOKENS: 2} == refused(metrics)
    metrics.close()
