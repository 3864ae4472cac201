"""Senders against a decode worker that answers as each test says."""

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import grpc
import pytest
from grpc import aio

from prefill_worker import sender
from prefill_worker.job import Moments, PrefillJob
from prefill_worker.sender import TransferSenders
from shared.codec.kv import frame_header_from_wire, held_to_wire, reject_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, BlockId, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.domain.worker import KvTarget
from shared.engine.executor import SampledToken
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import LayersDone
from shared.kv.frames import FrameRange, RejectCode
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.transfer import staging
from shared.transfer.copier import Copier
from shared.transfer.handshake import TRANSPORTS, Introductions
from shared.transfer.host_proof import HostProof, read_token
from shared.transfer.staging import StagingPool, StagingView
from shared.wire import kv_pb2, kv_pb2_grpc
from tests.support.hand_clock import HandClock

_Context: TypeAlias = "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")
chosen_transport = "grpc"
KEY = RequestKey(RequestId("r"), Attempt(1))
RECEIVER = Incarnation(8)


class FakeDecode(kv_pb2_grpc.KvTransferServicer):
    """Takes frames; `held` is told on each stream, the first `num_breaks` streams break after `break_after` frames."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.refuses_staging = False
        self.num_hellos = 0
        self.num_streams = 0
        self.held: list[tuple[FrameRange, ...]] = []
        self.num_breaks = 0
        self.break_after = 1
        self.reject_with: RejectCode | None = None
        self.first_token_answers: list[RejectCode | None] = []
        self.num_first_tokens = 0
        self.cached_tokens = 0
        self.refuses_hello = False
        self.frames: list[list[FrameRange]] = []
        self.transports: list[str] = []
        self.num_good = 0
        self.num_keep_alives = 0
        self.most_unacknowledged = 0
        self.acks = asyncio.Event()
        self.acks.set()
        self.heard = asyncio.Condition()

    async def Hello(self, request: kv_pb2.TransferHello, context: object) -> kv_pb2.TransferWelcome:
        """Counts."""
        self.num_hellos += 1
        if self.refuses_hello:
            raise ServingError(ErrorCode.KV_CORRUPT, "unlike KV layouts: block_size 4 and 8")
        proof = read_token(request.shm_proof_path) if self.transport == "shm" else None
        return kv_pb2.TransferWelcome(incarnation=RECEIVER, transport=self.transport, shm_proof=proof or b"")

    async def FirstToken(self, request: kv_pb2.FirstTokenRequest, context: object) -> kv_pb2.FirstTokenReply:
        """The next of the answers; accepted when they have run out."""
        self.num_first_tokens += 1
        self.cached_tokens = request.cached_tokens
        code = self.first_token_answers.pop(0) if self.first_token_answers else None
        return kv_pb2.FirstTokenReply(rejected=reject_to_wire(code))

    async def Push(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: _Context
    ) -> None:
        """One stream."""
        number = self.num_streams
        self.num_streams += 1
        self.frames.append([])
        opening = (await context.read()).open
        self.transports.append(opening.transport)
        if opening.transport == "shm" and self.refuses_staging:
            reject = kv_pb2.Reject(code=kv_pb2.REJECT_CODE_NO_TRANSPORT)
            await context.write(kv_pb2.PushDown(reject=reject))
            return
        view = None
        if opening.transport == "shm":
            view = StagingView(
                opening.staging_path, opening.staging_bytes, transfer_id=TransferId(3), sender=Incarnation(1)
            )
        try:
            await self._take_frames(number, view, context)
        finally:
            if view is not None:
                view.close()

    async def _take_frames(self, number: int, view: StagingView | None, context: _Context) -> None:
        if self.reject_with is not None and number == 0:
            reject = kv_pb2.Reject(code=reject_to_wire(self.reject_with))
            await context.write(kv_pb2.PushDown(reject=reject))
            return
        held = self.held[number] if number < len(self.held) else ()
        await context.write(kv_pb2.PushDown(held=held_to_wire(held)))
        acked_upto = 0
        while (message := await context.read()) is not aio.EOF:
            if message.HasField("frame"):
                header = frame_header_from_wire(message.frame)
                self._count(message.frame, view)
                self.frames[number].append(header.range)
                self.most_unacknowledged = max(self.most_unacknowledged, header.number - acked_upto)
                if number < self.num_breaks and len(self.frames[number]) > self.break_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            else:
                self.num_keep_alives += 1
            async with self.heard:
                self.heard.notify_all()
            if self.acks.is_set() and len(self.frames[number]) > acked_upto:
                acked_upto = len(self.frames[number])
                await context.write(kv_pb2.PushDown(ack=kv_pb2.FrameAck(upto=acked_upto)))

    def _count(self, frame: kv_pb2.KvFrame, view: StagingView | None) -> None:
        payload = frame.payload if view is None else view.part(frame.staging_offset, frame.staging_length)
        self.num_good += zlib.crc32(payload) == frame.crc32 and len(payload) > 0

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Asks after every message."""
        async with asyncio.timeout(5), self.heard:
            await self.heard.wait_for(is_met)


