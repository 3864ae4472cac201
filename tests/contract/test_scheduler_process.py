"""The scheduler's main on a real store: lease, orphans, three writes, marks, drain."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from scheduler.__main__ import Replaced, main
from scheduler.config import SchedulerConfig
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId
from shared.domain.refusals import RefusedKind
from shared.domain.request import CancelReason, RequestState, StoredRequest
from shared.process import Process, RealClock
from shared.rpc.channels import ChannelPool
from shared.rpc.errors import serving_error
from shared.state.cancellation import Cancellations
from shared.state.client import StateClient
from shared.state.embedded import EmbeddedValkey
from shared.state.keys import CANCEL_CHANNEL, EPOCH, LEASE
from shared.state.leadership import Leadership, SchedulerLocation
from shared.state.requests import RequestStore
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.support.cancelled_calls import cancel_many, make_small
from tests.support.redis_server import CALL_S
from tests.support.refusals import refused
from tests.support.scheduler_peers import ANSWER_S, FakeGateway, FakeWorker, make_spec, serve_stream, worker_session


@pytest.fixture
def valkey(store_binary: Path | None, tmp_path: Path) -> Generator[EmbeddedValkey]:
    """A store of this test's own."""
    server = EmbeddedValkey(0, tmp_path, binary=store_binary)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(valkey: EmbeddedValkey) -> AsyncGenerator[StateClient]:
    """A second look at the same store."""
    client = StateClient(valkey.url, timeout_s=CALL_S)
    yield client
    await client.close()


