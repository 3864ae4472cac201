"""Service and driver over real gRPC on loopback, with a worker, a gateway and a store that do what the test says."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.driver import Driver
from scheduler.messages import StateBack, Ticked
from scheduler.service import Identity, SchedulerService
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, RequestId
from shared.domain.request import CancelReason, RequestState, StoredRequest
from shared.domain.worker import LossLimits
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.rpc.errors import serving_error
from shared.rpc.server import serve
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler_peers import ANSWER_S, FakeGateway, FakeWorker, make_spec, serve_stream, worker_session

LOSS = LossLimits(silence_s=5.0)
LIMITS = CoreLimits(max_queued_requests=4, max_queued_prompt_tokens=1000, loss=LOSS, gateway_grace_s=5.0)
EPOCH = Epoch(100)


class JumpingClock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def unix_ms(self) -> int:
        return 1_000_000


class FakeStore:
    """Keeps the writes in order; `is_away` makes every one fail."""

    def __init__(self) -> None:
        self.is_away = False
        self.writes: list[tuple[str, RequestId, RequestState]] = []
        self.mark: CancelReason | None = None

    async def _write(self, step: str, stored: StoredRequest) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            raise ServingError(ErrorCode.STATE_UNAVAILABLE, "away")
        self.writes.append((step, stored.request_id, stored.state))

    async def admit(self, stored: StoredRequest) -> None:
        await self._write("admitted", stored)

    async def place(self, stored: StoredRequest) -> None:
        await self._write("placed", stored)

    async def finish(self, stored: StoredRequest) -> None:
        await self._write("outcome", stored)

    async def rewrite(self, stored: StoredRequest) -> None:
        await self._write("rewrite", stored)

    async def read(self, request_id: RequestId, key_hash: str) -> CancelReason | None:
        return self.mark

    async def clear(self, request_id: RequestId, key_hash: str) -> None:
        self.mark = None


@dataclass(slots=True, kw_only=True)
class Line:
    """A scheduler with its peers."""

    driver: Driver
    store: FakeStore
    clock: JumpingClock
    channel: grpc.aio.Channel
    prefill: FakeWorker
    decode: FakeWorker
    metrics: Metrics
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = scheduler_pb2_grpc.SchedulerStub(self.channel)

    def state(self, request_id: str = "r1") -> RequestState:
        entry = self.driver.core.ledger.get(RequestId(request_id))
        assert entry is not None
        return entry.record.state

    async def until(self, what: RequestState, request_id: str = "r1") -> None:
        """Waits until a request is in a state."""
        async with asyncio.timeout(ANSWER_S):
            while self.state(request_id) is not what:
                await asyncio.sleep(0.002)

    def pass_time(self, seconds: float) -> None:
        """With a tick at least each second: more at once would be taken for a pause of the scheduler."""
        ends_at = self.clock.now + seconds
        while self.clock.now < ends_at:
            self.clock.now = min(self.clock.now + 1.0, ends_at)
            self.driver.step(Ticked())


@asynccontextmanager
async def scheduler_server() -> AsyncGenerator[tuple[Driver, FakeStore, JumpingClock, Metrics, grpc.aio.Channel]]:
    """An active scheduler without workers, and a channel to it."""
    clock, store, metrics = JumpingClock(), FakeStore(), Metrics("scheduler", "scheduler")
    driver = Driver(
        SchedulerCore(LIMITS, EPOCH), store=store, marks=store, clock=clock, metrics=metrics, log=get_logger("test")
    )
    service, pool = SchedulerService(clock), ChannelPool("token")

    def add(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, server)

    async with serve(add, host="127.0.0.1", port=0, token="token", services=(), grace_s=0.1) as server:
        service.activate(driver, Identity(name="scheduler", pid=1, address=server.address, admin_url="http://a"))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(driver.run())
            try:
                yield driver, store, clock, metrics, pool.get(server.address)
            finally:
                await pool.close()
                running.cancel()
    metrics.close()


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Line]:
    """One prefill and one decode worker, ready; a cancel waits for their releases for as long as they take."""
    monkeypatch.setattr("scheduler.service.CANCEL_WAIT_S", ANSWER_S)
    async with (
        scheduler_server() as (driver, store, clock, metrics, channel),
        worker_session(channel, "prefill") as prefill,
        worker_session(channel, "decode") as decode,
    ):
        async with asyncio.timeout(ANSWER_S):
            while sum(worker.capacity is not None for worker in driver.core.fleet) < 2:
                await asyncio.sleep(0.002)
        yield Line(
            driver=driver,
            store=store,
            clock=clock,
            channel=channel,
            prefill=prefill,
            decode=decode,
            metrics=metrics,
        )


async def to_prefilling(line: Line, gateway: FakeGateway) -> Any:
    """Up to the Prefill command; the key of the attempt."""
    await gateway.expect("queued")
    key = await line.decode.reserve()
    command = await line.prefill.command()
    assert "prefill" == command.WhichOneof("command")
    placed = (await gateway.expect("placed")).placed
    assert (1, "decode-0", b"ticket", "prefill-0") == (
        placed.attempt,
        placed.decode_worker_id,
        placed.attach_ticket,
        placed.prefill_worker_id,
    )
    return key


async def test_one_request_goes_through_all_states(line: Line) -> None:
    """QUEUED to FINISHED: each command, word to the gateway and write in its order; events acknowledged at the end."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        key = await to_prefilling(line, gateway)
        assert RequestState.PREFILLING is line.state()
        await line.prefill.report(key, prefill_done=scheduler_pb2.PrefillDone(computed_tokens=20))
        await line.until(RequestState.TRANSFERRING)
        await line.decode.report(key, kv_committed=scheduler_pb2.KvCommitted())
        await line.until(RequestState.DECODING)
        number = await line.decode.report(
            key,
            sequence_done=scheduler_pb2.SequenceDone(
                finish_reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=10
            ),
        )
        outcome = (await gateway.expect("outcome")).outcome
        assert (scheduler_pb2.OUTCOME_KIND_FINISHED, 2) == (outcome.kind, outcome.finish_reason)
        assert None is await gateway.read()
        await line.decode.release("release", blocks_freed=0)
        await line.prefill.release("release", blocks_freed=2)
        assert await line.driver.wait_released(RequestId("r1"), ANSWER_S)
        await line.decode.wait_acked(number + 1)
    assert ["admitted", "placed", "outcome"] == [step for step, _, _ in line.store.writes]
    assert 'firsttoken_requests_total{outcome="finished"} 1.0' in line.metrics.render().decode()