class FakeTable:
    """What the senders tell the table, and how many reads are under way."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.ended = asyncio.Event()
        self.error: ServingError | None = None

    def read_began(self, job: PrefillJob) -> None:
        """One more."""
        job.num_reads += 1

    def read_returned(self, job: PrefillJob) -> None:
        """One less."""
        job.num_reads -= 1

    def sent(self, job: PrefillJob) -> None:
        """Well."""
        self._end("sent", job)

    def dropped(self, job: PrefillJob) -> None:
        """Quietly."""
        self._end("dropped", job)

    def send_failed(self, job: PrefillJob, error: ServingError) -> None:
        """With an error."""
        self.error = error
        self._end("failed", job)

    def _end(self, how: str, job: PrefillJob) -> None:
        self.ends.append(how)
        job.stopped.set()
        self.ended.set()


class Bench:
    """A job of ten tokens (three blocks) and everything that its sender needs."""

    def __init__(
        self,
        decode: FakeDecode,
        table: FakeTable,
        senders: TransferSenders,
        introductions: Introductions,
        job: PrefillJob,
        metrics: Metrics,
        staging: StagingPool,
    ) -> None:
        self.metrics = metrics
        self.staging = staging
        self.decode = decode
        self.table = table
        self.senders = senders
        self.introductions = introductions
        self.job = job

    def compute(self, upto: int) -> None:
        """Chunks up to here are done; with the last one there is token 1."""
        self.job.computed_upto = upto
        if upto == self.job.spec.num_prompt_tokens:
            self.job.first_token = SampledToken(token_id=TokenId(5))
            self.job.computed.set()
        self.job.progressed.set()

    async def end(self) -> list[str]:
        """Waits for what the table is told."""
        async with asyncio.timeout(10):
            await self.table.ended.wait()
        return self.table.ends


@asynccontextmanager
async def bench(*, num_prompt_tokens: int = 10, address: str | None = None) -> AsyncGenerator[Bench]:
    """The fake decode worker, served, and a sender of one job, not yet started."""
    decode, table, metrics, channels, copier = (
        FakeDecode(chosen_transport),
        FakeTable(),
        Metrics("prefill", "p"),
        ChannelPool(""),
        Copier(),
    )
    clock = HandClock()
    segments, proof = StagingPool(), HostProof()

    def add(server: aio.Server) -> None:
        kv_pb2_grpc.add_KvTransferServicer_to_server(decode, server)

    async with serve(add, host="127.0.0.1", port=0, token="", services=()) as server, asyncio.TaskGroup() as group:
        num_blocks = -(-num_prompt_tokens // 4)
        spec = RequestSpec(
            request_id=KEY.request_id,
            prompt_ids=tuple(TokenId(token) for token in range(num_prompt_tokens)),
            max_tokens=1,
            sampling=SamplingParams(seed=1),
        )
        job = PrefillJob(
            key=KEY,
            spec=spec,
            epoch=Epoch(1),
            target=KvTarget(
                worker_id=WorkerId("decode-0"),
                address=address or server.address,
                incarnation=RECEIVER,
                transfer_id=TransferId(3),
                transports=TRANSPORTS,
            ),
            moments=Moments(received_at=0),
            block_table=BlockTable([BlockId(block) for block in range(num_blocks)], 4),
        )
        introductions = Introductions(
            worker_id=WorkerId("p"),
            incarnation=Incarnation(1),
            layout=LAYOUT,
            transports=TRANSPORTS,
            proof=proof,
            channel_for=channels.get,
            metrics=metrics,
            log=get_logger("test"),
        )
        senders = TransferSenders(
            group=group,
            service=table,
            introductions=introductions,
            incarnation=Incarnation(1),
            memory=KvMemory(LAYOUT, num_blocks),
            copier=copier,
            staging=segments,
            channel_for=channels.get,
            random=lambda: 0.0,
            clock=clock,
            metrics=metrics,
            log=get_logger("test"),
        )
        yield Bench(decode, table, senders, introductions, job, metrics, segments)
        job.stopped.set()
    async with asyncio.timeout(5.0):
        while job.num_reads:  # a read that had begun returns by its own thread
            await asyncio.sleep(0.001)
    await channels.close()
    copier.close()
    segments.close()
    proof.close()
    metrics.close()
    assert segments.num_segments == 0


@pytest.fixture(autouse=True, params=["grpc", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that decode chooses."""
    monkeypatch.setattr(sys.modules[__name__], "chosen_transport", request.param)
    return request.param