@asynccontextmanager
async def running(
    valkey: EmbeddedValkey, client: StateClient
) -> AsyncGenerator[tuple[Process, str, asyncio.Task[None]]]:
    """A scheduler that is active; stopped by its signal at the end, unless it has ended."""
    process = Process("scheduler", "scheduler", RealClock())
    # The workers of these tests send no further heartbeats.
    config = SchedulerConfig(
        port=0,
        redis_url=valkey.url,
        redis_timeout_s=CALL_S,
        lease_absent_s=0.0,
        drain_timeout_s=5.0,
        worker_lost_s=120.0,
        gateway_grace_s=60.0,
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(main(process, config))
        async with asyncio.timeout(ANSWER_S):
            while not process.readiness.is_ready:
                await asyncio.sleep(0.01)
        location = await Leadership(client, RealClock()).find()
        assert isinstance(location, SchedulerLocation)
        yield process, location.address, task
        process.stopping.set()
    process.metrics.close()


@asynccontextmanager
async def peers(address: str) -> AsyncGenerator[tuple[grpc.aio.Channel, FakeWorker, FakeWorker]]:
    """One worker of each role."""
    pool = ChannelPool("")
    channel = pool.get(address)
    try:
        async with worker_session(channel, "prefill") as prefill, worker_session(channel, "decode") as decode:
            yield channel, prefill, decode
    finally:
        await pool.close()


async def admitted(gateway: FakeGateway) -> None:
    """Waits for Queued."""
    await gateway.expect("queued")


async def started(channel: grpc.aio.Channel, prefill: FakeWorker, decode: FakeWorker) -> None:
    """Waits until both are ready."""
    async with asyncio.timeout(ANSWER_S):
        while sum(each.ready for each in (await _status(channel)).services) < 3:
            await asyncio.sleep(0.01)


async def _status(channel: grpc.aio.Channel) -> scheduler_pb2.StatusReply:
    stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
    return await stub.Status(scheduler_pb2.StatusRequest(), timeout=ANSWER_S)


async def test_a_request_leaves_its_outcome_and_no_live_record(valkey: EmbeddedValkey, client: StateClient) -> None:
    """A live record of an earlier epoch is taken over, and ends by its mark; a drained scheduler gives its lease back."""
    store = RequestStore(client)
    orphan = StoredRequest(
        request_id=RequestId("orphan"),
        state=RequestState.DECODING,
        attempt=Attempt(1),
        epoch=Epoch(7),
        gateway_incarnation=Incarnation(1),
        admitted_unix_ms=1,
        seed=1,
        key_hash="a",
    )
    await store.admit(orphan)
    await Cancellations(client).mark(orphan.request_id, "a", CancelReason.DELETE)
    async with running(valkey, client) as (_, address, _), peers(address) as (channel, prefill, decode):
        async with asyncio.timeout(ANSWER_S):
            while await store.load_live():
                await asyncio.sleep(0.01)
        taken = await store.load(orphan.request_id)
        assert taken is not None
        assert (RequestState.CANCELLED, True) == (taken.state, taken.epoch > orphan.epoch)
        await started(channel, prefill, decode)
        async with serve_stream(channel, make_spec()) as gateway:
            await admitted(gateway)
            key = await decode.reserve()
            await prefill.command()
            await gateway.expect("placed")
            assert [RequestState.PLACING] == [each.state for each in await store.load_live()]
            done = scheduler_pb2.SequenceDone(finish_reason=common_pb2.FINISH_REASON_STOP, completion_tokens=4)
            number = await decode.report(key, sequence_done=done)
            await gateway.expect("outcome")
            await decode.release("release", blocks_freed=0)
            await decode.wait_acked(number)
        stored = await store.load(RequestId("r1"))
        assert stored is not None
        assert (RequestState.FINISHED, 4) == (stored.state, stored.completion_tokens)
    assert 0 == await client.call("EXISTS", LEASE)


async def test_a_mark_in_redis_cancels(valkey: EmbeddedValkey, client: StateClient) -> None:
    """A DELETE on a gateway that does not reach the scheduler; another client's is refused, and its mark not read."""
    marks, r1 = Cancellations(client), RequestId("r1")
    await marks.mark(r1, "b", CancelReason.DELETE)  # of what is not there yet nobody knows whose it is
    async with running(valkey, client) as (_, address, _), peers(address) as (channel, prefill, decode):
        await started(channel, prefill, decode)
        async with serve_stream(channel, make_spec(), key_hash="a") as gateway:
            await admitted(gateway)
            await decode.reserve()
            await gateway.expect("placed")
            with pytest.raises(ServingError) as refused:
                await marks.mark(r1, "c", CancelReason.DELETE)
            await client.call("PUBLISH", CANCEL_CHANNEL, r1)
            await marks.mark(r1, "a", CancelReason.DELETE)
            outcome = (await gateway.expect("outcome")).outcome
            assert scheduler_pb2.OUTCOME_KIND_CANCELLED == outcome.kind
    assert ErrorCode.REQUEST_NOT_FOUND is refused.value.code


async def test_cancel_by_exactly_the_id_and_by_its_own_client(valkey: EmbeddedValkey, client: StateClient) -> None:
    """CAN-04: `r-1` and `r-10` live; empty, shorter, unknown ids and another's key end neither; `r-1` ends itself alone."""
    async with running(valkey, client) as (_, address, _), peers(address) as (channel, prefill, decode):
        await started(channel, prefill, decode)
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)

        async def cancel(request_id: str, key_hash: str) -> ErrorCode | None:
            asked = scheduler_pb2.CancelRequest(request_id=request_id, key_hash=key_hash, reason="delete")
            try:
                reply = await stub.Cancel(asked, timeout=ANSWER_S)
            except grpc.aio.AioRpcError as error:
                return serving_error(error).code
            assert scheduler_pb2.OUTCOME_KIND_CANCELLED == reply.outcome
            return None

        async with (
            serve_stream(channel, make_spec("r-1"), key_hash="a") as one,
            serve_stream(channel, make_spec("r-10"), key_hash="a") as ten,
        ):
            await admitted(one)
            await admitted(ten)
            assert ["r-1", "r-10"] == sorted([(await decode.command()).key.request_id for _ in range(2)])
            unknown = ErrorCode.REQUEST_NOT_FOUND
            tried = [("", "a"), ("r-", "a"), ("r-100", "a"), ("r", "a"), ("r-1", "b"), ("r-1", ""), ("r-10", "b")]
            assert [ErrorCode.INVALID_REQUEST, *[unknown] * 6] == [await cancel(*each) for each in tried]
            assert ["r-1", "r-10"] == sorted(each.request_id for each in await RequestStore(client).load_live())
            async with asyncio.TaskGroup() as group:
                cancelling = group.create_task(cancel("r-1", "a"))
                assert scheduler_pb2.OUTCOME_KIND_CANCELLED == (await one.expect("outcome")).outcome.kind
                await decode.release("abort", blocks_freed=2)
            assert None is cancelling.result()
            async with asyncio.timeout(ANSWER_S):
                while ["r-10"] != [each.request_id for each in await RequestStore(client).load_live()]:
                    await asyncio.sleep(0.01)  # the record follows the answer
            assert (unknown, None) == (await cancel("r-1", "b"), await cancel("r-1", "a"))  # ended, and still its own
            await ten.cancel()
            await ten.expect("outcome")


