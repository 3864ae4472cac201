"""Segments and views of them, both ends in this process."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.domain.ids import Incarnation, TransferId
from shared.kv.frames import MAX_UNACKNOWLEDGED_FRAMES
from shared.transfer import staging
from shared.transfer.staging import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    SEGMENT_NAME,
    StagingError,
    StagingGoneError,
    StagingPool,
    StagingSegment,
    StagingView,
    open_peer,
    path_of,
    sealed_file,
)

TRANSFER, SENDER = TransferId(7), Incarnation(8)


def _num_mapped() -> int:
    gc.collect()
    return sum(SEGMENT_NAME in line for line in Path("/proc/self/maps").read_text().splitlines())


def _open_files() -> list[str]:
    """Where this process's descriptors of files and pipes lead; not its sockets, which grpc's threads open and close."""
    gc.collect()  # what other tests have left open must not be closed between two counts
    leads: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or one of another thread
            leads.append(str(descriptor.readlink()))
    return sorted(lead for lead in leads if not lead.startswith(("socket:", "anon_inode:", "/proc/")))


def _view(segment: StagingSegment, *, transfer_id: TransferId = TRANSFER) -> StagingView:
    return StagingView(segment.path, SEGMENT_BYTES, transfer_id=transfer_id, sender=SENDER)


@pytest.fixture
def segment() -> Iterator[StagingSegment]:
    """Claimed, without a name in any folder; whoever uses it leaves nothing mapped and no file open."""
    before = (_num_mapped(), _open_files())
    segment = StagingSegment()
    assert str(Path(segment.path).readlink()).startswith(f"/memfd:{SEGMENT_NAME}")
    segment.claim(TRANSFER, SENDER)
    yield segment
    segment.close()
    assert before == (_num_mapped(), _open_files())


def test_what_is_put_into_a_slot_is_read_by_the_view(segment: StagingSegment) -> None:
    """By the offset and length that a frame names, to the last byte of the last slot."""
    view = _view(segment)
    offset = 0
    for number in range(1, MAX_UNACKNOWLEDGED_FRAMES + 1):
        offset = segment.take_slot(number)
        with segment.part(offset, 1 << 20) as part:
            part[:] = bytes((number,)) * len(part)
        with view.part(offset, 1 << 20) as seen:
            assert bytes((number,)) * (1 << 20) == seen

    assert SEGMENT_BYTES == offset + (1 << 20)
    view.close()


def test_slots_come_back_with_the_acknowledgement(segment: StagingSegment) -> None:
    """The lowest free one is taken; beyond the credit there is none."""
    offsets = [segment.take_slot(number) for number in range(1, MAX_UNACKNOWLEDGED_FRAMES + 1)]
    with pytest.raises(IndexError):
        segment.take_slot(9)
    segment.acknowledged(2)

    assert (False, offsets[0], offsets[1]) == (segment.is_quiet, segment.take_slot(9), segment.take_slot(10))
    segment.acknowledged(10)
    assert (True, offsets[0]) == (segment.is_quiet, segment.take_slot(11))


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, 8), (HEADER_BYTES - 1, 8), (HEADER_BYTES, (1 << 20) + 1), (SEGMENT_BYTES - 7, 8), (SEGMENT_BYTES, 1)],
)
def test_a_frame_lies_inside_the_slots(segment: StagingSegment, offset: int, num_bytes: int) -> None:
    """Neither in the header, nor longer than a frame may be, nor beyond the end."""
    view = _view(segment)
    with pytest.raises(StagingError, match="bytes"):
        view.part(offset, num_bytes)
    view.close()


def test_a_segment_is_fenced_by_its_transfer(segment: StagingSegment) -> None:
    """Another transfer cannot open it; one that has it open sees that it was given to another, or to none."""
    with pytest.raises(StagingError, match="another transfer's"):
        _view(segment, transfer_id=TransferId(1))
    view = _view(segment)
    assert view.is_valid
    segment.claim(TransferId(9), SENDER)
    assert not view.is_valid
    with pytest.raises(StagingGoneError):
        view.part(HEADER_BYTES, 1)
    view.close()
    segment.disclaim()
    with pytest.raises(StagingError, match="another transfer's"):
        _view(segment)


def test_a_view_stays_while_a_copy_has_a_part_in_hand(segment: StagingSegment) -> None:
    """Also when both ends have closed: the memory goes with the last that reads it, whoever still knows the two ends."""
    before = (_num_mapped(), _open_files())
    other = StagingSegment()
    other.claim(TRANSFER, SENDER)
    view = _view(other)
    offset = other.take_slot(1)
    with other.part(offset, 3) as part:
        part[:] = b"abc"
    seen, written = view.part(offset, 3), other.part(offset, 3)
    view.close()
    other.close()

    assert b"abc" == seen == written
    for part in (seen, written):
        part.release()
    assert before == (_num_mapped(), _open_files())
    assert view is not other


def test_only_sealed_files_of_other_processes_are_opened(tmp_path: Path) -> None:
    """SIGBUS: a file that its owner could cut short, a small one, a named one, a pipe, or nothing at all is refused."""
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SEGMENT_BYTES)
    small = sealed_file(64)
    named = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    reader, writer = os.pipe()
    paths = {path_of(unsealed): "not sealed", path_of(small): "64 bytes", path_of(named): "file", path_of(reader): "n"}
    paths |= {
        "/proc/self/fd/0": "not a path",
        str(tmp_path / "file"): "not a path",
        path_of(999_999): "cannot be opened",
    }
    before = _open_files()
    for path, message in paths.items():
        with pytest.raises(StagingError, match=message):
            open_peer(path, SEGMENT_BYTES)

    assert before == _open_files()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(small, 1)
    for descriptor in (unsealed, small, named, reader, writer):
        os.close(descriptor)


def test_a_view_names_its_size() -> None:
    """Neither nothing nor more than a segment has."""
    for num_bytes in (0, HEADER_BYTES, SEGMENT_BYTES + 1):
        with pytest.raises(StagingError, match="a segment of"):
            StagingView("/proc/1/fd/1", num_bytes, transfer_id=TRANSFER, sender=SENDER)


def test_only_quiet_segments_are_used_again() -> None:
    """One with an unacknowledged frame is given up: who still reads it reads nobody else's bytes."""
    before = (_num_mapped(), _open_files())
    pool = StagingPool()
    first = pool.lease(TRANSFER, SENDER)
    assert first is not None
    first.take_slot(1)
    first.acknowledged(1)
    pool.give_back(first, is_whole=True)
    again = pool.lease(TransferId(8), SENDER)
    assert again is first
    first.take_slot(1)
    pool.give_back(first, is_whole=True)
    other = pool.lease(TRANSFER, SENDER)

    assert (other is first, pool.num_segments) == (False, 1)
    assert other is not None
    pool.give_back(other, is_whole=False)
    assert 0 == pool.num_segments
    pool.close()
    assert before == (_num_mapped(), _open_files())


def test_segments_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None above the limit, few kept idle, none where the system gives no more."""
    monkeypatch.setattr(staging, "MAX_SEGMENTS", 3)
    monkeypatch.setattr(staging, "MAX_IDLE_SEGMENTS", 2)
    pool = StagingPool()
    leased = [pool.lease(TransferId(number), SENDER) for number in range(4)]
    assert [True, True, True, False] == [segment is not None for segment in leased]
    for segment in leased:
        if segment is not None:
            pool.give_back(segment, is_whole=True)

    assert 2 == pool.num_segments
    pool.close()

    def out_of_files(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", out_of_files)
    assert pool.lease(TRANSFER, SENDER) is None
    assert 0 == pool.num_segments
