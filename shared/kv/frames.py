"""The hand-over of KV as values: what a frame covers, and what a receiver may do with one.

Pure: bytes are read, copied and acknowledged by `shared.transfer`. A frame covers layers [layer_start, layer_end) of
the blocks of tokens [token_start, token_end); a partly filled last block is sent whole, slots beyond `token_end` as
zeros.

The receiving machine (see `FrameReceiver`):

    RESERVED --open--> RECEIVING --all copied--> complete (the worker commits when token 1 is there too)
        any --end--> ENDED: whatever comes later is refused as GONE
"""

import itertools
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId, Incarnation, RequestKey, TransferId
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout

MAX_UNACKNOWLEDGED_FRAMES = 8  # 8 MiB on the way fill a fast link; what a stopped receiver can be made to hold


class RejectCode(StrEnum):
    """Why a receiver takes no (more) frames of a stream; the names are those of the wire."""

    GONE = "GONE"
    STALE_INCARNATION = "STALE_INCARNATION"
    UNKNOWN_TRANSFER = "UNKNOWN_TRANSFER"
    BAD_CHECKSUM = "BAD_CHECKSUM"
    BAD_RANGE = "BAD_RANGE"
    NO_HANDSHAKE = "NO_HANDSHAKE"
    FAULT = "FAULT"
    NO_TRANSPORT = "NO_TRANSPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRange:
    """Layers × tokens of one sequence; ends are exclusive."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """All of a frame but its payload. `number` counts from 1 in each stream."""

    number: int
    key: RequestKey
    transfer_id: TransferId
    sender_incarnation: Incarnation
    range: FrameRange
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBlocks:
    """Copy the payload, whose sum is to be `crc32`, into these blocks; then call `FrameReceiver.copied(number)`."""

    number: int
    block_ids: tuple[BlockId, ...]
    layer_start: int
    layer_end: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyHeld:
    """Everything in the frame is in the pool: write nothing, acknowledge up to `acked_upto`."""

    acked_upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Refuse the frame or the stream; `message` is for logs and holds no content."""

    code: RejectCode
    message: str


class Coverage:
    """Which layers of which blocks are there. A bit a pair, so a million tokens in 4 layers take 250 kB."""

    def __init__(self, layout: KvLayout, num_tokens: int) -> None:
        self._block_size = layout.block_size
        self._num_tokens = num_tokens
        self._held: npt.NDArray[np.bool_] = np.zeros((layout.num_layers, layout.num_blocks_for(num_tokens)), np.bool_)
        self._num_missing = self._held.size

    @property
    def is_full(self) -> bool:
        return self._num_missing == 0

    def problem_with(self, frame: FrameRange) -> str | None:
        """What is wrong with a range, or None. Only whole blocks are right, the last one to the sequence's end."""
        num_layers = self._held.shape[0]
        if not 0 <= frame.layer_start < frame.layer_end <= num_layers:
            return f"layers [{frame.layer_start}, {frame.layer_end}) of {num_layers}"
        if not 0 <= frame.token_start < frame.token_end <= self._num_tokens:
            return f"tokens [{frame.token_start}, {frame.token_end}) of {self._num_tokens}"
        if frame.token_start % self._block_size:
            return f"token {frame.token_start} starts no block"
        if frame.token_end % self._block_size and frame.token_end != self._num_tokens:
            return f"token {frame.token_end} ends no block"
        return None

    def add(self, frame: FrameRange) -> None:
        region = self._region(frame)
        self._num_missing -= region.size - int(np.count_nonzero(region))
        region[:] = True

    def holds(self, frame: FrameRange) -> bool:
        return bool(self._region(frame).all())

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens from the start on that are held in all layers without a gap."""
        gaps = np.flatnonzero(~self._held.all(axis=0))
        num_blocks = int(gaps[0]) if gaps.size else self._held.shape[1]
        return min(num_blocks * self._block_size, self._num_tokens)

    def ranges(self) -> tuple[FrameRange, ...]:
        """The held part as few rectangles: runs of blocks that the same layers are held of, split into layer runs."""
        found: list[FrameRange] = []
        num_blocks = self._held.shape[1]
        changes = np.flatnonzero((self._held[:, 1:] != self._held[:, :-1]).any(axis=0)) + 1
        borders = [0, *(int(change) for change in changes), num_blocks]
        for start, end in itertools.pairwise(borders):
            for layer_start, layer_end in _runs(self._held[:, start]):
                found.append(
                    FrameRange(
                        layer_start=layer_start,
                        layer_end=layer_end,
                        token_start=start * self._block_size,
                        token_end=min(end * self._block_size, self._num_tokens),
                    )
                )
        return tuple(found)

    def _region(self, frame: FrameRange) -> npt.NDArray[np.bool_]:
        return self._held[
            frame.layer_start : frame.layer_end,
            frame.token_start // self._block_size : -(-frame.token_end // self._block_size),
        ]


def payload_bytes(layout: KvLayout, frame: FrameRange) -> int:
    """Length of a frame's payload."""
    num_blocks = layout.num_blocks_for(frame.token_end) - frame.token_start // layout.block_size
    return num_blocks * (frame.layer_end - frame.layer_start) * layout.layer_block_bytes


