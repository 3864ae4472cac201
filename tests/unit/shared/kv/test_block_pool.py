"""Tests of `shared.kv.block_pool`."""

import pytest

from shared.domain.ids import BlockId
from shared.kv.block_pool import BlockPool, BlockState


def test_a_block_goes_round_its_states() -> None:
    """Free, reserved, active, free again; the counts follow and name every state."""
    pool = BlockPool(4)
    seen = [pool.counts()]

    taken = pool.reserve(3)
    assert taken is not None
    seen.append(pool.counts())
    pool.activate(taken[:2])
    seen.append(pool.counts())
    freed = pool.free(taken)
    seen.append(pool.counts())

    assert 3 == freed
    assert [(4, 0, 0), (1, 3, 0), (1, 1, 2), (4, 0, 0)] == [
        (counts[BlockState.FREE], counts[BlockState.RESERVED], counts[BlockState.ACTIVE]) for counts in seen
    ]
    assert ["free", "reserved", "active", "cached", "quarantined"] == list(seen[0])
    pool.check_integrity()


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    """None, and all blocks stay free."""
    pool = BlockPool(4)

    assert pool.reserve(5) is None
    assert 4 == pool.num_free


def test_freed_blocks_rest_longest() -> None:
    """A freed block comes back only after all others."""
    pool = BlockPool(3)
    first = pool.reserve(1)
    assert first is not None
    pool.free(first)

    assert (1, 2, 0) == pool.reserve(3)


def test_a_double_free_raises_and_changes_nothing() -> None:
    """Also when only one of the blocks was free already."""
    pool = BlockPool(3)
    taken = pool.reserve(3)
    assert taken is not None
    pool.free(taken[:1])

    with pytest.raises(ValueError, match="cannot free block 0: it is free"):
        pool.free(taken)
    assert 1 == pool.num_free
    pool.check_integrity()


def test_the_same_block_twice_in_a_call_raises() -> None:
    """A list that names a block twice is a bug of the caller."""
    pool = BlockPool(2)
    taken = pool.reserve(1)
    assert taken is not None

    with pytest.raises(ValueError, match="twice"):
        pool.free((*taken, *taken))
    assert BlockState.RESERVED is pool.state(taken[0])


def test_only_reserved_blocks_become_active() -> None:
    """A free or an active one is refused, and so is one outside the pool."""
    pool = BlockPool(2)
    taken = pool.reserve(1)
    assert taken is not None
    pool.activate(taken)

    with pytest.raises(ValueError, match="active"):
        pool.activate(taken)
    with pytest.raises(ValueError, match="free"):
        pool.activate((BlockId(1),))
    with pytest.raises(ValueError, match="the pool has 2"):
        pool.activate((BlockId(2),))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_nothing_of_no_blocks(num_blocks: int) -> None:
    """Neither a pool nor a reservation may be empty."""
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks)
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(1).reserve(num_blocks)
