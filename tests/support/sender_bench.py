"""One transfer of the prefill worker, between a table that listens and a decode worker that answers as a test says."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from grpc import aio

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
from shared.kv.frames import FrameRange, RejectCode
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
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
        async with asyncio.timeout(30), self.heard:
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
        async with asyncio.timeout(30):
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
    async with asyncio.timeout(30):
        while job.num_reads:  # a read that had begun returns by its own thread
            await asyncio.sleep(0.001)
    await channels.close()
    copier.close()
    segments.close()
    proof.close()
    metrics.close()
    assert segments.num_segments == 0