class FrameReceiver:
    """One transfer's receiving end: decides about every frame, touches no byte. One owner thread.

    Nothing is ever written to a range that is held: after the commit decode writes into the last block itself, and a
    late copy of a frame would wipe that out. For the same reason `is_complete` waits for every copy that has begun.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        key: RequestKey,
        transfer_id: TransferId,
        receiver_incarnation: Incarnation,
        num_prompt_tokens: int,
        block_table: BlockTable,
        num_tokens_held: int = 0,
    ) -> None:
        """`num_tokens_held`: whole blocks that were in the pool before; others may share them, no frame is for them."""
        if num_tokens_held % layout.block_size and num_tokens_held != num_prompt_tokens:
            raise ValueError(f"{num_tokens_held} tokens held are not whole blocks")
        self._layout = layout
        self._key = key
        self._transfer_id = transfer_id
        self._receiver_incarnation = receiver_incarnation
        self._block_table = block_table
        self._coverage = Coverage(layout, num_prompt_tokens)
        self._num_tokens_held = num_tokens_held
        if num_tokens_held:
            self._coverage.add(
                FrameRange(layer_start=0, layer_end=layout.num_layers, token_start=0, token_end=num_tokens_held)
            )
        self._sender_incarnation: Incarnation | None = None
        self._stream = 0
        self._acked_upto = 0
        self._copied_ahead: set[int] = set()
        self._copying: dict[tuple[int, int], FrameRange] = {}
        self._is_ended = False

    @property
    def stream(self) -> int:
        """Number of the stream that is open now (0 before the first): frames and copies of an older one are late."""
        return self._stream

    @property
    def is_complete(self) -> bool:
        """Every layer of every prompt block is in the pool, and no copy is on its way."""
        return self._coverage.is_full and not self._copying

    @property
    def is_copying(self) -> bool:
        """A copy into the blocks has begun and not returned: the blocks must not be freed."""
        return bool(self._copying)

    def held_ranges(self) -> tuple[FrameRange, ...]:
        return self._coverage.ranges()

    def open(
        self,
        *,
        key: RequestKey,
        transfer_id: TransferId,
        sender_incarnation: Incarnation,
        receiver_incarnation: Incarnation,
    ) -> tuple[FrameRange, ...] | Reject:
        """A Push stream begins (again): the ranges already held, or why not. The first one fixes the sender.

        A new stream replaces the one before it, whose frames are refused from now on.
        """
        if receiver_incarnation != self._receiver_incarnation:
            return Reject(code=RejectCode.STALE_INCARNATION, message="the receiver has been started anew")
        refused = self._refuse_stranger(key, transfer_id, sender_incarnation)
        if refused is not None:
            return refused
        self._sender_incarnation = sender_incarnation
        self._stream += 1
        self._acked_upto = 0
        self._copied_ahead.clear()
        return self._coverage.ranges()

    def accept(
        self,
        header: FrameHeader,
        *,
        num_payload_bytes: int,
        payload_crc32: int | None = None,
        stream: int | None = None,
    ) -> WriteBlocks | AlreadyHeld | Reject:
        """Judge one frame. `stream` is the value of `stream` after the open that it came by (None: the present one).

        Without `payload_crc32` the copy is to sum the payload first, and to be reported as failed where it differs.
        """
        if self._stream == 0:
            return Reject(code=RejectCode.NO_HANDSHAKE, message="a frame before the stream was opened")
        if stream is not None and stream != self._stream:
            return Reject(code=RejectCode.UNKNOWN_TRANSFER, message="the transfer goes on in a newer stream")
        refused = self._refuse_stranger(header.key, header.transfer_id, header.sender_incarnation)
        if refused is not None:
            return refused
        frame = header.range
        problem = self._coverage.problem_with(frame)
        if problem is not None:
            return Reject(code=RejectCode.BAD_RANGE, message=problem)
        if not 1 <= header.number <= self._acked_upto + MAX_UNACKNOWLEDGED_FRAMES:
            return Reject(code=RejectCode.BAD_RANGE, message=f"frame {header.number} is beyond the credit")
        if num_payload_bytes != payload_bytes(self._layout, frame):
            return Reject(code=RejectCode.BAD_RANGE, message=f"{num_payload_bytes} payload bytes")
        if payload_crc32 not in (None, header.crc32):
            return Reject(code=RejectCode.BAD_CHECKSUM, message=f"frame {header.number}")
        if self._coverage.holds(frame):
            return AlreadyHeld(acked_upto=self._acknowledge(header.number))
        if frame.token_start < self._num_tokens_held:
            return Reject(code=RejectCode.BAD_RANGE, message=f"token {frame.token_start} lies in a block held before")
        place = (self._stream, header.number)
        if place in self._copying:
            return AlreadyHeld(
                acked_upto=self._acked_upto
            )  # doubled while its copy runs: that copy will acknowledge it
        self._copying[place] = frame
        return WriteBlocks(
            number=header.number,
            block_ids=self._block_table.blocks_of(frame.token_start, frame.token_end),
            layer_start=frame.layer_start,
            layer_end=frame.layer_end,
            crc32=header.crc32,
        )

    def copied(self, number: int, *, stream: int | None = None) -> int:
        """The copy of a frame is in the pool; returns the number up to which all frames of the present stream are.

        Raises KeyError when no such copy was begun.
        """
        of_stream = self._stream if stream is None else stream
        self._coverage.add(self._copying.pop((of_stream, number)))
        return self._acknowledge(number) if of_stream == self._stream else self._acked_upto

    def copy_failed(self, number: int, *, stream: int | None = None) -> None:
        """The copy of a frame was given up: its range is not held. Raises KeyError when no such copy was begun."""
        del self._copying[(self._stream if stream is None else stream, number)]

    def end(self) -> None:
        """The attempt has ended here. Copies on their way are still to be reported by `copied` or `copy_failed`."""
        self._is_ended = True

    def _refuse_stranger(self, key: RequestKey, transfer_id: TransferId, sender: Incarnation) -> Reject | None:
        if self._is_ended:
            return Reject(code=RejectCode.GONE, message="the attempt has ended here")
        if transfer_id != self._transfer_id or key != self._key:
            return Reject(code=RejectCode.UNKNOWN_TRANSFER, message="another transfer or attempt")
        if self._sender_incarnation not in (None, sender):
            return Reject(code=RejectCode.STALE_INCARNATION, message="another start of the sender opened the transfer")
        return None

    def _acknowledge(self, number: int) -> int:
        if number > self._acked_upto:
            self._copied_ahead.add(number)
        while self._acked_upto + 1 in self._copied_ahead:
            self._acked_upto += 1
            self._copied_ahead.remove(self._acked_upto)
        return self._acked_upto


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
