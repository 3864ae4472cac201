"""Shared memory for frames between two processes of one host: the sender's segments, the receiver's view of one.

A segment is an anonymous file. It has no name anywhere, so nothing is left of it when both ends are gone, however they
went; it is sealed at its size, so that no access to a mapping of it can fault (a file cut short kills its reader with
SIGBUS). The receiver opens it by the sender's process and file number, which fails on another host.

    segment = [header][slot 0][slot 1] ... [slot 7]    one page, then as many slots as frames may be unacknowledged
    header  = [magic][transfer id][sender incarnation][zeros ...]    three words; zeros while no transfer has it
    slot    = one frame's payload, from the copy into it until its acknowledgement

A slot is written again only after its frame's acknowledgement, so one segment is enough for a transfer of any length;
the lowest free one is taken, so that a fast receiver keeps a transfer in one or two of them, and in the caches.
"""

import contextlib
import fcntl
import heapq
import mmap
import os
import re
import stat
import struct

from shared.domain.ids import Incarnation, TransferId
from shared.kv.frame_plan import MAX_FRAME_BYTES
from shared.kv.frames import MAX_UNACKNOWLEDGED_FRAMES

SEGMENT_NAME = "firsttoken-kv"  # what /proc/<pid>/maps shows, for people and tests
HEADER_BYTES = mmap.PAGESIZE
SEGMENT_BYTES = HEADER_BYTES + MAX_UNACKNOWLEDGED_FRAMES * MAX_FRAME_BYTES
# Pages come into being when they are written: a segment that waits for its prompt takes none. 32 that are all stuck
# behind a receiver that does not acknowledge take 256 MiB; a further transfer goes by grpc.
MAX_SEGMENTS = 32
MAX_IDLE_SEGMENTS = 4  # kept for the next transfers with the pages that they have: 32 MiB at most

