"""Frames that come shuffled, doubled, late, damaged or from elsewhere: the pool ends equal to the source, or untouched."""

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.ids import Attempt, BlockId, Incarnation, RequestId, RequestKey, TransferId
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import FramePlan, LayersDone, plan_frames
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
from shared.kv.memory import KvMemory

KEY = RequestKey(RequestId("r"), Attempt(2))
TRANSFER, SENDER, RECEIVER = TransferId(5), Incarnation(6), Incarnation(7)
NUM_BLOCKS = 24


@dataclass(frozen=True)
class _Transfer:
    layout: KvLayout
    num_tokens: int
    max_payload_bytes: int
    source: KvMemory
    source_table: BlockTable
    target_table: BlockTable

    def frames(self) -> list[tuple[FrameHeader, bytes]]:
        """All frames in order, numbered from 1."""
        planned = plan_frames(self.layout, 0, self.num_tokens, max_payload_bytes=self.max_payload_bytes)
        made: list[tuple[FrameHeader, bytes]] = []
        for number, frame in enumerate(planned, start=1):
            payload = self.source.read(
                self.source_table.blocks_of(frame.token_start, frame.token_end),
                layer_start=frame.layer_start,
                layer_end=frame.layer_end,
                num_tokens=frame.token_end - frame.token_start,
            )
            assert payload_bytes(self.layout, frame) == len(payload) <= self.max_payload_bytes
            header = FrameHeader(
                number=number,
                key=KEY,
                transfer_id=TRANSFER,
                sender_incarnation=SENDER,
                range=frame,
                crc32=zlib.crc32(payload),
            )
            made.append((header, payload))
        return made

    def receiver(self) -> FrameReceiver:
        receiver = FrameReceiver(
            layout=self.layout,
            key=KEY,
            transfer_id=TRANSFER,
            receiver_incarnation=RECEIVER,
            num_prompt_tokens=self.num_tokens,
            block_table=self.target_table,
        )
        self.open(receiver)
        return receiver

    def open(self, receiver: FrameReceiver) -> None:
        held = receiver.open(key=KEY, transfer_id=TRANSFER, sender_incarnation=SENDER, receiver_incarnation=RECEIVER)
        assert not isinstance(held, Reject)

    def expected(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The target after a whole transfer: the source's blocks, zeros beyond the last token, all else untouched."""
        wanted = KvMemory(self.layout, NUM_BLOCKS)
        wanted.data[:] = 0xEE
        to_blocks = list(self.target_table.blocks_of(0, self.num_tokens))
        wanted.data[to_blocks] = self.source.data[list(self.source_table.blocks_of(0, self.num_tokens))]
        in_last = self.num_tokens - (len(to_blocks) - 1) * self.layout.block_size
        wanted.keys()[to_blocks[-1], :, :, :, in_last:] = 0
        wanted.values()[to_blocks[-1], :, :, in_last:] = 0
        return wanted.data


@st.composite
def _transfers(draw: st.DrawFn) -> _Transfer:
    layout = KvLayout(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 2)),
        dtype="uint16",
        block_size=draw(st.integers(1, 5)),
        numerics=b"",
    )
    num_blocks = draw(st.integers(1, 8))
    source = KvMemory(layout, NUM_BLOCKS)
    source.data[:] = np.random.default_rng(draw(st.integers(0, 99))).integers(1, 255, source.data.shape, np.uint8)
    blocks = draw(st.permutations([BlockId(block) for block in range(NUM_BLOCKS)]))
    return _Transfer(
        layout=layout,
        num_tokens=(num_blocks - 1) * layout.block_size + draw(st.integers(1, layout.block_size)),
        max_payload_bytes=draw(st.integers(layout.layer_block_bytes, 3 * layout.block_bytes)),
        source=source,
        source_table=BlockTable(blocks[:num_blocks], layout.block_size),
        target_table=BlockTable(blocks[-num_blocks:], layout.block_size),
    )


