"""Carries KV and token 1 of each job to its decode worker: one Push stream a transfer, FirstToken beside it.

A broken stream is opened again for the same transfer, and only what decode does not hold is sent again. An answer
starts the time anew after which we give up; decode's lease ends by then as well, so neither waits for the other.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias, TypeVar, cast

import grpc
from grpc import aio
from structlog.typing import FilteringBoundLogger

from prefill_worker.job import PrefillJob
from shared.aio.backoff import Backoff
from shared.aio.scope import spawn, stop_when
from shared.codec.kv import frame_to_wire, held_from_wire, reject_from_wire
from shared.codec.request import key_to_wire, logprobs_to_wire
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation
from shared.domain.refusals import RefusedKind
from shared.kv.frame_plan import FramePlan
from shared.kv.frames import MAX_UNACKNOWLEDGED_FRAMES, FrameHeader, FrameRange, RejectCode, payload_bytes
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.obs.metrics import Metrics
from shared.rpc.calls import end_call
from shared.rpc.errors import serving_error
from shared.transfer.copier import Copier
from shared.transfer.handshake import SHM, Introductions
from shared.transfer.staging import SEGMENT_BYTES, StagingPool, StagingSegment
from shared.wire import kv_pb2, kv_pb2_grpc

KEEP_ALIVE_S = 1.0  # a tenth of decode's lease
GIVE_UP_S = 10.0  # without any answer; decode's lease is over by then as well
ANSWER_TIMEOUT_S = 5.0  # for the first message of a stream, and for its end
MAX_TRIES = 64  # a link that opens and breaks for ever, each time with an answer
RETRY_INITIAL_S = 0.05
RETRY_MAX_S = 1.0

if TYPE_CHECKING:
    _PushCall: TypeAlias = aio.StreamStreamCall[kv_pb2.PushUp, kv_pb2.PushDown]
    _Stub: TypeAlias = kv_pb2_grpc.KvTransferAsyncStub

# Decode has ended the attempt and told the scheduler why: nothing is left to say here.
_ENDED_THERE = (RejectCode.GONE, RejectCode.FAULT)


class _Rejected(Exception):
    """Decode takes nothing more of this transfer."""

    def __init__(self, code: RejectCode, message: str = "") -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class _Broken(Exception):
    """The stream ended without a word: open it again."""


class JobTable(Protocol):
    """The worker's table, as far as senders need it; see `PrefillService`."""

    def read_began(self, job: PrefillJob) -> None: ...

    def read_returned(self, job: PrefillJob) -> None: ...

    def sent(self, job: PrefillJob) -> None: ...

    def dropped(self, job: PrefillJob) -> None: ...

    def send_failed(self, job: PrefillJob, error: ServingError) -> None: ...