def tokens(*frames: tuple[int, int]) -> list[FrameRange]:
    """Frames of all layers over these token ranges."""
    return [FrameRange(layer_start=0, layer_end=2, token_start=start, token_end=end) for start, end in frames]


async def test_frames_leave_as_chunks_are_computed() -> None:
    """Whole blocks at once, the partly filled one when the prompt is computed; the job ends when all is acknowledged."""
    async with bench() as b:
        b.job.cached_tokens = 4
        b.senders.start(b.job)
        b.compute(6)
        await b.decode.until(lambda: b.decode.frames == [tokens((0, 4))])
        assert b.table.ends == []
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.frames == [tokens((0, 4), (4, 10))]
        assert (b.decode.num_hellos, b.decode.num_first_tokens, b.decode.cached_tokens) == (1, 1, 4)
        assert b.job.sent_bytes == 3 * LAYOUT.block_bytes


async def test_bytes_and_the_exposed_time_are_counted(transport: str) -> None:
    """Every payload is what its frame says; bytes count by transport, and each job that had a last step."""
    async with bench() as b:
        b.job.moments.computed_at = 0.0
        b.senders.start(b.job)
        b.compute(10)
        await b.end()
        text = b.metrics.render().decode()

        assert b.decode.num_good == len(b.decode.frames[0])
        assert f'firsttoken_kv_transfer_bytes_total{{transport="{transport}"}} {3.0 * LAYOUT.block_bytes}' in text
        assert "firsttoken_kv_transfer_exposed_seconds_count 1.0" in text


async def test_a_segment_that_is_refused_means_grpc(transport: str) -> None:
    """For this and the following transfers of the pair; nothing is lost by it."""
    async with bench() as b:
        b.decode.refuses_staging = True
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.transports == (["shm", "grpc"] if transport == "shm" else ["grpc"])
        assert await b.introductions.introduce(b.job.target) == "grpc"
        assert b.decode.frames[-1] == tokens((0, 10))


async def test_without_a_free_segment_the_transfer_goes_by_grpc(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one alone: the pair's transport stays."""
    monkeypatch.setattr(staging, "MAX_SEGMENTS", 0)
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.transports == ["grpc"]
        assert await b.introductions.introduce(b.job.target) == transport
        counted = 'firsttoken_kv_transport_fallbacks_total{reason="segments"} 1.0' in b.metrics.render().decode()
        assert counted is (transport == "shm")


async def test_a_segment_is_used_again_only_when_all_of_it_was_acknowledged() -> None:
    """After a stream that broke with a frame under way none is kept; after a whole transfer one is."""
    async with bench() as b:
        b.decode.acks.clear()
        b.senders.start(b.job)
        b.compute(8)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) > 0)
        b.job.stopped.set()
        async with asyncio.timeout(5.0):
            while b.staging.num_segments:
                await asyncio.sleep(0.001)
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(10)
        await b.end()

        assert b.staging.num_segments == (1 if b.decode.transport == "shm" else 0)


async def test_layers_of_the_last_chunk_leave_before_it_is_done() -> None:
    """What is told of it goes at once, the rest when it is computed."""
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(8)
        b.job.running = LayersDone(token_end=10, num_layers=1, is_last=True)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) == 2)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert [*tokens((0, 8)), _layer(0, 8, 10), _layer(1, 8, 10)] == b.decode.frames[0]


def _layer(layer: int, start: int, end: int) -> FrameRange:
    return FrameRange(layer_start=layer, layer_end=layer + 1, token_start=start, token_end=end)


async def test_no_more_frames_than_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight unacknowledged ones; the ninth waits for an acknowledgement."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.05)
    async with bench(num_prompt_tokens=80) as b:
        b.decode.acks.clear()
        b.senders.start(b.job)
        for upto in range(4, 81, 4):
            b.compute(upto)
            if upto <= 32:
                await b.decode.until(
                    lambda number=upto // 4: bool(b.decode.frames) and len(b.decode.frames[0]) == number
                )
        await b.decode.until(lambda: b.decode.num_keep_alives > 0)
        assert len(b.decode.frames[0]) == 8
        b.decode.acks.set()

        assert await b.end() == ["sent"]
        assert b.decode.most_unacknowledged <= 8


