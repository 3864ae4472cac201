"""Tests of `shared.kv.block_pool`."""

import pytest

from shared.domain.ids import BlockId
from shared.kv.block_pool import BlockPool, BlockState
from tests.support.cost import Cost, cost_of


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


def _active(pool: BlockPool, count: int) -> tuple[BlockId, ...]:
    taken = pool.reserve(count)
    assert taken is not None
    pool.activate(taken)
    return taken


def _cached(pool: BlockPool, count: int) -> tuple[BlockId, ...]:
    """One sequence's blocks, all of them in the index, held by nobody."""
    taken = _active(pool, count)
    pool.index(taken)
    pool.free(taken)
    return taken


def test_an_indexed_block_is_kept_when_its_last_holder_leaves() -> None:
    """Two holders: only with the second free it is cached; one that nobody indexed is free at once."""
    pool = BlockPool(4)
    first, second = _active(pool, 2)
    pool.index((first,))
    pool.share((first, second))

    assert 2 == pool.free((first, second))
    assert (BlockState.ACTIVE, BlockState.ACTIVE) == (pool.state(first), pool.state(second))
    assert 2 == pool.free((first, second))
    assert (BlockState.CACHED, BlockState.FREE) == (pool.state(first), pool.state(second))
    assert (3, 4) == (pool.num_free, pool.num_available)
    pool.check_integrity()
    with pytest.raises(ValueError, match="cannot free block 0: it is cached"):
        pool.free((first,))


def test_a_cached_block_that_is_shared_is_active_and_safe_from_eviction() -> None:
    """It is no longer available, and comes back as cached."""
    pool = BlockPool(3)
    (kept,) = _cached(pool, 1)
    pool.share((kept,))

    assert (BlockState.ACTIVE, 2) == (pool.state(kept), pool.num_available)
    assert pool.reserve(3) is None
    pool.free((kept,))
    assert BlockState.CACHED is pool.state(kept)
    pool.check_integrity()


def test_free_blocks_go_first_then_the_least_recently_used() -> None:
    """Of a sequence the end goes before the beginning; a shared one counts as used when it is given back."""
    pool = BlockPool(6)
    evicted: list[BlockId] = []
    pool.watch_evictions(evicted.append)
    old, older_touched = _cached(pool, 2), _cached(pool, 2)
    pool.share(old[:1])
    pool.free(old[:1])

    assert (4, 5) == pool.reserve(2)
    assert [] == evicted
    assert (1, 3, 2) == pool.reserve(3)
    assert [old[1], older_touched[1], older_touched[0]] == evicted
    assert pool.reserve(2) is None
    assert (0,) == pool.reserve(1)
    assert 0 == pool.num_indexed
    pool.check_integrity()


def test_only_an_active_block_is_indexed_and_only_once() -> None:
    """A reserved one's KV is not there yet; a second time would file it under two names."""
    pool = BlockPool(2)
    taken = pool.reserve(1)
    assert taken is not None
    with pytest.raises(ValueError, match="cannot index block 0: it is reserved"):
        pool.index(taken)
    pool.activate(taken)
    pool.index(taken)
    with pytest.raises(ValueError, match="index a block twice"):
        pool.index(taken)
    assert (True, False, 1) == (pool.is_indexed(taken[0]), pool.is_indexed(BlockId(1)), pool.num_indexed)


def test_only_whole_blocks_are_shared() -> None:
    """A reserved or free block has nothing to read."""
    pool = BlockPool(2)
    taken = pool.reserve(1)
    assert taken is not None
    with pytest.raises(ValueError, match="cannot share block 0: it is reserved"):
        pool.share(taken)
    with pytest.raises(ValueError, match="cannot share block 1: it is free"):
        pool.share((BlockId(1),))
    pool.check_integrity()


def _lives(num_blocks: int) -> Cost:
    """The cost of the same few calls, evictions among them, in a pool of any size whose blocks are all cached."""
    pool = BlockPool(num_blocks)
    pool.watch_evictions(lambda _: None)
    _cached(pool, num_blocks)

    def live() -> None:
        for _ in range(3):
            taken = _active(pool, 4)
            pool.share(taken[:2])
            pool.index(taken[3:])
            pool.free(taken)
            pool.free(taken[:2])
            pool.counts()

    live()  # what is made once
    return cost_of(live)


def test_no_call_costs_more_in_a_larger_pool() -> None:
    """The same lines run, and no memory by the size of the pool is touched, with 100 blocks and with 40,000."""
    small, large = _lives(100), _lives(40_000)

    assert small.num_lines == large.num_lines
    assert large.peak_bytes < 20_000


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_nothing_of_no_blocks(num_blocks: int) -> None:
    """Neither a pool nor a reservation may be empty."""
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks)
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(1).reserve(num_blocks)


def test_only_an_indexed_active_block_can_be_unindexed() -> None:
    """Then it is free when its last holder has gone."""
    pool = BlockPool(4)
    blocks = pool.reserve(2)
    assert blocks is not None
    pool.activate(blocks)
    with pytest.raises(ValueError, match="not indexed"):
        pool.unindex(blocks)
    pool.index(blocks[:1])
    pool.unindex(blocks[:1])
    pool.check_integrity()
    pool.free(blocks)

    assert (0, 4) == (pool.num_indexed, pool.num_free)
