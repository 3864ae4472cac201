"""Tests of `shared.kv.frames`."""

import dataclasses

import pytest

from shared.domain.ids import Attempt, BlockId, Incarnation, RequestId, RequestKey, TransferId
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import plan_frames
from shared.kv.frames import (
    MAX_UNACKNOWLEDGED_FRAMES,
    AlreadyHeld,
    FrameHeader,
    FrameRange,
    FrameReceiver,
    Reject,
    RejectCode,
    WriteBlocks,
    payload_bytes,
)
from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=1, dtype="uint64", block_size=4, numerics=b"")
KEY = RequestKey(RequestId("r"), Attempt(2))
TRANSFER = TransferId(77)
SENDER = Incarnation(1)
RECEIVER = Incarnation(2)
NUM_TOKENS = 10  # two whole blocks and one of two tokens


def _range(layer_start: int, layer_end: int, token_start: int, token_end: int) -> FrameRange:
    return FrameRange(layer_start=layer_start, layer_end=layer_end, token_start=token_start, token_end=token_end)


def _receiver() -> FrameReceiver:
    return FrameReceiver(
        layout=LAYOUT,
        key=KEY,
        transfer_id=TRANSFER,
        receiver_incarnation=RECEIVER,
        num_prompt_tokens=NUM_TOKENS,
        block_table=BlockTable(tuple(BlockId(block) for block in (9, 3, 5, 6)), 4),
    )


def _open(
    receiver: FrameReceiver,
    *,
    key: RequestKey = KEY,
    transfer_id: TransferId = TRANSFER,
    sender: Incarnation = SENDER,
    target: Incarnation = RECEIVER,
) -> tuple[FrameRange, ...] | Reject:
    return receiver.open(key=key, transfer_id=transfer_id, sender_incarnation=sender, receiver_incarnation=target)


def _opened() -> FrameReceiver:
    receiver = _receiver()
    assert () == _open(receiver)
    return receiver


def _header(number: int, frame: FrameRange) -> FrameHeader:
    return FrameHeader(number=number, key=KEY, transfer_id=TRANSFER, sender_incarnation=SENDER, range=frame, crc32=11)


def _accept(receiver: FrameReceiver, header: FrameHeader) -> WriteBlocks | AlreadyHeld | Reject:
    return receiver.accept(header, payload_crc32=11, num_payload_bytes=payload_bytes(LAYOUT, header.range))


def _code(verdict: WriteBlocks | AlreadyHeld | Reject | tuple[FrameRange, ...]) -> RejectCode | None:
    return verdict.code if isinstance(verdict, Reject) else None


WHOLE = _range(0, 4, 0, NUM_TOKENS)


def test_payload_bytes_counts_the_last_block_whole() -> None:
    """Two tokens in a block of four take the block's bytes, in the layers sent."""
    assert 64 * 2 == payload_bytes(LAYOUT, _range(1, 3, 8, 10))


def test_the_happy_way_ends_complete() -> None:
    """Every frame becomes a write into the sequence's blocks; complete when the last copy is reported."""
    receiver = _opened()
    frames = plan_frames(LAYOUT, 0, NUM_TOKENS, max_payload_bytes=512)

    verdicts = [_accept(receiver, _header(number, frame)) for number, frame in enumerate(frames, start=1)]

    assert [
        WriteBlocks(number=1, block_ids=(BlockId(9), BlockId(3)), layer_start=0, layer_end=4, crc32=11),
        WriteBlocks(number=2, block_ids=(BlockId(5),), layer_start=0, layer_end=4, crc32=11),
    ] == verdicts
    assert (1, False, True) == (receiver.copied(1), receiver.is_complete, receiver.is_copying)
    assert (2, True, False) == (receiver.copied(2), receiver.is_complete, receiver.is_copying)


