"""A sender of KV that a test drives frame by frame, with the bytes that the scripted generator would make."""

import zlib
from collections.abc import Sequence
from dataclasses import replace

from shared.codec.kv import frame_to_wire, held_from_wire, layout_to_wire, reject_from_wire
from shared.codec.request import key_to_wire
from shared.domain.ids import BlockId, Incarnation, TransferId
from shared.domain.request import RequestSpec
from shared.engine.executor import PrefillChunk, SampledToken
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import plan_frames
from shared.kv.frames import FrameHeader, FrameRange, RejectCode
from shared.kv.layout import KvLayout
from shared.transfer.handshake import SHM
from shared.transfer.host_proof import HostProof
from shared.transfer.staging import SEGMENT_BYTES, StagingSegment
from shared.wire import kv_pb2, kv_pb2_grpc, scheduler_pb2
from tests.support.cancelled_calls import say_first
from tests.support.worker_pair import WorkerPair, key_of, scripted_engine

SENDER = Incarnation(4711)
ANSWER_S = 60.0  # a hang alone takes longer


class RawSender:
    """Speaks `KvTransfer` for one transfer. `frames` covers the prompt, block by block."""

    def __init__(self, pair: WorkerPair, spec: RequestSpec, reserved: scheduler_pb2.Reserved) -> None:
        self._pair = pair
        self._proof = HostProof()
        pair.closing.callback(self._proof.close)
        self.segment: StagingSegment | None = None
        self.stub = kv_pb2_grpc.KvTransferStub(pair.channels.get(reserved.target.address))
        self.spec = spec
        self.key = key_of(spec.request_id)
        self.target = reserved.target
        self.incarnation = SENDER
        num_blocks = -(-spec.num_prompt_tokens // 16)
        engine = scripted_engine(num_blocks)
        self.layout: KvLayout = engine.memory.layout
        self._memory = engine.memory
        table = BlockTable([BlockId(block) for block in range(num_blocks)], 16)
        start = 0
        self.first_token = 0
        ends = engine.executor.chunk_ends(self.key, spec)
        for number, end in enumerate(ends):
            chunk = PrefillChunk(
                key=self.key, spec=spec, block_table=table, start=start, end=end, is_last=number == len(ends) - 1
            )
            (token,) = engine.executor.prefill([chunk])
            start = end
            if isinstance(token, SampledToken):
                self.first_token = token.token_id
        self.frames: Sequence[FrameRange] = [
            frame
            for start in range(0, spec.num_prompt_tokens, 16)
            for frame in plan_frames(self.layout, start, min(start + 16, spec.num_prompt_tokens))
        ]

    async def hello(self, layout: KvLayout | None = None) -> kv_pb2.TransferWelcome:
        """Introduces this sender."""
        return await self.stub.Hello(
            kv_pb2.TransferHello(
                worker_id="raw",
                incarnation=self.incarnation,
                receiver_incarnation=self.target.incarnation,
                layout=layout_to_wire(layout or self.layout),
                transports=self._pair.transports,
                shm_proof_path=self._proof.path,
            ),
            timeout=ANSWER_S,
        )

    async def open(self, *, spoiled: str = "") -> "RawPush":
        """A new Push stream for the transfer, by the pair's best transport, with something wrong about that if told."""
        push = RawPush(self)
        transport = self._pair.transports[0]
        if transport == SHM:
            self.segment = StagingSegment()
            self._pair.closing.callback(self.segment.close)
            self.segment.claim(TransferId(self.target.transfer_id), self.incarnation)
        opening = kv_pb2.PushOpen(
            key=key_to_wire(self.key),
            transfer_id=self.target.transfer_id,
            sender_incarnation=self.incarnation,
            receiver_incarnation=self.target.incarnation,
            transport=transport,
            staging_path=self.segment.path if self.segment else "",
            staging_bytes=SEGMENT_BYTES if self.segment else 0,
        )
        match spoiled:
            case "path":
                opening.staging_path += "9999"
            case "transfer":
                assert self.segment is not None
                self.segment.disclaim()
            case "transport":
                opening.transport = "tcp"
            case _:
                pass
        await say_first(push.call, kv_pb2.PushUp(open=opening))
        return push

    async def tell_first_token(self, token_id: int | None = None) -> RejectCode | None:
        """FirstToken once; None = accepted."""
        reply = await self.stub.FirstToken(
            kv_pb2.FirstTokenRequest(
                key=key_to_wire(self.key),
                transfer_id=self.target.transfer_id,
                sender_incarnation=self.incarnation,
                receiver_incarnation=self.target.incarnation,
                token_id=self.first_token if token_id is None else token_id,
            ),
            timeout=ANSWER_S,
        )
        return reject_from_wire(reply.rejected)

    def message(self, number: int, frame: FrameRange, *, flip: bool = False) -> kv_pb2.PushUp:
        """One frame, with a bit of its payload turned if told so."""
        payload = self._memory.read(
            [BlockId(block) for block in range(frame.token_start // 16, -(-frame.token_end // 16))],
            layer_start=frame.layer_start,
            layer_end=frame.layer_end,
            num_tokens=frame.token_end - frame.token_start,
        )
        header = FrameHeader(
            number=number,
            key=self.key,
            transfer_id=TransferId(self.target.transfer_id),
            sender_incarnation=self.incarnation,
            range=replace(frame),
            crc32=zlib.crc32(payload),
        )
        if flip:
            payload = bytes((payload[0] ^ 1,)) + payload[1:]
        if self.segment is None:
            return kv_pb2.PushUp(frame=frame_to_wire(header, payload))
        self.segment.acknowledged(number - 1)
        staged = (self.segment.take_slot(number), len(payload))
        self.segment.part(*staged)[:] = payload
        return kv_pb2.PushUp(frame=frame_to_wire(header, b"", staged=staged))


class RawPush:
    """One stream."""

    def __init__(self, sender: RawSender) -> None:
        self._sender = sender
        self.call = sender.stub.Push()

    async def down(self) -> kv_pb2.PushDown:
        """The next message from decode."""
        message = await self.call.read()
        assert isinstance(message, kv_pb2.PushDown)
        return message

    async def held(self) -> tuple[FrameRange, ...]:
        """The first message: what decode has."""
        return held_from_wire((await self.down()).held)

    async def rejected(self) -> RejectCode | None:
        """The next message must be a rejection."""
        message = await self.down()
        assert message.WhichOneof("message") == "reject", message
        return reject_from_wire(message.reject.code)

    async def send(self, frames: Sequence[FrameRange], *, first_number: int = 1) -> None:
        """Each frame, waiting for its acknowledgement."""
        for number, frame in enumerate(frames, start=first_number):
            await self.call.write(self._sender.message(number, frame))
            assert number == (await self.down()).ack.upto

    async def close(self) -> None:
        """No more frames; waits until decode has closed as well."""
        await self.call.done_writing()
        assert not isinstance(await self.call.read(), kv_pb2.PushDown)