def _target(transfer: _Transfer) -> KvMemory:
    target = KvMemory(transfer.layout, NUM_BLOCKS)
    target.data[:] = 0xEE
    return target


def _feed(
    receiver: FrameReceiver, target: KvMemory, header: FrameHeader, payload: bytes
) -> WriteBlocks | AlreadyHeld | Reject:
    verdict = receiver.accept(header, payload_crc32=zlib.crc32(payload), num_payload_bytes=len(payload))
    if isinstance(verdict, WriteBlocks):
        target.write(verdict.block_ids, layer_start=verdict.layer_start, layer_end=verdict.layer_end, payload=payload)
        receiver.copied(verdict.number)
    return verdict


@settings(max_examples=80, deadline=None)
@given(data=st.data(), transfer=_transfers())
def test_shuffled_and_doubled_frames_end_equal_to_the_source(data: st.DataObject, transfer: _Transfer) -> None:
    """Within the credit any order and any repetition is taken; each acknowledgement is true; nothing else is written."""
    receiver, target = transfer.receiver(), _target(transfer)
    waiting = transfer.frames()
    sent: list[tuple[FrameHeader, bytes]] = []
    taken: set[int] = set()
    while waiting:
        acked = next(number for number in range(len(taken) + 1, -1, -1) if set(range(1, number + 1)) <= taken)
        in_credit = [frame for frame in waiting if frame[0].number <= acked + MAX_UNACKNOWLEDGED_FRAMES]
        frame = data.draw(st.sampled_from(in_credit + sent))
        assert not receiver.is_complete
        verdict = _feed(receiver, target, *frame)
        if frame in sent:
            assert verdict == AlreadyHeld(acked_upto=acked)
            continue
        assert isinstance(verdict, WriteBlocks)
        waiting.remove(frame)
        sent.append(frame)
        taken.add(frame[0].number)

    assert receiver.is_complete
    assert np.array_equal(transfer.expected(), target.data)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), transfer=_transfers())
def test_bad_frames_change_nothing(data: st.DataObject, transfer: _Transfer) -> None:
    """Damaged, foreign or misplaced frames between the good ones: each refused with its code, and the pool is as without."""
    receiver, target = transfer.receiver(), _target(transfer)
    for header, payload in transfer.frames():
        place = data.draw(st.integers(0, len(payload) - 1))
        damaged = payload[:place] + bytes((payload[place] ^ 0x40,)) + payload[place + 1 :]
        beyond = dataclasses.replace(header.range, token_end=transfer.num_tokens + 1)
        bad: dict[RejectCode, list[tuple[FrameHeader, bytes]]] = {
            RejectCode.BAD_CHECKSUM: [(header, damaged)],
            RejectCode.BAD_RANGE: [
                (header, payload[:-1]),
                (dataclasses.replace(header, range=beyond), payload),
                (dataclasses.replace(header, number=header.number + MAX_UNACKNOWLEDGED_FRAMES), payload),
            ],
            RejectCode.STALE_INCARNATION: [(dataclasses.replace(header, sender_incarnation=Incarnation(1)), payload)],
            RejectCode.UNKNOWN_TRANSFER: [
                (dataclasses.replace(header, transfer_id=TransferId(1)), payload),
                (dataclasses.replace(header, key=RequestKey(RequestId("r"), Attempt(1))), payload),
            ],
        }
        code = data.draw(st.sampled_from(list(bad)))
        before = target.data.copy()
        for bad_header, bad_payload in bad[code]:
            verdict = _feed(receiver, target, bad_header, bad_payload)
            assert isinstance(verdict, Reject)
            assert code is verdict.code
        assert np.array_equal(before, target.data)
        assert isinstance(_feed(receiver, target, header, payload), WriteBlocks)

    assert np.array_equal(transfer.expected(), target.data)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), transfer=_transfers())
