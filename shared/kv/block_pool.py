"""Who owns which block of the paged KV cache. The only place where a block changes its state.

FREE -> RESERVED -> ACTIVE -> FREE      RESERVED -> FREE when the attempt ends before its KV is whole
"""

from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum

from shared.domain.ids import BlockId


class BlockState(StrEnum):
    """CACHED and QUARANTINED are counted from the start so that every reader knows them; nothing enters them yet."""

    FREE = "free"
    RESERVED = "reserved"
    ACTIVE = "active"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class BlockPool:
    """A fixed number of blocks. One owner thread. Every call does all or nothing; misuse raises ValueError.

    Blocks are given out in the order in which they became free, so one that has just been freed rests longest: a stray
    late reader is then likely to be caught by a check instead of finding a stranger's tokens at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self._states = [BlockState.FREE] * num_blocks
        self._free = deque(BlockId(block) for block in range(num_blocks))
        self._counts = Counter({BlockState.FREE: num_blocks})

    @property
    def num_blocks(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Take `num_blocks` free blocks, or None and no change when there are too few."""
        if num_blocks < 1:
            raise ValueError("a reservation takes at least 1 block")
        if num_blocks > len(self._free):
            return None
        block_ids = tuple(self._free.popleft() for _ in range(num_blocks))
        self._set(block_ids, BlockState.RESERVED)
        return block_ids

    def activate(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved blocks become active: their KV is in use by a step."""
        self._require(block_ids, (BlockState.RESERVED,), "activate")
        self._set(block_ids, BlockState.ACTIVE)

    def free(self, block_ids: Sequence[BlockId]) -> int:
        """Give reserved or active blocks back; returns how many. A second free of the same blocks raises."""
        self._require(block_ids, (BlockState.RESERVED, BlockState.ACTIVE), "free")
        self._set(block_ids, BlockState.FREE)
        self._free.extend(block_ids)
        return len(block_ids)

    def state(self, block_id: BlockId) -> BlockState:
        return self._states[block_id]

    def counts(self) -> dict[BlockState, int]:
        """Number of blocks in every state, zeros included; the sum is `num_blocks`."""
        return {state: self._counts[state] for state in BlockState}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one place and the counts are true."""
        if Counter(self._states) != +self._counts:
            raise AssertionError(f"counts {dict(self._counts)} differ from the states {dict(Counter(self._states))}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if free != {block for block, state in enumerate(self._states) if state is BlockState.FREE}:
            raise AssertionError("the free list differs from the free states")

    def _require(self, block_ids: Sequence[BlockId], states: tuple[BlockState, ...], act: str) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"cannot {act} a block twice in one call")
        for block_id in block_ids:
            if not 0 <= block_id < len(self._states):
                raise ValueError(f"cannot {act} block {block_id}: the pool has {len(self._states)}")
            if self._states[block_id] not in states:
                raise ValueError(f"cannot {act} block {block_id}: it is {self._states[block_id]}")

    def _set(self, block_ids: Sequence[BlockId], state: BlockState) -> None:
        for block_id in block_ids:
            self._counts[self._states[block_id]] -= 1
            self._states[block_id] = state
        self._counts[state] += len(block_ids)
