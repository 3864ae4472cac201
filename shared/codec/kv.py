"""KV layouts, targets and frames, domain <-> wire. Payload bytes pass through untouched.

What the wire cannot mean raises INVALID_REQUEST, but for frames: a frame's numbers are judged by `shared.kv.frames`.
"""

from collections.abc import Iterable

from shared.codec.request import key_from_wire, key_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, TransferId, WorkerId
from shared.domain.worker import KvTarget
from shared.kv.frames import FrameHeader, FrameRange, RejectCode
from shared.kv.layout import KvLayout
from shared.wire import common_pb2, kv_pb2, scheduler_pb2

_REJECT_TO_WIRE = {
    RejectCode.GONE: kv_pb2.REJECT_CODE_GONE,
    RejectCode.STALE_INCARNATION: kv_pb2.REJECT_CODE_STALE_INCARNATION,
    RejectCode.UNKNOWN_TRANSFER: kv_pb2.REJECT_CODE_UNKNOWN_TRANSFER,
    RejectCode.BAD_CHECKSUM: kv_pb2.REJECT_CODE_BAD_CHECKSUM,
    RejectCode.BAD_RANGE: kv_pb2.REJECT_CODE_BAD_RANGE,
    RejectCode.NO_HANDSHAKE: kv_pb2.REJECT_CODE_NO_HANDSHAKE,
    RejectCode.FAULT: kv_pb2.REJECT_CODE_FAULT,
    RejectCode.NO_TRANSPORT: kv_pb2.REJECT_CODE_NO_TRANSPORT,
}
_REJECT_FROM_WIRE = {wire: code for code, wire in _REJECT_TO_WIRE.items()}


def layout_to_wire(layout: KvLayout) -> common_pb2.KvLayout:
    """For the hello of a worker and for the handshake of a pair."""
    return common_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
        numerics=layout.numerics,
    )


def layout_from_wire(layout: common_pb2.KvLayout) -> KvLayout:
    """Raises INVALID_REQUEST for a layout that cannot be."""
    try:
        return KvLayout(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            block_size=layout.block_size,
            numerics=layout.numerics,
        )
    except ValueError as error:
        raise ServingError(ErrorCode.INVALID_REQUEST, f"KV layout: {error}") from error


def target_to_wire(target: KvTarget) -> scheduler_pb2.KvTarget:
    """What decode answers to Reserve."""
    return scheduler_pb2.KvTarget(
        worker_id=target.worker_id,
        address=target.address,
        incarnation=target.incarnation,
        transfer_id=target.transfer_id,
        transports=target.transports,
        tokens_held=target.tokens_held,
    )


def target_from_wire(target: scheduler_pb2.KvTarget) -> KvTarget:
    """What Prefill is given."""
    return KvTarget(
        worker_id=WorkerId(target.worker_id),
        address=target.address,
        incarnation=Incarnation(target.incarnation),
        transfer_id=TransferId(target.transfer_id),
        transports=tuple(target.transports),
        tokens_held=target.tokens_held,
    )


def frame_to_wire(header: FrameHeader, payload: bytes, *, staged: tuple[int, int] = (0, 0)) -> kv_pb2.KvFrame:
    """Header and payload in one message; `staged` is the payload's offset and length in a segment, if it lies there."""
    staging_offset, staging_length = staged
    return kv_pb2.KvFrame(
        number=header.number,
        key=key_to_wire(header.key),
        transfer_id=header.transfer_id,
        sender_incarnation=header.sender_incarnation,
        layer_start=header.range.layer_start,
        layer_end=header.range.layer_end,
        token_start=header.range.token_start,
        token_end=header.range.token_end,
        crc32=header.crc32,
        payload=payload,
        staging_offset=staging_offset,
        staging_length=staging_length,
    )


def frame_header_from_wire(frame: kv_pb2.KvFrame) -> FrameHeader:
    """All but the payload; judges nothing."""
    return FrameHeader(
        number=frame.number,
        key=key_from_wire(frame.key),
        transfer_id=TransferId(frame.transfer_id),
        sender_incarnation=Incarnation(frame.sender_incarnation),
        range=FrameRange(
            layer_start=frame.layer_start,
            layer_end=frame.layer_end,
            token_start=frame.token_start,
            token_end=frame.token_end,
        ),
        crc32=frame.crc32,
    )


def held_to_wire(ranges: Iterable[FrameRange]) -> kv_pb2.Held:
    """The first message down a Push."""
    return kv_pb2.Held(
        ranges=[
            kv_pb2.HeldRange(
                layer_start=held.layer_start,
                layer_end=held.layer_end,
                token_start=held.token_start,
                token_end=held.token_end,
            )
            for held in ranges
        ]
    )


def held_from_wire(held: kv_pb2.Held) -> tuple[FrameRange, ...]:
    """Judges nothing: `FramePlan` leaves out what makes no sense."""
    return tuple(
        FrameRange(
            layer_start=there.layer_start,
            layer_end=there.layer_end,
            token_start=there.token_start,
            token_end=there.token_end,
        )
        for there in held.ranges
    )


def reject_to_wire(code: RejectCode | None) -> "kv_pb2.RejectCode.ValueType":
    """None = not rejected."""
    return kv_pb2.REJECT_CODE_UNSPECIFIED if code is None else _REJECT_TO_WIRE[code]


def reject_from_wire(code: "kv_pb2.RejectCode.ValueType") -> RejectCode | None:
    """None = not rejected; a code of a newer peer reads as FAULT."""
    return None if code == kv_pb2.REJECT_CODE_UNSPECIFIED else _REJECT_FROM_WIRE.get(code, RejectCode.FAULT)