def test_blocks_held_before_are_not_written() -> None:
    """They are told at the opening and complete the sequence; a frame for them is acknowledged, one that overlaps refused."""
    receiver = FrameReceiver(
        layout=LAYOUT,
        key=KEY,
        transfer_id=TRANSFER,
        receiver_incarnation=RECEIVER,
        num_prompt_tokens=NUM_TOKENS,
        block_table=BlockTable(tuple(BlockId(block) for block in (9, 3, 5, 6)), 4),
        num_tokens_held=8,
    )

    assert (_range(0, 4, 0, 8),) == _open(receiver)
    assert AlreadyHeld(acked_upto=1) == _accept(receiver, _header(1, _range(0, 4, 4, 8)))
    assert RejectCode.BAD_RANGE is _code(_accept(receiver, _header(2, _range(0, 4, 4, 10))))
    assert isinstance(_accept(receiver, _header(2, _range(0, 4, 8, 10))), WriteBlocks)
    assert (2, True) == (receiver.copied(2), receiver.is_complete)


def test_what_is_held_before_must_be_whole_blocks() -> None:
    """A block that ends inside cannot be shared."""
    with pytest.raises(ValueError, match="whole blocks"):
        FrameReceiver(
            layout=LAYOUT,
            key=KEY,
            transfer_id=TRANSFER,
            receiver_incarnation=RECEIVER,
            num_prompt_tokens=NUM_TOKENS,
            block_table=BlockTable((BlockId(1), BlockId(2), BlockId(3)), 4),
            num_tokens_held=6,
        )


def test_the_copy_may_sum_the_payload() -> None:
    """Without a sum the frame is judged by the rest, and its number comes with the order to copy; damage is no copy."""
    receiver = _opened()
    header = _header(1, WHOLE)
    verdict = receiver.accept(header, num_payload_bytes=payload_bytes(LAYOUT, WHOLE))
    receiver.copy_failed(1)

    assert isinstance(verdict, WriteBlocks)
    assert 11 == verdict.crc32
    assert (False, False) == (receiver.is_complete, receiver.is_copying)
    assert RejectCode.BAD_CHECKSUM is _code(
        receiver.accept(header, payload_crc32=12, num_payload_bytes=payload_bytes(LAYOUT, WHOLE))
    )


def test_acknowledgement_waits_for_the_earlier_frames() -> None:
    """Copies may end in any order; `upto` never names a frame whose predecessor is missing."""
    receiver = _opened()
    for number, start in ((1, 0), (2, 4), (3, 8)):
        _accept(receiver, _header(number, _range(0, 4, start, min(start + 4, NUM_TOKENS))))

    assert [0, 0, 3] == [receiver.copied(3), receiver.copied(2), receiver.copied(1)]


def test_a_doubled_frame_is_acknowledged_and_never_written_again() -> None:
    """While its copy runs, after it, and after everything is there: decode's own tokens would be wiped out."""
    receiver = _opened()
    header = _header(1, WHOLE)

    first = _accept(receiver, header)
    during = _accept(receiver, header)
    receiver.copied(1)
    after = _accept(receiver, header)
    under_another_number = _accept(receiver, _header(2, _range(1, 2, 4, 8)))

    assert isinstance(first, WriteBlocks)
    assert [AlreadyHeld(acked_upto=0), AlreadyHeld(acked_upto=1), AlreadyHeld(acked_upto=2)] == [
        during,
        after,
        under_another_number,
    ]
    assert receiver.is_complete


def test_complete_waits_for_every_copy_that_began() -> None:
    """The same range on its way twice: the first copy covers it, the second could still write after a commit."""
    receiver = _opened()
    _accept(receiver, _header(1, WHOLE))
    _accept(receiver, _header(2, WHOLE))

    receiver.copied(1)
    is_complete_early = receiver.is_complete
    receiver.copied(2)

    assert (False, True) == (is_complete_early, receiver.is_complete)


