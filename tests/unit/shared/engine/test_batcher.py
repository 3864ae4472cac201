"""Tests of `shared.engine.batcher`."""

import pytest

from shared.engine.batcher import pack_chunks


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([64, 64, 64, 64, 64], [0, 1, 2, 3]),
        ([300, 1], [0]),
        ([64, 256, 64], [0, 2]),
        ([0, 0, 256, 1], [0, 1, 2]),
    ],
    ids=["nothing", "as many as fit", "the first always fits", "a short one passes", "empty chunks are free"],
)
def test_chunks_under_a_budget_of_256(lengths: list[int], expected: list[int]) -> None:
    """Oldest first, while the budget lasts."""
    assert expected == pack_chunks(lengths, token_budget=256, max_sequences=16)


def test_no_more_sequences_than_allowed() -> None:
    """Chunks that only take time are free of tokens, but not without end."""
    assert [0, 1] == pack_chunks([0, 0, 0], token_budget=256, max_sequences=2)
