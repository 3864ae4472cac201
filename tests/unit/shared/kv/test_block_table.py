"""Tests of `shared.kv.block_table`."""

import pytest

from shared.domain.ids import BlockId
from shared.kv.block_table import BlockTable

TABLE = BlockTable((BlockId(5), BlockId(2), BlockId(7)), 4)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 12, (5, 2, 7)), (0, 4, (5,)), (0, 5, (5, 2)), (4, 8, (2,)), (3, 9, (5, 2, 7)), (8, 8, ())],
)
def test_blocks_of_a_token_range(start: int, end: int, expected: tuple[int, ...]) -> None:
    """Every block that holds a position of the range, in the sequence's order."""
    assert expected == TABLE.blocks_of(start, end)


@pytest.mark.parametrize(("position", "expected"), [(0, 20), (3, 23), (4, 8), (11, 31)])
def test_slot_of_a_position(position: int, expected: int) -> None:
    """Block × block size + offset."""
    assert expected == TABLE.slot_of(position)


def test_beyond_the_end_raises() -> None:
    """A position that the table does not have is never another sequence's slot."""
    with pytest.raises(IndexError):
        TABLE.slot_of(12)
    with pytest.raises(IndexError):
        TABLE.slot_of(-1)
    with pytest.raises(IndexError):
        TABLE.blocks_of(0, 13)


def test_indices_are_the_ids_and_read_only() -> None:
    """The array is for gathering; nobody can change the table through it."""
    assert [5, 2, 7] == TABLE.indices.tolist()
    assert 12 == TABLE.capacity_tokens
    assert 3 == len(TABLE)
    with pytest.raises(ValueError, match="read-only"):
        TABLE.indices[0] = 1