def test_a_broken_stream_goes_on_where_it_was(data: st.DataObject, transfer: _Transfer) -> None:
    """Opened again and again: only what is not held is sent, and at the end every byte is there."""
    receiver, target = transfer.receiver(), _target(transfer)
    planned = [header.range for header, _ in transfer.frames()]
    payloads = {header.range: (header, payload) for header, payload in transfer.frames()}
    num_written = 0
    while not receiver.is_complete:
        plan = FramePlan(
            transfer.layout,
            transfer.num_tokens,
            receiver.held_ranges(),
            max_payload_bytes=transfer.max_payload_bytes,
        )
        to_send = plan.advance(transfer.num_tokens, None)
        assert len(planned) - num_written == len(to_send)
        count = data.draw(st.integers(1, len(to_send)))
        for number, frame in enumerate(to_send[:count], start=1):
            header, payload = payloads[frame]
            assert isinstance(_feed(receiver, target, dataclasses.replace(header, number=number), payload), WriteBlocks)
            num_written += 1
        transfer.open(receiver)

    assert len(planned) == num_written
    assert np.array_equal(transfer.expected(), target.data)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), transfer=_transfers())
def test_after_the_end_the_pool_is_untouched(data: st.DataObject, transfer: _Transfer) -> None:
    """Blocks may have a new owner: every late frame is refused as GONE and no byte moves."""
    receiver, target = transfer.receiver(), _target(transfer)
    frames = transfer.frames()
    for header, payload in frames[: data.draw(st.integers(0, len(frames)))]:
        _feed(receiver, target, header, payload)
    receiver.end()
    target.data[:] = 0x11

    codes = {
        verdict.code
        for header, payload in frames
        if isinstance(verdict := _feed(receiver, target, header, payload), Reject)
    }

    assert {RejectCode.GONE} == codes
    assert (target.data == 0x11).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), transfer=_transfers(), chunk_tokens=st.integers(1, 12), num_held_blocks=st.integers(0, 3))
def test_chunks_planned_by_layers_cover_the_prompt_once(
    data: st.DataObject, transfer: _Transfer, chunk_tokens: int, num_held_blocks: int
) -> None:
    """Whatever layers are told of whatever chunks: each layer of each block once and not before it is computed."""
    layout, num_tokens = transfer.layout, transfer.num_tokens
    num_held = min(num_held_blocks * layout.block_size, num_tokens)
    held = FrameRange(layer_start=0, layer_end=layout.num_layers, token_start=0, token_end=num_held)
    plan = FramePlan(layout, num_tokens, [held] if num_held else [], max_payload_bytes=transfer.max_payload_bytes)
    seen: set[tuple[int, int]] = set()

    def take(computed_upto: int, running: LayersDone | None) -> None:
        for frame in plan.advance(computed_upto, running):
            assert payload_bytes(layout, frame) <= transfer.max_payload_bytes
            for block in range(frame.token_start // layout.block_size, layout.num_blocks_for(frame.token_end)):
                last_token = min((block + 1) * layout.block_size, num_tokens) - 1
                for layer in range(frame.layer_start, frame.layer_end):
                    is_computed = last_token < computed_upto
                    is_told = running is not None and last_token < running.token_end and layer < running.num_layers
                    assert is_computed or is_told
                    assert (block, layer) not in seen
                    seen.add((block, layer))

    for start in range(0, num_tokens, chunk_tokens):
        end = min(start + chunk_tokens, num_tokens)
        running = None
        for num_layers in sorted(data.draw(st.sets(st.integers(1, layout.num_layers), max_size=3))):
            running = LayersDone(token_end=end, num_layers=num_layers, is_last=data.draw(st.booleans()))
            take(start, running)
        if data.draw(st.booleans()) or end == num_tokens:  # reports may be taken late, several at once
            take(end, running)

    missing = range(num_held // layout.block_size, layout.num_blocks_for(num_tokens)) if num_held < num_tokens else ()
    assert {(block, layer) for block in missing for layer in range(layout.num_layers)} == seen
