"""Who owns which block of the paged KV cache. The only place where a block changes its state.

FREE -> RESERVED -> ACTIVE -> FREE      RESERVED -> FREE when the attempt ends before its KV is whole
"""

from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId


class BlockState(StrEnum):
    """CACHED and QUARANTINED are counted from the start so that every reader knows them; nothing enters them yet."""

    FREE = "free"
    RESERVED = "reserved"
    ACTIVE = "active"
    CACHED = "cached"
    QUARANTINED = "quarantined"


_STATES = tuple(BlockState)
_CODE = {state: np.uint8(code) for code, state in enumerate(_STATES)}


class BlockPool:
    """A fixed number of blocks. One owner thread. Every call does all or nothing; misuse raises ValueError.

    Blocks are given out in the order in which they became free, so one that has just been freed rests longest: a stray
    late reader is then likely to be caught by a check instead of finding a stranger's tokens at once.
    A request may hold tens of thousands of blocks, and the owner is an event loop: states are looked at as arrays.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self._states: npt.NDArray[np.uint8] = np.full(num_blocks, _CODE[BlockState.FREE])
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
        self._set(np.array(block_ids, dtype=np.int64), BlockState.RESERVED)
        return block_ids

    def activate(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved blocks become active: their KV is in use by a step."""
        self._set(self._require(block_ids, (BlockState.RESERVED,), "activate"), BlockState.ACTIVE)

    def free(self, block_ids: Sequence[BlockId]) -> int:
        """Give reserved or active blocks back; returns how many. A second free of the same blocks raises."""
        self._set(self._require(block_ids, (BlockState.RESERVED, BlockState.ACTIVE), "free"), BlockState.FREE)
        self._free.extend(block_ids)
        return len(block_ids)

    def state(self, block_id: BlockId) -> BlockState:
        return _STATES[int(self._states[block_id])]

    def counts(self) -> dict[BlockState, int]:
        """Number of blocks in every state, zeros included; the sum is `num_blocks`."""
        return {state: self._counts[state] for state in BlockState}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one place and the counts are true."""
        codes = np.bincount(self._states, minlength=len(_STATES)).tolist()
        seen = {state: int(count) for state, count in zip(_STATES, codes, strict=True)}
        if seen != self.counts():
            raise AssertionError(f"counts {self.counts()} differ from the states {seen}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if free != set(np.flatnonzero(self._states == _CODE[BlockState.FREE]).tolist()):
            raise AssertionError("the free list differs from the free states")

    def _require(self, block_ids: Sequence[BlockId], states: tuple[BlockState, ...], act: str) -> npt.NDArray[np.int64]:
        """The ids as an array, all of them in one of `states`."""
        indices = np.array(block_ids, dtype=np.int64)
        outside = indices[(indices < 0) | (indices >= self.num_blocks)]
        if outside.size:
            raise ValueError(f"cannot {act} block {outside[0]}: the pool has {self.num_blocks}")
        if indices.size and np.bincount(indices).max() > 1:
            raise ValueError(f"cannot {act} a block twice in one call")
        is_wanted = np.array([state in states for state in _STATES])
        others = indices[~is_wanted[self._states[indices]]]
        if others.size:
            raise ValueError(f"cannot {act} block {others[0]}: it is {self.state(BlockId(int(others[0])))}")
        return indices

    def _set(self, indices: npt.NDArray[np.int64], state: BlockState) -> None:
        for code, count in enumerate(np.bincount(self._states[indices]).tolist()):
            self._counts[_STATES[code]] -= count
        self._states[indices] = _CODE[state]
        self._counts[state] += indices.size