class TransferSenders:
    """`start` makes a task a job in `group`, which ends by itself soon after `job.stopped`."""

    def __init__(
        self,
        *,
        group: asyncio.TaskGroup,
        service: JobTable,
        introductions: Introductions,
        incarnation: Incarnation,
        memory: KvMemory,
        copier: Copier,
        staging: StagingPool,
        channel_for: Callable[[str], grpc.aio.Channel],
        random: Callable[[], float],
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._group = group
        self._service = service
        self._introductions = introductions
        self._incarnation = incarnation
        self._memory = memory
        self._copier = copier
        self._staging = staging
        self._channel_for = channel_for
        self._random = random
        self._clock = clock
        self._metrics = metrics
        self._log = log

    def start(self, job: PrefillJob) -> None:
        spawn(self._group, self._run(job), name=f"sender {job.key}")

    async def _run(self, job: PrefillJob) -> None:
        """The job's top: however it ends, it becomes a word to the table."""
        error: ServingError | None = None
        is_ended_there = False
        async with stop_when(job.stopped):
            try:
                await _Transfer(self, job).run()
            except* _Rejected as group:
                rejected = _first(group)
                is_ended_there = rejected.code in _ENDED_THERE
                self._log.debug("transfer rejected", key=str(job.key), code=rejected.code.value)
                error = _error_of(rejected)
            except* ServingError as group:
                error = _first(group)
            except* Exception as group:  # noqa: BLE001 - one job's bug must not end the others: it is logged, and the job fails
                self._log.error("sender failed", key=str(job.key), exc_info=group)
                error = ServingError(ErrorCode.INTERNAL, "internal error")
        if job.stopped.is_set():
            return
        if is_ended_there:
            self._service.dropped(job)
        elif error is not None:
            self._service.send_failed(job, error)
        else:
            self._service.sent(job)

    # ---- what a transfer needs

    @property
    def layout(self) -> KvLayout:
        return self._memory.layout

    def log_broken(self, job: PrefillJob, group: BaseExceptionGroup[BaseException]) -> None:
        self._log.debug("transfer broken", key=str(job.key), reason=type(_first(group)).__name__)

    def note_acknowledged(self, job: PrefillJob) -> None:
        """Decode has everything: what it took beyond the last step of prefill was not hidden by it."""
        if job.moments.acknowledged_at is not None:  # a stream that broke at its very end was opened again
            return
        job.moments.acknowledged_at = self.now()
        if job.moments.computed_at is not None:
            self._metrics.kv_transfer_exposed_seconds.record(self.now() - job.moments.computed_at)

    def backoff(self) -> Backoff:
        return Backoff(initial_s=RETRY_INITIAL_S, max_s=RETRY_MAX_S, random=self._random)

    def now(self) -> float:
        return self._clock.monotonic()

    async def meet(self, job: PrefillJob) -> "tuple[_Stub, str]":
        """Shakes hands first, once; names the transport. Raises ServingError for a final refusal, AioRpcError where
        there is no answer.
        """
        try:
            transport = await self._introductions.introduce(job.target)
        except aio.AioRpcError as failed:
            refused = serving_error(failed)
            if refused.code in (ErrorCode.KV_CORRUPT, ErrorCode.STALE_ATTEMPT, ErrorCode.KV_TRANSFER_FAILED):
                self._metrics.refused(RefusedKind.HANDSHAKE)
                self._log.warning("handshake refused", peer=job.target.worker_id, reason=refused.message)
                if refused.code is ErrorCode.KV_CORRUPT:
                    raise refused from failed
                raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "the decode worker took no handshake") from failed
            raise
        return kv_pb2_grpc.KvTransferStub(self._channel_for(job.target.address)), transport

    def forget(self, job: PrefillJob) -> None:
        self._introductions.forget(job.target)

    def fall_back(self, job: PrefillJob, from_transport: str) -> None:
        self._introductions.fall_back(job.target, from_transport)

    def lease(self, job: PrefillJob, transport: str) -> tuple[str, StagingSegment | None]:
        """What the stream goes by: shared memory where there is a segment left, else the next best."""
        if transport != SHM:
            return transport, None
        segment = self._staging.lease(job.target.transfer_id, self._incarnation)
        if segment is not None:
            return SHM, segment
        self._metrics.kv_transport_fallbacks.add("segments")
        return self._introductions.next_best(job.target, SHM), None

    def give_back(self, segment: StagingSegment, *, is_whole: bool) -> None:
        self._staging.give_back(segment, is_whole=is_whole)

    async def read_frame(self, job: PrefillJob, number: int, frame: FrameRange, stream: "_Stream") -> kv_pb2.KvFrame:
        """The frame, its payload read and summed by the copy thread; until it returns the blocks stay the job's."""
        block_table = job.block_table
        assert block_table is not None
        block_ids = block_table.blocks_of(frame.token_start, frame.token_end)
        num_bytes = payload_bytes(self.layout, frame)
        covered = {
            "layer_start": frame.layer_start,
            "layer_end": frame.layer_end,
            "num_tokens": frame.token_end - frame.token_start,
        }
        staged = (0, 0)
        part: memoryview | None = None
        if stream.segment is not None:
            staged = (stream.segment.take_slot(number), num_bytes)
            part = stream.segment.part(*staged)  # held until the copy has returned, whatever becomes of the stream

        def read() -> tuple[bytes, int]:
            if part is None:
                payload = self._memory.read(block_ids, **covered)
                return payload, zlib.crc32(payload)
            with part:
                self._memory.read_into(part, block_ids, **covered)
                return b"", zlib.crc32(part)

        self._service.read_began(job)
        reading = self._copier.submit(read)
        reading.add_done_callback(lambda _: self._service.read_returned(job))
        payload, crc32 = await asyncio.shield(reading)
        header = FrameHeader(
            number=number,
            key=job.key,
            transfer_id=job.target.transfer_id,
            sender_incarnation=self._incarnation,
            range=frame,
            crc32=crc32,
        )
        job.sent_bytes += num_bytes
        self._metrics.kv_transfer_bytes.add(stream.transport, num_bytes)
        return frame_to_wire(header, payload, staged=staged)

    def opening(self, job: PrefillJob, transport: str, segment: StagingSegment | None) -> kv_pb2.PushOpen:
        return kv_pb2.PushOpen(
            key=key_to_wire(job.key),
            transfer_id=job.target.transfer_id,
            sender_incarnation=self._incarnation,
            receiver_incarnation=job.target.incarnation,
            transport=transport,
            staging_path=segment.path if segment else "",
            staging_bytes=SEGMENT_BYTES if segment else 0,
        )

    def first_token(self, job: PrefillJob) -> kv_pb2.FirstTokenRequest:
        assert job.first_token is not None
        return kv_pb2.FirstTokenRequest(
            key=key_to_wire(job.key),
            transfer_id=job.target.transfer_id,
            sender_incarnation=self._incarnation,
            receiver_incarnation=job.target.incarnation,
            token_id=job.first_token.token_id,
            logprobs=None if job.first_token.logprobs is None else logprobs_to_wire(job.first_token.logprobs),
            cached_tokens=job.cached_tokens,
        )


