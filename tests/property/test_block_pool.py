"""Any order of calls, right and wrong ones, leaves the pool whole."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.domain.ids import BlockId
from shared.kv.block_pool import BlockPool, BlockState

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with three plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.reserved: set[BlockId] = set()
        self.active: set[BlockId] = set()

    @rule(count=st.integers(1, NUM_BLOCKS + 2))
    def reserve(self, count: int) -> None:
        """All of it or nothing, and only blocks that nobody has."""
        num_free = self.pool.num_free
        taken = self.pool.reserve(count)
        assert (taken is None) == (count > num_free)
        if taken is not None:
            assert count == len(set(taken))
            assert not set(taken) & (self.reserved | self.active)
            self.reserved |= set(taken)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS).map(BlockId), max_size=4))
    def activate(self, block_ids: list[BlockId]) -> None:
        """Reserved blocks, each once; anything else is refused whole."""
        is_right = len(set(block_ids)) == len(block_ids) and set(block_ids) <= self.reserved
        try:
            self.pool.activate(block_ids)
        except ValueError:
            assert not is_right
        else:
            assert is_right
            self.reserved -= set(block_ids)
            self.active |= set(block_ids)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS).map(BlockId), max_size=4))
    def free(self, block_ids: list[BlockId]) -> None:
        """Reserved or active blocks, each once; a double free is refused whole."""
        is_right = len(set(block_ids)) == len(block_ids) and set(block_ids) <= self.reserved | self.active
        try:
            num_freed = self.pool.free(block_ids)
        except ValueError:
            assert not is_right
        else:
            assert is_right
            assert len(block_ids) == num_freed
            self.reserved -= set(block_ids)
            self.active -= set(block_ids)

    @invariant()
    def is_whole(self) -> None:
        """The pool's own check holds, and its counts are those of the sets."""
        self.pool.check_integrity()
        num_taken = len(self.reserved) + len(self.active)
        assert {
            BlockState.FREE: NUM_BLOCKS - num_taken,
            BlockState.RESERVED: len(self.reserved),
            BlockState.ACTIVE: len(self.active),
            BlockState.CACHED: 0,
            BlockState.QUARANTINED: 0,
        } == self.pool.counts()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