def test_a_frame_without_open_is_refused() -> None:
    """Nothing is known of the sender yet."""
    assert RejectCode.NO_HANDSHAKE is _code(_accept(_receiver(), _header(1, WHOLE)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"key": RequestKey(RequestId("r"), Attempt(1))}, RejectCode.UNKNOWN_TRANSFER),
        ({"key": RequestKey(RequestId("s"), Attempt(2))}, RejectCode.UNKNOWN_TRANSFER),
        ({"transfer_id": TransferId(78)}, RejectCode.UNKNOWN_TRANSFER),
        ({"sender_incarnation": Incarnation(9)}, RejectCode.STALE_INCARNATION),
        ({"crc32": 12}, RejectCode.BAD_CHECKSUM),
        ({"number": 0}, RejectCode.BAD_RANGE),
        ({"number": MAX_UNACKNOWLEDGED_FRAMES + 1}, RejectCode.BAD_RANGE),
        ({"range": _range(0, 5, 0, 4)}, RejectCode.BAD_RANGE),
        ({"range": _range(2, 2, 0, 4)}, RejectCode.BAD_RANGE),
        ({"range": _range(0, 4, 0, 12)}, RejectCode.BAD_RANGE),
        ({"range": _range(0, 4, 2, 8)}, RejectCode.BAD_RANGE),
        ({"range": _range(0, 4, 0, 6)}, RejectCode.BAD_RANGE),
        ({"range": _range(0, 4, 8, 8)}, RejectCode.BAD_RANGE),
    ],
)
def test_a_wrong_frame_is_refused_with_its_code(changed: dict[str, object], expected: RejectCode) -> None:
    """Of another attempt, transfer or start of the sender, damaged, or out of range; and nothing is held by it."""
    receiver = _opened()
    header = dataclasses.replace(_header(1, WHOLE), **changed)

    assert expected is _code(_accept(receiver, header))
    assert (False, ()) == (receiver.is_copying, receiver.held_ranges())


def test_a_payload_of_the_wrong_length_is_refused() -> None:
    """The bytes must be those of the range, to the byte."""
    receiver = _opened()
    verdict = receiver.accept(_header(1, WHOLE), payload_crc32=11, num_payload_bytes=payload_bytes(LAYOUT, WHOLE) - 1)

    assert RejectCode.BAD_RANGE is _code(verdict)


def test_open_refuses_strangers() -> None:
    """Another start of either end, another transfer, another attempt."""
    receiver = _opened()

    assert [
        RejectCode.STALE_INCARNATION,
        RejectCode.STALE_INCARNATION,
        RejectCode.UNKNOWN_TRANSFER,
        RejectCode.UNKNOWN_TRANSFER,
    ] == [
        _code(_open(receiver, target=Incarnation(3))),
        _code(_open(receiver, sender=Incarnation(3))),
        _code(_open(receiver, transfer_id=TransferId(1))),
        _code(_open(receiver, key=RequestKey(RequestId("r"), Attempt(3)))),
    ]


def test_opened_again_it_names_what_it_holds() -> None:
    """A broken stream goes on: numbers start at 1, late frames of the old stream are refused, late copies still count."""
    receiver = _opened()
    old = receiver.stream
    _accept(receiver, _header(1, _range(0, 4, 0, 4)))
    receiver.copied(1)
    _accept(receiver, _header(2, _range(0, 2, 4, 8)))

    held = _open(receiver)
    late = receiver.accept(
        _header(3, _range(2, 4, 4, 8)),
        payload_crc32=11,
        num_payload_bytes=payload_bytes(LAYOUT, _range(2, 4, 4, 8)),
        stream=old,
    )
    acked = receiver.copied(2, stream=old)
    fresh = _accept(receiver, _header(1, _range(2, 4, 4, 8)))

    assert (_range(0, 4, 0, 4),) == held
    assert (RejectCode.UNKNOWN_TRANSFER, 0) == (_code(late), acked)
    assert isinstance(fresh, WriteBlocks)
    assert (_range(0, 4, 0, 4), _range(0, 2, 4, 8)) == receiver.held_ranges()


def test_after_the_end_everything_is_gone() -> None:
    """Opens and frames are refused; a copy on its way is still reported, so that the blocks can be freed after it."""
    receiver = _opened()
    _accept(receiver, _header(1, WHOLE))
    receiver.end()

    assert (RejectCode.GONE, RejectCode.GONE) == (_code(_open(receiver)), _code(_accept(receiver, _header(2, WHOLE))))
    assert receiver.is_copying
    receiver.copy_failed(1)
    assert (False, ()) == (receiver.is_copying, receiver.held_ranges())


def test_a_copy_that_nobody_began_raises() -> None:
    """A report without a frame is a bug of the caller."""
    with pytest.raises(KeyError):
        _opened().copied(1)