async def test_cancelled_control_streams(
    valkey: EmbeddedValkey, client: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CAN-05: two hundred streams of one request, each cancelled once it has been told, with room for eight at once."""
    make_small(monkeypatch)
    async with running(valkey, client) as (_, address, _), peers(address) as (channel, prefill, decode):
        await started(channel, prefill, decode)
        async with serve_stream(channel, make_spec()) as gateway:
            await admitted(gateway)
            await decode.reserve()
            await prefill.command()
            await gateway.expect("placed")

        async def look() -> None:
            async with serve_stream(channel, make_spec(), last_attempt_seen=1) as again:
                await again.expect("placed")

        await cancel_many("/firsttoken.v1.Scheduler/Serve", look)
        async with serve_stream(channel, make_spec(), last_attempt_seen=1) as last:
            await last.expect("placed")
            await last.cancel()
            await last.expect("outcome")


async def test_a_replaced_scheduler_ends(valkey: EmbeddedValkey, client: StateClient) -> None:
    """Another one took the lease: exit code 1, by an exception that says so."""
    with pytest.RaisesGroup(Replaced, flatten_subgroups=True):
        async with running(valkey, client) as (_, _, task):
            await client.call("HSET", LEASE, "holder", "1", "address", "elsewhere:1", "epoch", "99")
            await client.call("SET", EPOCH, "9999999999999999")
            await task


async def test_words_that_come_late_twice_or_from_nowhere(valkey: EmbeddedValkey, client: StateClient) -> None:
    """Each is counted, the answer is what it is without them, and its record too."""
    key = common_pb2.RequestKey(request_id="r1", attempt=1)
    later = common_pb2.RequestKey(request_id="r1", attempt=5)
    done = scheduler_pb2.SequenceDone(finish_reason=common_pb2.FINISH_REASON_STOP, completion_tokens=4)
    false = scheduler_pb2.SequenceDone(finish_reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=9)
    async with running(valkey, client) as (process, address, _), peers(address) as (channel, prefill, decode):
        await started(channel, prefill, decode)
        async with serve_stream(channel, make_spec()) as gateway:
            await admitted(gateway)
            await prefill.wait_welcome()
            # Nobody has asked it to, and nobody asks it to before this has been heard.
            await prefill.wait_acked(await prefill.report(key, prefill_done=scheduler_pb2.PrefillDone()))
            await decode.reserve()
            await prefill.command()
            await gateway.expect("placed")
            await decode.report(later, sequence_done=false)
            await decode.report(common_pb2.RequestKey(request_id="nobody", attempt=1), sequence_done=false)
            number = await decode.report(key, kv_committed=scheduler_pb2.KvCommitted())
            await decode.report(key, number=number, sequence_done=false)
            await decode.report(key, kv_committed=scheduler_pb2.KvCommitted())
            await decode.report(key, sequence_done=done)
            outcome = (await gateway.expect("outcome")).outcome
            await decode.report(key, sequence_done=false)
            assert "release" == (await decode.command()).WhichOneof("command")
            await decode.wait_acked(await decode.report(key, preempted=scheduler_pb2.Preempted()))
        assert (scheduler_pb2.OUTCOME_KIND_FINISHED, done.finish_reason) == (outcome.kind, outcome.finish_reason)
        stored = await RequestStore(client).load(RequestId("r1"))
        assert stored is not None
        assert (RequestState.FINISHED, 4) == (stored.state, stored.completion_tokens)
        assert {
            RefusedKind.ILLEGAL_EVENT: 1,
            RefusedKind.STALE_ATTEMPT: 1,
            RefusedKind.UNKNOWN_REQUEST: 1,
            RefusedKind.DUPLICATE_EVENT: 1,
            RefusedKind.LATE_EVENT: 3,
        } == refused(process.metrics)


async def test_a_replaced_scheduler_commands_nothing(valkey: EmbeddedValkey, client: StateClient) -> None:
    """It stood still, and its records are another's: the store refuses its placement, no worker hears of it, it ends."""
    newer: StoredRequest | None = None
    with pytest.RaisesGroup(Replaced, flatten_subgroups=True):
        async with running(valkey, client) as (_, address, task), peers(address) as (channel, prefill, decode):
            await started(channel, prefill, decode)
            async with serve_stream(channel, make_spec("first", prompt=150)) as gateway:
                await admitted(gateway)
                await decode.reserve()
                await gateway.expect("placed")
                async with serve_stream(channel, make_spec("second", prompt=150)) as waiting:
                    await admitted(waiting)
                    newer = await _written_by_a_newer_one(client, RequestId("second"))
                    await gateway.cancel()
                    assert "prefill" == (await prefill.command()).WhichOneof("command")
                    for worker in (prefill, decode):
                        await worker.release("abort", blocks_freed=10)
                    await decode.wait_closed()
                    await asyncio.wait([task])
    assert newer is not None
    assert newer == await RequestStore(client).load(RequestId("second"))


async def _written_by_a_newer_one(client: StateClient, request_id: RequestId) -> StoredRequest:
    """As its taking over does."""
    store = RequestStore(client)
    stored = await store.load(request_id)
    assert stored is not None
    newer = replace(stored, epoch=Epoch(stored.epoch + 1))
    await store.rewrite(newer)
    return newer


async def test_a_store_that_refuses_writes_ends_nothing(valkey: EmbeddedValkey, client: StateClient) -> None:
    """Without its replicas: a running request goes on to its outcome, a new one is refused, and it recovers."""
    async with running(valkey, client) as (_, address, task), peers(address) as (channel, prefill, decode):
        await started(channel, prefill, decode)
        async with serve_stream(channel, make_spec()) as gateway:
            await admitted(gateway)
            key = await decode.reserve()
            await gateway.expect("placed")
            await client.call("CONFIG", "SET", "min-replicas-to-write", 1)
            async with serve_stream(channel, make_spec("r2")) as refused:
                assert "STATE_UNAVAILABLE" == (await refused.expect("outcome")).outcome.error.code
            done = scheduler_pb2.SequenceDone(finish_reason=common_pb2.FINISH_REASON_STOP, completion_tokens=4)
            await decode.report(key, sequence_done=done)
            outcome = (await gateway.expect("outcome")).outcome
            assert scheduler_pb2.OUTCOME_KIND_FINISHED == outcome.kind
        assert not (await _status(channel)).redis_ready
        await client.call("CONFIG", "SET", "min-replicas-to-write", 0)
        async with asyncio.timeout(ANSWER_S):
            while not (await _status(channel)).redis_ready:
                await asyncio.sleep(0.01)
        stored = await RequestStore(client).load(RequestId("r1"))
        assert stored is not None
        assert RequestState.FINISHED is stored.state
        async with serve_stream(channel, make_spec("r3")) as gateway:
            await admitted(gateway)
            await gateway.cancel()
            await gateway.expect("outcome")
        assert not task.done()


async def test_a_resigned_scheduler_is_not_resigned_again(valkey: EmbeddedValkey, client: StateClient) -> None:
    """A worker has seen a higher epoch than Redis and the clock know: started again, it gets one above that."""
    seen = 9_000_000_000_000
    pool = ChannelPool("")
    with pytest.RaisesGroup(Replaced, flatten_subgroups=True):
        async with (
            running(valkey, client) as (_, address, task),
            worker_session(pool.get(address), "decode", epoch=seen),
        ):
            await task
    async with running(valkey, client) as (_, address, _):
        location = await Leadership(client, RealClock()).find()
        assert location is not None
        assert seen + 1 == location.epoch
        async with worker_session(pool.get(address), "decode", epoch=seen) as worker:
            await worker.wait_welcome()
    await pool.close()