_MAGIC = 0x6674_6B76_7365_6731
_HEADER = struct.Struct("<QQQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PEER_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class StagingError(Exception):
    """A peer's file cannot be used; the message holds no path of ours."""


class StagingGoneError(StagingError):
    """The sender has given the segment up: its stream is over there, and nothing in it means anything any more."""


def sealed_file(num_bytes: int) -> int:
    """A new anonymous file of this size, for good; the number of its descriptor. Raises OSError."""
    descriptor = os.memfd_create(SEGMENT_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def path_of(descriptor: int) -> str:
    """Where another process of this host finds an open file of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_peer(path: str, num_bytes: int) -> int:
    """The descriptor of a peer's sealed file of at least this size, to read. Raises StagingError for all others."""
    if _PEER_PATH.fullmatch(path) is None:
        raise StagingError("not a path of a process's open file")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StagingError(f"cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise StagingError("not sealed at its size")
        if status.st_size < num_bytes:
            raise StagingError(f"{status.st_size} bytes, not {num_bytes}")
    except OSError as error:
        os.close(descriptor)
        raise StagingError("not a file that can be sealed") from error
    except StagingError:
        os.close(descriptor)
        raise
    return descriptor


class StagingSegment:
    """The sender's end. Made by `StagingPool`; one transfer has it at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._descriptor = sealed_file(SEGMENT_BYTES)
        try:
            self._view = memoryview(mmap.mmap(self._descriptor, SEGMENT_BYTES))
        except OSError:
            os.close(self._descriptor)
            raise
        self.path = path_of(self._descriptor)
        self._free = list(range(MAX_UNACKNOWLEDGED_FRAMES))
        self._taken: dict[int, int] = {}  # frame number -> slot

    def claim(self, transfer_id: TransferId, sender: Incarnation) -> None:
        """From now on it is this transfer's, and a receiver can see that."""
        self._view[: _HEADER.size] = _HEADER.pack(_MAGIC, transfer_id, sender)

    def disclaim(self) -> None:
        """It is nobody's: who still reads it for its last transfer finds out."""
        self._view[: _HEADER.size] = bytes(_HEADER.size)

    @property
    def is_quiet(self) -> bool:
        """Every frame that was put into it has been acknowledged."""
        return not self._taken

    def take_slot(self, number: int) -> int:
        """Where in the segment frame `number` goes. Raises IndexError beyond the credit of a stream."""
        slot = heapq.heappop(self._free)
        self._taken[number] = slot
        return HEADER_BYTES + slot * MAX_FRAME_BYTES

    def acknowledged(self, upto: int) -> None:
        """Frames up to this number are in the receiver's pool."""
        for number in [number for number in self._taken if number <= upto]:
            heapq.heappush(self._free, self._taken.pop(number))

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """To write into; nobody keeps it beyond the copy."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """The memory goes when the receiver has unmapped it as well, and no copy has a part of it in hand."""
        os.close(self._descriptor)
        _unmap(self._view)


class StagingPool:
    """The sender's segments: bounded, and none given to a second transfer before the first was acknowledged whole."""

    def __init__(self) -> None:
        self._idle: list[StagingSegment] = []
        self._num_leased = 0

    @property
    def num_segments(self) -> int:
        return self._num_leased + len(self._idle)

    def lease(self, transfer_id: TransferId, sender: Incarnation) -> StagingSegment | None:
        """None where there are too many, or the system gives no more memory or files."""
        if self._num_leased >= MAX_SEGMENTS:
            return None
        try:
            segment = self._idle.pop() if self._idle else StagingSegment()
        except OSError:
            return None
        self._num_leased += 1
        segment.claim(transfer_id, sender)
        return segment

    def give_back(self, segment: StagingSegment, *, is_whole: bool) -> None:
        """The stream is over, `is_whole` with all of it acknowledged.

        Otherwise the receiver may still read the segment, so it is given up: its memory becomes nobody else's.
        """
        self._num_leased -= 1
        segment.disclaim()
        if is_whole and segment.is_quiet and len(self._idle) < MAX_IDLE_SEGMENTS:
            self._idle.append(segment)
        else:
            segment.close()

    def close(self) -> None:
        """The idle ones; those that are leased go with their transfers."""
        while self._idle:
            self._idle.pop().close()


class StagingView:
    """The receiver's end: one transfer's segment, to read."""

    def __init__(self, path: str, num_bytes: int, *, transfer_id: TransferId, sender: Incarnation) -> None:
        """Raises StagingError when it is not that transfer's."""
        if not HEADER_BYTES < num_bytes <= SEGMENT_BYTES:
            raise StagingError(f"a segment of {num_bytes} bytes")
        self._expected = _HEADER.pack(_MAGIC, transfer_id, sender)
        descriptor = open_peer(path, num_bytes)
        try:
            self._view = memoryview(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ))
        except OSError as error:
            raise StagingError(f"cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if not self.is_valid:
            self.close()
            raise StagingError("the segment is another transfer's")

    @property
    def is_valid(self) -> bool:
        """It is still the transfer's: what is read from it was written for it."""
        return bytes(self._view[: _HEADER.size]) == self._expected

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """A frame's payload. Raises StagingError outside the slots, StagingGoneError when the segment was given up."""
        if not self.is_valid:
            raise StagingGoneError("the segment is not this transfer's any more")
        if offset < HEADER_BYTES or num_bytes > MAX_FRAME_BYTES or offset + num_bytes > len(self._view):
            raise StagingError(f"bytes [{offset}, {offset + num_bytes}) of {len(self._view)}")
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """Unmapped at once, or when the copy that still reads it has returned."""
        _unmap(self._view)


def _unmap(view: memoryview) -> None:
    """The mapping is known to its views alone, so that it goes with the last of them: who has had a segment may be part
    of a cycle (a stream, and the error that broke it), and an idle process collects no garbage.
    """
    mapping = view.obj
    view.release()
    assert isinstance(mapping, mmap.mmap)
    with contextlib.suppress(BufferError):  # a copy has a part of it in hand
        mapping.close()
