"""KV layouts, targets and frames survive the wire."""

import pytest

from shared.codec import kv
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, RequestId, RequestKey, TransferId, WorkerId
from shared.domain.worker import KvTarget
from shared.kv.frames import FrameHeader, FrameRange, RejectCode
from shared.kv.layout import KvLayout
from shared.wire import common_pb2, kv_pb2

MAX_64 = 2**64 - 1


def test_a_layout_survives() -> None:
    """Every field counts in the handshake, so every field comes back, the fingerprint with them."""
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_size=16, numerics=b"\x00\xff")

    assert layout == kv.layout_from_wire(kv.layout_to_wire(layout))
    assert layout.fingerprint == kv.layout_from_wire(kv.layout_to_wire(layout)).fingerprint


def test_an_impossible_layout_is_refused() -> None:
    """An empty message is no layout."""
    with pytest.raises(ServingError) as caught:
        kv.layout_from_wire(common_pb2.KvLayout())

    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_target_survives() -> None:
    """With the largest ids that the wire can carry."""
    target = KvTarget(
        worker_id=WorkerId("decode-0"),
        address="127.0.0.1:1",
        incarnation=Incarnation(MAX_64),
        transfer_id=TransferId(MAX_64),
        transports=("grpc",),
        tokens_held=3,
    )

    assert target == kv.target_from_wire(kv.target_to_wire(target))


def test_a_frame_survives_with_its_payload() -> None:
    """Header and payload are apart: the header comes back equal, the payload is the same bytes."""
    header = FrameHeader(
        number=7,
        key=RequestKey(RequestId("r"), Attempt(2)),
        transfer_id=TransferId(MAX_64),
        sender_incarnation=Incarnation(MAX_64),
        range=FrameRange(layer_start=1, layer_end=2, token_start=16, token_end=20),
        crc32=2**32 - 1,
    )
    frame = kv_pb2.KvFrame.FromString(kv.frame_to_wire(header, b"\x00\x01").SerializeToString())

    assert header == kv.frame_header_from_wire(frame)
    assert frame.payload == b"\x00\x01"
    staged = kv_pb2.KvFrame.FromString(kv.frame_to_wire(header, b"", staged=(4096, 2)).SerializeToString())
    assert (staged.payload, staged.staging_offset, staged.staging_length) == (b"", 4096, 2)


def test_held_ranges_survive_in_order() -> None:
    """None and several."""
    ranges = tuple(FrameRange(layer_start=0, layer_end=1, token_start=start, token_end=start + 16) for start in (0, 64))

    assert ranges == kv.held_from_wire(kv.held_to_wire(ranges))
    assert kv.held_from_wire(kv.held_to_wire(())) == ()


@pytest.mark.parametrize("code", [None, *RejectCode])
def test_every_reject_code_survives(code: RejectCode | None) -> None:
    """None stands for accepted."""
    assert code == kv.reject_from_wire(kv.reject_to_wire(code))