async def test_a_broken_stream_is_opened_again_for_the_rest() -> None:
    """What decode names as held is not sent again; token 1 was told once."""
    async with bench(num_prompt_tokens=12) as b:
        b.decode.num_breaks = 1
        b.decode.held = [(), tuple(tokens((0, 4)))]
        b.senders.start(b.job)
        b.compute(4)
        await b.decode.until(lambda: b.decode.frames == [tokens((0, 4))])
        b.compute(8)
        await b.decode.until(lambda: b.decode.num_streams == 2 and b.decode.frames[1] == tokens((4, 8)))
        b.compute(12)

        assert await b.end() == ["sent"]
        assert b.decode.frames == [tokens((0, 4), (4, 8)), tokens((4, 8), (8, 12))]
        assert b.decode.num_first_tokens == 1


@pytest.mark.parametrize(
    ("code", "expected", "error"),
    [
        (RejectCode.GONE, "dropped", None),
        (RejectCode.FAULT, "dropped", None),
        (RejectCode.STALE_INCARNATION, "failed", ErrorCode.KV_TRANSFER_FAILED),
        (RejectCode.UNKNOWN_TRANSFER, "failed", ErrorCode.KV_TRANSFER_FAILED),
        (RejectCode.BAD_CHECKSUM, "failed", ErrorCode.KV_CORRUPT),
    ],
)
async def test_a_rejection_ends_the_job(code: RejectCode, expected: str, error: ErrorCode | None) -> None:
    """Quietly where decode has told the scheduler itself, else as a failure that the scheduler hears of."""
    async with bench() as b:
        b.decode.reject_with = code
        b.senders.start(b.job)

        assert await b.end() == [expected]
        assert error == (b.table.error.code if b.table.error else None)
        assert b.decode.num_streams == 1


async def test_one_who_is_not_known_says_hello_again() -> None:
    """A decode worker that has forgotten the pair is introduced to anew, and the transfer goes on."""
    async with bench() as b:
        b.decode.reject_with = RejectCode.NO_HANDSHAKE
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.num_hellos == 2


async def test_a_first_token_that_is_refused_as_gone_ends_the_job_quietly() -> None:
    """The attempt has ended at decode, whatever frames were still to come."""
    async with bench() as b:
        b.decode.first_token_answers = [RejectCode.GONE]
        b.decode.acks.clear()
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["dropped"]


async def test_an_unlike_layout_fails_the_job_with_the_reason() -> None:
    """Once, without a stream."""
    async with bench() as b:
        b.decode.refuses_hello = True
        b.senders.start(b.job)

        assert await b.end() == ["failed"]
        assert b.table.error == ServingError(ErrorCode.KV_CORRUPT, "unlike KV layouts: block_size 4 and 8")
        assert b.decode.num_streams == 0


async def test_nobody_there_is_given_up_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again with growing delays, then reported as a failed transfer."""
    monkeypatch.setattr(sender, "MAX_TRIES", 3)
    async with bench(address="127.0.0.1:1") as b:
        b.senders.start(b.job)

        assert await b.end() == ["failed"]
        assert b.table.error is not None
        assert b.table.error.code is ErrorCode.KV_TRANSFER_FAILED


async def test_a_stopped_job_sends_nothing_more_and_says_nothing() -> None:
    """The table has ended it and knows why."""
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(4)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) == 1)
        b.job.stopped.set()
        b.compute(10)

    assert b.table.ends == []
    assert b.decode.num_first_tokens == 0


async def test_keep_alives_hold_the_reservation_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits for its turn still gives signs on its stream."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.02)
    async with bench() as b:
        b.senders.start(b.job)
        await b.decode.until(lambda: b.decode.num_keep_alives >= 3)
        b.compute(10)

        assert await b.end() == ["sent"]


async def test_progress_that_fills_no_block_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter than the keep-alive's interval, with nothing to send, do not put it off for ever."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.05)
    async with bench() as b:
        b.senders.start(b.job)
        async with asyncio.timeout(5.0):
            while b.decode.num_keep_alives < 3:
                b.job.progressed.set()
                await asyncio.sleep(0.001)
        b.compute(10)

        assert await b.end() == ["sent"]


async def test_jobs_that_start_at_once_say_hello_once() -> None:
    """Once for a pair of incarnations, not once for a request; another start of the same address is met anew."""
    async with bench() as b:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(b.introductions.introduce(b.job.target))
        assert b.decode.num_hellos == 1
        with pytest.raises(ServingError, match="started anew"):
            await b.introductions.introduce(replace(b.job.target, incarnation=Incarnation(99)))

    assert b.decode.num_hellos == 2