class _Stream:
    """What one Push stream has to send and has sent."""

    def __init__(self, plan: FramePlan, transport: str, segment: StagingSegment | None) -> None:
        self.plan = plan
        self.transport = transport
        self.segment = segment
        self.todo: deque[FrameRange] = deque()
        self.num_sent = 0
        self.acked_upto = 0
        self.is_finished = False

    def acknowledge(self, upto: int) -> None:
        """An acknowledgement of what was not sent counts for nothing."""
        self.acked_upto = max(self.acked_upto, min(upto, self.num_sent))
        if self.segment is not None:
            self.segment.acknowledged(self.acked_upto)

    @property
    def has_credit(self) -> bool:
        return self.num_sent - self.acked_upto < MAX_UNACKNOWLEDGED_FRAMES

    @property
    def is_acknowledged(self) -> bool:
        return not self.todo and self.acked_upto == self.num_sent


class _Transfer:
    """One job's hand-over, over as many streams as it takes. `run` returns when decode has acknowledged all of it."""

    def __init__(self, senders: TransferSenders, job: PrefillJob) -> None:
        self._senders = senders
        self._job = job
        self._layout = senders.layout
        self._is_first_token_told = False  # or there is none to tell
        self._num_answers = 0

    async def run(self) -> None:
        """Raises, in a group, _Rejected or ServingError."""
        async with asyncio.TaskGroup() as group:
            spawn(group, self._until_done(self._push), name=f"push {self._job.key}")
            spawn(group, self._tell_first_token(), name=f"first token {self._job.key}")

    async def _tell_first_token(self) -> None:
        await self._job.computed.wait()
        if self._job.first_token is not None:
            await self._until_done(self._tell_once)
        self._is_first_token_told = True
        self._job.progressed.set()

    async def _until_done(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Tries until it works, is refused, or has had no answer for GIVE_UP_S.

        Each try is a task of its own: a group that fails in the moment of its cancel tells of the failure alone (until
        Python 3.13), and a loop in the same task would try again, though nobody wants it any more.
        """
        backoff = self._senders.backoff()
        failing_since: float | None = None
        num_answers = self._num_answers
        async with asyncio.TaskGroup() as group:
            for _ in range(MAX_TRIES):
                trying = spawn(group, self._has_worked(attempt), name=f"try {self._job.key}")
                await asyncio.wait({trying})
                if trying.result():
                    return
                if self._num_answers != num_answers:
                    num_answers = self._num_answers
                    failing_since = None
                    backoff.reset()
                now = self._senders.now()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since >= GIVE_UP_S:
                    break
                await asyncio.sleep(backoff.next_delay())
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "the decode worker cannot be reached")

    async def _has_worked(self, attempt: Callable[[], Awaitable[None]]) -> bool:
        """False where it broke, and is worth another try."""
        has_worked = False
        try:
            await attempt()
            has_worked = True
        except* (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, TimeoutError, _Broken) as group:
            self._senders.log_broken(self._job, group)
        return has_worked

    async def _tell_once(self) -> None:
        stub, _ = await self._senders.meet(self._job)
        reply = await stub.FirstToken(self._senders.first_token(self._job))
        code = reject_from_wire(reply.rejected)
        if code is not None:
            self._raise(code, "first token")
        self._num_answers += 1

    async def _push(self) -> None:
        stub, transport = await self._senders.meet(self._job)
        transport, segment = self._senders.lease(self._job, transport)
        is_whole = False
        try:
            await self._push_by(stub.Push(), transport, segment)
            is_whole = True
        finally:
            if segment is not None:
                self._senders.give_back(segment, is_whole=is_whole)

    async def _push_by(self, call: "_PushCall", transport: str, segment: StagingSegment | None) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await call.write(kv_pb2.PushUp(open=self._senders.opening(self._job, transport, segment)))
                first = await call.read()
            if not isinstance(first, kv_pb2.PushDown):
                raise _Broken("closed before the first answer")
            if first.WhichOneof("message") == "reject":
                if reject_from_wire(first.reject.code) is RejectCode.NO_TRANSPORT:
                    self._senders.fall_back(self._job, transport)
                    raise _Broken("another transport")
                self._raise_reject(first.reject)
            self._num_answers += 1
            plan = FramePlan(self._layout, self._job.spec.num_prompt_tokens, held_from_wire(first.held))
            stream = _Stream(plan, transport, segment)
            async with asyncio.TaskGroup() as group:
                reader = spawn(group, self._read(call, stream), name=f"acks {self._job.key}")
                await self._send(call, stream)
                stream.is_finished = True
                await call.done_writing()
                await asyncio.wait({reader}, timeout=ANSWER_TIMEOUT_S)
                reader.cancel()
        finally:
            end_call(call)

    async def _send(self, call: "_PushCall", stream: _Stream) -> None:
        """Frames as chunks are computed and credit allows, keep-alives while there is nothing to send."""
        job = self._job
        clock = asyncio.get_running_loop()
        sign_at = clock.time()
        while True:
            job.progressed.clear()
            stream.todo.extend(stream.plan.advance(job.computed_upto, job.running))
            if stream.todo and stream.has_credit:
                frame = stream.todo.popleft()
                stream.num_sent += 1
                message = await self._senders.read_frame(job, stream.num_sent, frame, stream)
                await call.write(kv_pb2.PushUp(frame=message))
                sign_at = clock.time()
                continue
            if job.is_computed and stream.is_acknowledged and self._is_first_token_told:
                self._senders.note_acknowledged(job)
                return
            # By the last sign and not by the last progress: chunks that fill no block make progress and send nothing.
            try:
                async with asyncio.timeout_at(sign_at + KEEP_ALIVE_S):
                    await job.progressed.wait()
            except TimeoutError:
                await call.write(kv_pb2.PushUp(keep_alive=kv_pb2.KeepAlive()))
                sign_at = clock.time()

    async def _read(self, call: "_PushCall", stream: _Stream) -> None:
        while isinstance(message := await call.read(), kv_pb2.PushDown):
            match message.WhichOneof("message"):
                case "ack":
                    stream.acknowledge(message.ack.upto)
                    self._num_answers += 1
                    self._job.progressed.set()
                case "reject":
                    self._raise_reject(message.reject)
                case _:  # what a newer receiver may add
                    pass
        if not stream.is_finished:
            raise _Broken("the receiver closed the stream")

    def _raise_reject(self, reject: kv_pb2.Reject) -> NoReturn:
        self._raise(reject_from_wire(reject.code) or RejectCode.FAULT, reject.message)

    def _raise(self, code: RejectCode, message: str) -> NoReturn:
        if code is RejectCode.NO_HANDSHAKE:  # it has forgotten us: say hello, try again
            self._senders.forget(self._job)
            raise _Broken("no handshake")
        raise _Rejected(code, message)


_Error = TypeVar("_Error", bound=BaseException)


def _first(group: "BaseExceptionGroup[_Error]") -> _Error:
    """A leaf of the group."""
    error = group.exceptions[0]
    return _first(cast("BaseExceptionGroup[_Error]", error)) if isinstance(error, BaseExceptionGroup) else error


def _error_of(rejected: _Rejected) -> ServingError:
    if rejected.code in (RejectCode.BAD_CHECKSUM, RejectCode.BAD_RANGE):
        return ServingError(ErrorCode.KV_CORRUPT, "the KV was damaged on its way")
    return ServingError(ErrorCode.KV_TRANSFER_FAILED, "the decode worker refused the KV")
