"""Any order of calls, right and wrong ones, leaves pool and prefix index whole, and no hit is ever wrong."""

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.domain.ids import BlockId, TokenId
from shared.kv.block_pool import BlockPool, BlockState
from shared.kv.prefix_cache import PrefixCache

NUM_BLOCKS = 12
SIZE = 2
SOME_BLOCKS = st.lists(st.integers(0, NUM_BLOCKS).map(BlockId), max_size=4)
# Two tokens, so that prompts often begin alike.
PROMPTS = st.lists(st.integers(0, 1).map(TokenId), min_size=1, max_size=5 * SIZE).map(tuple)
SALTS = st.integers(0, 1)

Prompt = tuple[TokenId, ...]
Content = tuple[int, Prompt]  # the salt and all tokens up to a block's end: what its KV depends on


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with plain sets, and the index with what each block really holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, SIZE)
        self.reserved: set[BlockId] = set()
        self.holders: Counter[BlockId] = Counter()  # of active blocks
        self.sequences: list[tuple[int, Prompt, tuple[BlockId, ...]]] = []
        self.contents: dict[BlockId, Content] = {}  # of blocks that were written whole since they were reserved

    @rule(count=st.integers(1, NUM_BLOCKS + 2))
    def reserve(self, count: int) -> None:
        """All of it or nothing, and only blocks that nobody has."""
        self._reserve(count)

    @rule(block_ids=SOME_BLOCKS)
    def activate(self, block_ids: list[BlockId]) -> None:
        """Reserved blocks, each once; anything else is refused whole."""
        is_right = len(set(block_ids)) == len(block_ids) and set(block_ids) <= self.reserved
        if self._try(lambda: self.pool.activate(block_ids), is_right):
            self.reserved -= set(block_ids)
            self.holders.update(block_ids)

    @rule(block_ids=SOME_BLOCKS)
    def share(self, block_ids: list[BlockId]) -> None:
        """Active or cached ones, each once; their content stays."""
        shareable = self._in(BlockState.ACTIVE) | self._in(BlockState.CACHED)
        is_right = len(set(block_ids)) == len(block_ids) and set(block_ids) <= shareable
        if self._try(lambda: self.pool.share(block_ids), is_right):
            self.holders.update(block_ids)

    @rule(block_ids=SOME_BLOCKS)
    def free(self, block_ids: list[BlockId]) -> None:
        """Reserved or active blocks that are nobody's sequence, each once; a double free is refused whole."""
        loose = Counter(self.holders)
        loose.subtract(block for _, _, blocks in self.sequences for block in blocks)
        is_right = len(set(block_ids)) == len(block_ids) and all(
            block in self.reserved or loose[block] > 0 for block in block_ids
        )
        is_held = all(block in self.reserved or self.holders[block] > 0 for block in block_ids)
        if not is_right and is_held and len(set(block_ids)) == len(block_ids):
            return  # the pool could not know that it is a sequence's
        if self._try(lambda: self.pool.free(block_ids), is_right):
            self._freed(block_ids)

    @rule(prompt=PROMPTS, salt=SALTS, is_inserted=st.booleans())
    def compute(self, prompt: Prompt, salt: int, is_inserted: bool) -> None:
        """A prompt as prefill does it: match, reserve the rest, compute, insert. A hit holds exactly its tokens."""
        found = self.cache.match(prompt, salt=salt, max_tokens=len(prompt) - 1)
        assert [(salt, prompt[: (n + 1) * SIZE]) for n in range(len(found))] == [self.contents[b] for b in found]
        assert len(found) * SIZE < len(prompt)
        self.holders.update(found)
        rest = self._reserve(-(-len(prompt) // SIZE) - len(found))
        if rest is None:
            self.pool.free(found)
            self._freed(found)
            return
        self.pool.activate(rest)
        self.reserved -= set(rest)
        self.holders.update(rest)
        blocks = (*found, *rest)
        for number, block in enumerate(blocks[: len(prompt) // SIZE]):
            if number >= len(found):
                self.contents[block] = (salt, prompt[: (number + 1) * SIZE])
        if is_inserted:
            self.cache.insert(prompt, salt=salt, block_ids=blocks)
            longest = self.cache.match(prompt, salt=salt, max_tokens=len(prompt))
            assert len(prompt) // SIZE == len(longest)  # what was just inserted is found
            self.pool.free(longest)
        self.sequences.append((salt, prompt, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A sequence gives its blocks back; every one is counted."""
        place = data.draw(st.integers(0, len(self.sequences) - 1))
        _, _, blocks = self.sequences.pop(place)
        assert len(blocks) == self.pool.free(blocks)
        self._freed(blocks)

    @invariant()
    def is_whole(self) -> None:
        """The checks of both hold, the counts are those of the sets, and a block of a sequence keeps its content."""
        self.cache.check_integrity()
        counts = self.pool.counts()
        num_active = sum(1 for count in self.holders.values() if count > 0)
        assert (len(self.reserved), num_active, 0) == (
            counts[BlockState.RESERVED],
            counts[BlockState.ACTIVE],
            counts[BlockState.QUARANTINED],
        )
        assert NUM_BLOCKS - len(self.reserved) - num_active == self.pool.num_available
        for salt, prompt, blocks in self.sequences:
            whole = blocks[: len(prompt) // SIZE]
            assert [(salt, prompt[: (n + 1) * SIZE]) for n in range(len(whole))] == [self.contents[b] for b in whole]

    def _reserve(self, count: int) -> tuple[BlockId, ...] | None:
        available = self.pool.num_available
        num_free = self.pool.num_free
        num_cached_before = len(self._in(BlockState.CACHED))
        taken = self.pool.reserve(count)
        assert (taken is None) == (count > available)
        if taken is not None:
            assert count == len(set(taken))
            assert not set(taken) & (self.reserved | self._held())
            assert max(count - num_free, 0) == num_cached_before - len(self._in(BlockState.CACHED))
            self.reserved |= set(taken)
            for block in taken:
                self.contents.pop(block, None)
        return taken

    def _freed(self, block_ids: list[BlockId] | tuple[BlockId, ...]) -> None:
        self.holders.subtract(block for block in block_ids if block not in self.reserved)
        self.reserved -= set(block_ids)

    def _held(self) -> set[BlockId]:
        return {block for block, count in self.holders.items() if count > 0}

    def _in(self, state: BlockState) -> set[BlockId]:
        return {BlockId(block) for block in range(NUM_BLOCKS) if self.pool.state(BlockId(block)) is state}

    @staticmethod
    def _try(call: Callable[[], object], is_right: bool) -> bool:
        try:
            call()
        except ValueError:
            assert not is_right
            return False
        assert is_right
        return True


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