async def drive_to(line: Line, gateway: FakeGateway, state: RequestState) -> None:
    """Plays both workers until the request is in a state after QUEUED."""
    await gateway.expect("queued")
    if state is RequestState.PLACING:
        command = await line.decode.command()
        assert "reserve" == command.WhichOneof("command")
        return
    key = await line.decode.reserve()
    await line.prefill.command()
    await gateway.expect("placed")
    if state in (RequestState.TRANSFERRING, RequestState.DECODING):
        await line.prefill.report(key, prefill_done=scheduler_pb2.PrefillDone(computed_tokens=20))
        await line.until(RequestState.TRANSFERRING)
    if state is RequestState.DECODING:
        await line.decode.report(key, kv_committed=scheduler_pb2.KvCommitted())
    await line.until(state)


PLACED = [RequestState.PLACING, RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING]


@pytest.mark.parametrize("state", PLACED)
async def test_a_cancel_at_every_placed_state_ends_with_acknowledged_releases(line: Line, state: RequestState) -> None:
    """Whoever was commanded is asked to abort; the reply to Cancel counts the blocks that came back."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, state)
        async with asyncio.TaskGroup() as group:
            reply = group.create_task(cancel(line))
            outcome = (await gateway.expect("outcome")).outcome
            assert ("CANCELLED", scheduler_pb2.OUTCOME_KIND_CANCELLED) == (outcome.error.code, outcome.kind)
            assert RequestState.ABORTING is line.state()
            await line.decode.release("abort", blocks_freed=2, computed_tokens=4)
            if state is not RequestState.PLACING:
                await line.prefill.release("abort", blocks_freed=1)
        freed = 2 if state is RequestState.PLACING else 3
        assert (True, scheduler_pb2.OUTCOME_KIND_CANCELLED, freed) == described(reply.result())
        assert RequestState.CANCELLED is line.state()
        told = line.metrics.render().decode()
        assert "firsttoken_cancel_release_seconds_count 1.0" in told
        assert 'firsttoken_wasted_tokens_total{cause="cancelled",stage="decode"} 4.0' in told
        was_computed = state in (RequestState.TRANSFERRING, RequestState.DECODING)  # and forgotten by prefill since
        assert was_computed == ('firsttoken_wasted_tokens_total{cause="cancelled",stage="prefill"} 20.0' in told)


async def test_a_cancel_of_a_queued_request_commands_nobody(line: Line) -> None:
    """Nothing is held, so it is released at once; the message on its own stream is enough."""
    big, small = make_spec("big", prompt=140, max_tokens=20), make_spec("small")
    async with serve_stream(line.channel, big) as first:
        await drive_to(line, first, RequestState.PLACING)
        async with serve_stream(line.channel, small) as second:  # the places are taken, whichever stream is read first
            await second.expect("queued")
            await second.cancel()
            outcome = (await second.expect("outcome")).outcome
            assert scheduler_pb2.OUTCOME_KIND_CANCELLED == outcome.kind
            assert RequestState.CANCELLED is line.state("small")
            assert 1 == line.driver.core.ledger.num_live()


async def test_a_repeated_cancel_is_a_success_and_an_unknown_one_is_not(line: Line) -> None:
    """Ended: its outcome again. Unknown: REQUEST_NOT_FOUND. Empty: INVALID_REQUEST."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, RequestState.PLACING)
        await gateway.cancel()
        await line.decode.release("abort", blocks_freed=2)
        await line.until(RequestState.CANCELLED)
    assert described(await cancel(line)) == described(await cancel(line))
    for request_id, code in (("nobody", ErrorCode.REQUEST_NOT_FOUND), ("", ErrorCode.INVALID_REQUEST)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cancel(line, request_id)
        assert code is serving_error(refused.value).code


async def test_an_unreleased_cancel_answers_after_two_seconds(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, but a release is still owed."""
    monkeypatch.setattr("scheduler.service.CANCEL_WAIT_S", 0.05)
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, RequestState.PLACING)
        assert (False, scheduler_pb2.OUTCOME_KIND_CANCELLED, 0) == described(await cancel(line))


async def test_a_lost_worker_closes_its_attempts_and_frees_the_other_side(line: Line) -> None:
    """Decode stays silent for the time: Requeued, Abort to prefill, its session closed; a cancel then owes nothing new."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, RequestState.DECODING)
        line.pass_time(4.0)
        await line.prefill.heartbeat()
        async with asyncio.timeout(ANSWER_S):
            while max(worker.heard_at for worker in line.driver.core.fleet) < line.clock.now:
                await asyncio.sleep(0.002)
        line.pass_time(1.0)
        requeued = (await gateway.expect("requeued")).requeued
        assert (1, "worker_lost") == (requeued.attempt, requeued.reason)
        await line.decode.wait_closed()
        await line.prefill.wait_acked(await line.prefill.release("abort", blocks_freed=2))
        await gateway.cancel()
        await gateway.expect("outcome")
        assert RequestState.CANCELLED is line.state()
        status = await line.stub.Status(scheduler_pb2.StatusRequest())
        assert {"scheduler": True, "prefill-0": True, "decode-0": False} == {
            service.id: service.ready for service in status.services
        }
        assert 1 == status.unreleased  # the debt of the lost one, until it is proven gone


async def test_another_incarnation_proves_the_end_of_the_one_before(line: Line) -> None:
    """At once, without waiting for silence: the next attempt goes to the new start, behind what the gateway holds."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, RequestState.DECODING)
        async with worker_session(line.channel, "decode", incarnation=2) as decode:
            await gateway.expect("requeued")
            await line.prefill.release("abort", blocks_freed=2)
            await gateway.deliver(attempt=1, ids=[7, 8])
            key, delivered_ids = await decode.reserve_behind()
            assert (2, [7, 8]) == (key.attempt, delivered_ids)
            prefill = (await line.prefill.command()).prefill
            assert 2 == prefill.num_delivered
            assert 2 == (await gateway.expect("placed")).placed.attempt


async def test_a_preempted_answer_that_was_complete_is_finished(line: Line) -> None:
    """Decode's word leads to Requeued; the gateway has all of it, and nothing is placed again."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        key = await to_prefilling(line, gateway)
        await line.decode.report(key, kv_committed=scheduler_pb2.KvCommitted())
        await line.decode.report(key, preempted=scheduler_pb2.Preempted())
        assert "preempted" == (await gateway.expect("requeued")).requeued.reason
        await gateway.deliver(attempt=1, ids=[7, 8], complete=True, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        outcome = (await gateway.expect("outcome")).outcome
        assert (scheduler_pb2.OUTCOME_KIND_FINISHED, common_pb2.FINISH_REASON_LENGTH) == (
            outcome.kind,
            outcome.finish_reason,
        )
        await line.decode.release("abort", blocks_freed=0)
        await line.prefill.release("abort", blocks_freed=2)
        assert await line.driver.wait_released(RequestId("r1"), ANSWER_S)


async def test_redis_away_refuses_admission_and_keeps_what_runs(line: Line) -> None:
    """503 at once and nothing remembered; the running one goes on; when Redis is back its record is written again."""
    async with serve_stream(line.channel, make_spec()) as running:
        await drive_to(line, running, RequestState.PREFILLING)
        line.clock.now += LIMITS.store_hold_s  # in its first moments it would wait
        line.store.is_away = True
        async with serve_stream(line.channel, make_spec("r2")) as refused:
            assert "STATE_UNAVAILABLE" == (await refused.expect("outcome")).outcome.error.code
        assert None is line.driver.core.ledger.get(RequestId("r2"))
        assert RequestState.PREFILLING is line.state()
        assert not (await line.stub.Status(scheduler_pb2.StatusRequest())).redis_ready
        line.store.is_away = False
        line.driver.step(StateBack())
        async with asyncio.timeout(ANSWER_S):
            while not line.driver.core.is_state_ready:
                await asyncio.sleep(0.002)
        rewritten = [(request_id, state) for step, request_id, state in line.store.writes if step == "rewrite"]
        assert [("r1", RequestState.PREFILLING), ("r2", RequestState.FAILED)] == rewritten
        async with serve_stream(line.channel, make_spec("r3")) as admitted:
            await admitted.expect("queued")


async def test_a_broken_stream_is_a_grace_and_then_a_cancel(line: Line) -> None:
    """Within the grace a new stream gets the present state first; after it the request is cancelled as gateway_lost."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await drive_to(line, gateway, RequestState.DECODING)
    await broken(line)
    line.pass_time(4.0)
    async with serve_stream(line.channel, make_spec(), last_attempt_seen=1) as gateway:
        assert b"ticket" == (await gateway.expect("placed")).placed.attach_ticket
    await broken(line)
    await heard(line)
    line.pass_time(4.0)
    await heard(line)
    line.pass_time(1.0)
    entry = line.driver.core.ledger.get(RequestId("r1"))
    assert entry is not None
    assert RequestState.ABORTING is entry.record.state
    assert entry.record.outcome is not None
    assert "the request was cancelled: gateway_lost" == str(
        entry.record.outcome.error and entry.record.outcome.error.message
    )


async def test_unanswered_commands_come_again_on_a_new_session(line: Line) -> None:
    """Same incarnation: numbered anew, after the inventory; input of the older session is dropped."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await gateway.expect("queued")
        first = await line.decode.command()
        async with worker_session(line.channel, "decode") as again:
            second = await again.command()
            assert (first.key, first.reserve) == (second.key, second.reserve)
            assert 1 == second.number
            await line.decode.wait_closed()


async def test_a_mark_set_before_admission_cancels(line: Line) -> None:
    """A DELETE may reach Redis before its request reaches the scheduler."""
    line.store.mark = CancelReason.DELETE
    async with serve_stream(line.channel, make_spec()) as gateway:
        outcome = (await gateway.expect("outcome")).outcome
        assert scheduler_pb2.OUTCOME_KIND_CANCELLED == outcome.kind


async def test_duplicate_events_are_acknowledged_and_dropped(line: Line) -> None:
    """An event that comes twice changes nothing the second time, and is acknowledged again."""
    async with serve_stream(line.channel, make_spec()) as gateway:
        await gateway.expect("queued")
        key = await line.decode.reserve()
        await line.decode.wait_acked(1)
        line.decode.acked = 0
        target = scheduler_pb2.KvTarget(worker_id="other", address="x", incarnation=5)
        await line.decode.report(key, number=1, reserved=scheduler_pb2.Reserved(target=target, attach_ticket=b"other"))
        await line.decode.wait_acked(1)
        assert b"ticket" == (await gateway.expect("placed")).placed.attach_ticket


async def test_a_higher_epoch_makes_the_scheduler_resign(line: Line) -> None:
    """A peer that has seen a newer scheduler proves that this one was replaced."""
    async with serve_stream(line.channel, make_spec(), epoch=EPOCH + 1):
        async with asyncio.timeout(ANSWER_S):
            await line.driver.resigned.wait()


async def test_status_has_every_state_with_zeros() -> None:
    """An empty fleet still names all states; a standby answers UNAVAILABLE without a detail."""
    async with scheduler_server() as (_, _, _, _, channel):
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        status = await stub.Status(scheduler_pb2.StatusRequest())
        states = {"queued", "placing", "prefilling", "transferring", "decoding", "aborting"}
        assert dict.fromkeys(states, 0) == dict(status.requests)
        blocks = {"free": 0, "reserved": 0, "active": 0, "cached": 0, "quarantined": 0}
        assert {"prefill": blocks, "decode": blocks} == {each.role: dict(each.states) for each in status.blocks}
        assert (0, 0) == (status.queue, status.max_request_tokens)


async def test_requests_wait_for_the_first_workers() -> None:
    """A scheduler that has just started says nothing; with a pair it admits."""
    async with (
        scheduler_server() as (_, _, _, _, channel),
        serve_stream(channel, make_spec()) as gateway,
        worker_session(channel, "prefill"),
        worker_session(channel, "decode"),
    ):
        await gateway.expect("queued")


async def test_requests_without_workers_are_cancelled_or_refused_in_the_end() -> None:
    """Whoever asks for the end of one that is held gets it at once."""
    async with (
        scheduler_server() as (driver, _, clock, _, channel),
        serve_stream(channel, make_spec()) as gateway,
        serve_stream(channel, make_spec("r2")) as late,
        serve_stream(channel, make_spec("r3")) as deleted,
    ):
        async with asyncio.timeout(ANSWER_S):
            while len(driver.core.lobby) < 3:
                await asyncio.sleep(0.002)
        await gateway.cancel()
        assert "CANCELLED" == (await gateway.expect("outcome")).outcome.error.code
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        reply = await stub.Cancel(scheduler_pb2.CancelRequest(request_id="r3", reason="delete"))
        assert (True, scheduler_pb2.OUTCOME_KIND_CANCELLED, 0) == described(reply)
        assert "CANCELLED" == (await deleted.expect("outcome")).outcome.error.code
        clock.now += 10.0
        driver.step(Ticked())
        assert "NO_CAPACITY" == (await late.expect("outcome")).outcome.error.code


async def cancel(line: Line, request_id: str = "r1") -> Any:
    """Scheduler.Cancel by id."""
    request = scheduler_pb2.CancelRequest(request_id=request_id, reason="delete")
    return await line.stub.Cancel(request, timeout=2 * ANSWER_S)


def described(reply: Any) -> tuple[bool, int, int]:
    """The fields of a CancelReply."""
    return reply.released, reply.outcome, reply.blocks_freed


async def broken(line: Line) -> None:
    """Waits until the scheduler has noticed the end of the stream of r1."""
    entry = line.driver.core.ledger.get(RequestId("r1"))
    assert entry is not None
    async with asyncio.timeout(ANSWER_S):
        while entry.stream is not None:
            await asyncio.sleep(0.002)


async def heard(line: Line) -> None:
    """Waits until a heartbeat of each worker has been taken since the clock last jumped."""
    async with asyncio.timeout(ANSWER_S):
        while min(worker.heard_at for worker in line.driver.core.fleet) < line.clock.now:
            for worker in (line.prefill, line.decode):
                await worker.heartbeat()
            await asyncio.sleep(0.005)
