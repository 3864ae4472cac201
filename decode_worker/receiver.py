"""The receiving end of KV transfers: frames in, checked, copied by our own thread into blocks that the attempt holds.

A received payload belongs to its one transfer and one frame until it is copied, be it in the message (grpc) or in the
transfer's staging segment (shm); a stream has one frame in hand at a time, and what it sends beyond that waits at the
sender (credit). A copy that has begun always returns, and only then may blocks be freed.
"""

import asyncio
import zlib

from grpc import aio
from structlog.typing import FilteringBoundLogger

from decode_worker.sequence import HeldSequence, Stage
from decode_worker.service import DecodeService
from shared.codec.kv import frame_header_from_wire, held_to_wire, reject_to_wire
from shared.codec.request import key_from_wire, logprobs_from_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, TokenId, TransferId
from shared.domain.refusals import RefusedKind
from shared.engine.executor import SampledToken
from shared.kv.frames import AlreadyHeld, Reject, RejectCode, WriteBlocks
from shared.kv.memory import KvMemory
from shared.obs.metrics import Metrics
from shared.transfer.copier import Copier
from shared.transfer.handshake import GRPC, SHM, Acquaintances
from shared.transfer.staging import StagingError, StagingGoneError, StagingView
from shared.wire import common_pb2, kv_pb2, kv_pb2_grpc

_OPEN_TIMEOUT_S = 5.0  # the first message of a stream is sent with its opening
_SILENCE_S = 15.0  # a sender signs each second, and after 10 s without a sign its reservation has lapsed


class _Damaged(Exception):
    """What lies in the blocks now, if anything was written, is not what was sent: nobody may have it."""

    def __init__(self, code: RejectCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class _GivenUp(Exception):
    """The sender gave the segment up under the copy: what was read may be anything, and is not held."""


class KvReceiver(kv_pb2_grpc.KvTransferServicer):
    """The servicer of `KvTransfer`."""

    def __init__(
        self,
        *,
        service: DecodeService,
        acquaintances: Acquaintances,
        incarnation: Incarnation,
        memory: KvMemory,
        copier: Copier,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._service = service
        self._acquaintances = acquaintances
        self._incarnation = incarnation
        self._memory = memory
        self._copier = copier
        self._metrics = metrics
        self._log = log

    async def Hello(self, request: kv_pb2.TransferHello, context: object) -> kv_pb2.TransferWelcome:
        try:
            welcome = self._acquaintances.welcome(request)
        except ServingError as error:
            self._metrics.refused(RefusedKind.HANDSHAKE)
            self._log.warning("handshake refused", peer=request.worker_id, reason=error.message)
            raise
        self._log.info("handshake", peer=request.worker_id, transport=welcome.transport)
        return welcome

    async def FirstToken(self, request: kv_pb2.FirstTokenRequest, context: object) -> kv_pb2.FirstTokenReply:
        sender = Incarnation(request.sender_incarnation)
        row = self._find(
            key=request.key, transfer_id=request.transfer_id, sender=sender, receiver=request.receiver_incarnation
        )
        if isinstance(row, HeldSequence):
            row.sender = sender
            logprobs = logprobs_from_wire(request.logprobs) if request.HasField("logprobs") else None
            token = SampledToken(token_id=TokenId(request.token_id), logprobs=logprobs)
            code = self._service.take_first_token(row, token, request.cached_tokens)
            if code is not None:
                self._metrics.refused(RefusedKind.LATE_TRANSFER)
        else:
            code = row.code
        return kv_pb2.FirstTokenReply(rejected=reject_to_wire(code))

    # A coroutine that reads and writes, where the generated type wants a generator: so each wait has its limit.
    async def Push(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]"
    ) -> None:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            first = await context.read()
        if first is aio.EOF or first.WhichOneof("message") != "open":
            await _reject(context, Reject(code=RejectCode.NO_HANDSHAKE, message="a stream begins with its opening"))
            return
        opened = self._open(first.open)
        if isinstance(opened, Reject):
            await _reject(context, opened)
            return
        row = opened
        stream = row.receiver.stream
        try:
            staging = self._staging_of(first.open)
        except StagingError as error:
            self._metrics.refused(RefusedKind.STAGING)
            self._log.warning("KV transport refused", key=str(row.key), reason=str(error))
            await _reject(context, Reject(code=RejectCode.NO_TRANSPORT, message=str(error)))
            return
        try:
            self._service.sign(row)
            await context.write(kv_pb2.PushDown(held=held_to_wire(row.receiver.held_ranges())))
            await self._take_frames(row, stream, staging, context)
        finally:
            if staging is not None:
                self._copier.submit(staging.close)  # behind the copy that may still read it

    def _staging_of(self, opening: kv_pb2.PushOpen) -> StagingView | None:
        """Where the payloads of the stream will lie; None: in its messages. Raises StagingError."""
        transport = opening.transport or GRPC
        if transport not in self._acquaintances.transports:
            raise StagingError(f"transport {transport[:16]} is not offered")
        if transport != SHM:
            return None
        return StagingView(
            opening.staging_path,
            opening.staging_bytes,
            transfer_id=TransferId(opening.transfer_id),
            sender=Incarnation(opening.sender_incarnation),
        )

    async def _take_frames(
        self,
        row: HeldSequence,
        stream: int,
        staging: StagingView | None,
        context: "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]",
    ) -> None:
        """Until the sender has done with the stream, or says something of an attempt that has ended here.

        The end is the answer to its next word, which comes within a second: who hears of it from the scheduler before
        closes the stream and says none. What was late is so known for certain, and counted as such.
        """
        while (answer := await self._next_answer(row, stream, staging, context)) is not None:
            if isinstance(answer, Reject):
                await _reject(context, answer)
                return
            await context.write(kv_pb2.PushDown(ack=kv_pb2.FrameAck(upto=answer)))

    async def _next_answer(
        self,
        row: HeldSequence,
        stream: int,
        staging: StagingView | None,
        context: "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]",
    ) -> int | Reject | None:
        """To the next frame: the acknowledgement or the refusal; None when the stream is over."""
        while (message := await _next_word(context)) is not None:
            if row.stage is Stage.ENDED:
                self._metrics.refused(RefusedKind.LATE_TRANSFER)
                return Reject(code=row.reject_code, message="the attempt has ended here")
            match message.WhichOneof("message"):
                case "frame":
                    answer = await self._take_frame(row, stream, staging, message.frame)
                    if isinstance(answer, Reject):
                        self._refuse(row, answer)
                    return answer
                case "keep_alive":
                    self._service.sign(row)
                case _:  # a second opening; or what a newer sender may add
                    return Reject(code=RejectCode.BAD_RANGE, message="neither frame nor keep-alive")
        return None

    def _open(self, opening: kv_pb2.PushOpen) -> HeldSequence | Reject:
        sender = Incarnation(opening.sender_incarnation)
        row = self._find(
            key=opening.key, transfer_id=opening.transfer_id, sender=sender, receiver=opening.receiver_incarnation
        )
        if isinstance(row, Reject):
            return row
        opened = row.receiver.open(
            key=row.key,
            transfer_id=TransferId(opening.transfer_id),
            sender_incarnation=sender,
            receiver_incarnation=Incarnation(opening.receiver_incarnation),
        )
        if isinstance(opened, Reject):
            if row.stage is Stage.ENDED:
                self._metrics.refused(RefusedKind.LATE_TRANSFER)
                return Reject(code=row.reject_code, message=opened.message)
            self._metrics.refused(RefusedKind.TRANSFER)
            return opened
        row.sender = sender
        return row

    def _find(
        self, *, key: common_pb2.RequestKey, transfer_id: int, sender: Incarnation, receiver: int
    ) -> HeldSequence | Reject:
        """The row that an opening or a first token is for, whoever the sender claims to be being checked."""
        if receiver != self._incarnation:
            return self._counted(RejectCode.STALE_INCARNATION, "the receiver has been started anew")
        if not self._acquaintances.knows(sender):
            return self._counted(RejectCode.NO_HANDSHAKE, "the sender has not said hello")
        row = self._service.find(key_from_wire(key))
        if isinstance(row, RejectCode):
            return Reject(code=row, message="the attempt is not held here")
        if row.transfer_id != transfer_id:
            return self._counted(RejectCode.UNKNOWN_TRANSFER, "another transfer")
        if row.sender not in (None, sender):
            return self._counted(RejectCode.STALE_INCARNATION, "another start of the sender has the transfer")
        return row

    def _counted(self, code: RejectCode, message: str) -> Reject:
        self._metrics.refused(RefusedKind.TRANSFER)
        return Reject(code=code, message=message)

    async def _take_frame(
        self, row: HeldSequence, stream: int, staging: StagingView | None, frame: kv_pb2.KvFrame
    ) -> int | Reject | None:
        """Check and copy; returns the number up to which all frames are in the pool.

        None for a frame that waited here, while this process stood still, until its sender had given it up: the stream
        is over, and what is to become of the attempt is for others to say.
        """
        payload: bytes | memoryview = frame.payload
        if staging is not None:
            try:
                payload = staging.part(frame.staging_offset, frame.staging_length)
            except StagingGoneError:
                return self._late(row)
            except StagingError as error:
                return Reject(code=RejectCode.BAD_RANGE, message=str(error))
        judged = row.receiver.accept(frame_header_from_wire(frame), num_payload_bytes=len(payload), stream=stream)
        match judged:
            case Reject():
                return judged
            case AlreadyHeld(acked_upto=acked_upto):
                self._metrics.refused(RefusedKind.DOUBLED_FRAME)
                self._service.sign(row)
                return acked_upto
            case WriteBlocks():
                return await self._copy(row, stream, staging, judged, payload)

    async def _copy(
        self,
        row: HeldSequence,
        stream: int,
        staging: StagingView | None,
        write: WriteBlocks,
        payload: bytes | memoryview,
    ) -> int | Reject | None:
        acked_upto, num_bytes = 0, len(payload)

        def copy() -> None:
            try:
                is_sound = zlib.crc32(payload) == write.crc32
                if is_sound:
                    self._memory.write(
                        write.block_ids, layer_start=write.layer_start, layer_end=write.layer_end, payload=payload
                    )
            finally:
                # So that the segment can be unmapped behind this, whoever still refers to the part: an error and the
                # frames that it came by are a cycle, and go when the garbage collector does, in an idle process never.
                if isinstance(payload, memoryview):
                    payload.release()
            if staging is not None and not staging.is_valid:  # asked last: it is given up before it is written again
                raise _GivenUp
            if not is_sound:
                raise _Damaged(RejectCode.BAD_CHECKSUM, f"frame {write.number}")

        copying = self._copier.submit(copy)

        def returned(copied: asyncio.Future[None]) -> None:
            nonlocal acked_upto
            error = asyncio.CancelledError() if copied.cancelled() else copied.exception()
            if error is not None:
                row.receiver.copy_failed(write.number, stream=stream)
                if not isinstance(error, _Damaged | _GivenUp):  # the stream refuses it; without one it is not held
                    self._service.fail_transfer(row, ServingError(ErrorCode.INTERNAL, "internal error"))
                self._service.copy_returned(row, 0)
                return
            acked_upto = row.receiver.copied(write.number, stream=stream)
            self._service.copy_returned(row, num_bytes)

        copying.add_done_callback(returned)
        # The stream may break and the attempt may end meanwhile: the copy goes on, and is waited for by the row.
        try:
            await asyncio.shield(copying)
        except _GivenUp:
            return self._late(row)
        except _Damaged as error:
            return Reject(code=error.code, message=error.message)
        return acked_upto

    def _late(self, row: HeldSequence) -> None:
        """Nobody's fault and nobody's end: a sender that lives opens the transfer again."""
        self._metrics.refused(RefusedKind.LATE_FRAME)
        self._log.debug("late frame", key=str(row.key))

    def _refuse(self, row: HeldSequence, rejected: Reject) -> None:
        """A frame that cannot be taken. Damage is the attempt's end; a late stream's frames are nobody's."""
        self._metrics.refused(RefusedKind.FRAME)
        self._log.warning("frame refused", key=str(row.key), code=rejected.code.value, reason=rejected.message)
        if row.stage is Stage.RECEIVING and rejected.code in (RejectCode.BAD_CHECKSUM, RejectCode.BAD_RANGE):
            self._service.fail_transfer(row, ServingError(ErrorCode.KV_CORRUPT, "the KV was damaged on its way"))


async def _next_word(context: "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]") -> kv_pb2.PushUp | None:
    """What the sender says next; None where it has done, or has stopped to say anything."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            message = await context.read()
    except TimeoutError:
        return None
    return None if message is aio.EOF else message


async def _reject(context: "aio.ServicerContext[kv_pb2.PushUp, kv_pb2.PushDown]", rejected: Reject) -> None:
    await context.write(
        kv_pb2.PushDown(reject=kv_pb2.Reject(code=reject_to_wire(rejected.code), message=rejected.message))
    )
