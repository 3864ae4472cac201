"""Who owns which block of the paged KV cache. The only place where a block changes its state.

FREE -> RESERVED -> ACTIVE -> FREE      RESERVED -> FREE when the attempt ends before its KV is whole
ACTIVE -> CACHED -> ACTIVE              when its last holder leaves a block of the prefix index, and the next one comes
CACHED -> FREE                          evicted: least recently used first, when free blocks have run out
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId


class BlockState(StrEnum):
    """QUARANTINED is counted from the start so that every reader knows it; nothing enters it yet."""

    FREE = "free"
    RESERVED = "reserved"  # one holder, being filled
    ACTIVE = "active"  # one or more holders; whoever shares it only reads it
    CACHED = "cached"  # no holder; its KV is whole and may be found again
    QUARANTINED = "quarantined"


_STATES = tuple(BlockState)
_CODE = {state: np.uint8(code) for code, state in enumerate(_STATES)}
_IS_HELD = (BlockState.RESERVED, BlockState.ACTIVE)


class BlockPool:
    """A fixed number of blocks. One owner thread. Every call does all or nothing; misuse raises ValueError.

    Blocks are given out in the order in which they became free, so one that has just been freed rests longest: a stray
    late reader is then likely to be caught by a check instead of finding a stranger's tokens at once.
    A request may hold tens of thousands of blocks, and the owner is an event loop: states are looked at as arrays, and
    no call costs more for a larger pool.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self._states: npt.NDArray[np.uint8] = np.full(num_blocks, _CODE[BlockState.FREE])
        self._holders: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._is_indexed: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._num_indexed = 0
        self._free = deque(BlockId(block) for block in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._counts = Counter({BlockState.FREE: num_blocks})
        self._on_evicted: Callable[[BlockId], None] = _nobody_knows

    @property
    def num_blocks(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """What a reservation can get: free blocks, and cached ones."""
        return len(self._free) + len(self._cached)

    def reserve(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Take `num_blocks` blocks, evicting cached ones if need be; None and no change when there are too few."""
        if num_blocks < 1:
            raise ValueError("a reservation takes at least 1 block")
        if num_blocks > self.num_available:
            return None
        self._evict(num_blocks - len(self._free))
        block_ids = tuple(self._free.popleft() for _ in range(num_blocks))
        indices = np.array(block_ids, dtype=np.int64)
        self._set(indices, BlockState.RESERVED)
        self._holders[indices] = 1
        return block_ids

    def activate(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved blocks become active: their KV is in use by a step."""
        self._set(self._require(block_ids, (BlockState.RESERVED,), "activate"), BlockState.ACTIVE)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """One more holder for each block, active or cached; a cached one is active again."""
        indices = self._require(block_ids, (BlockState.ACTIVE, BlockState.CACHED), "share")
        for block_id in block_ids:
            self._cached.pop(block_id, None)
        self._set(indices, BlockState.ACTIVE)
        self._holders[indices] += 1

    def free(self, block_ids: Sequence[BlockId]) -> int:
        """One holder less for each block, given in the order of its sequence; returns how many.

        With the last one a block becomes cached if it is in the prefix index, free otherwise. A second free of the same
        blocks raises where nobody else holds them.
        """
        indices = self._require(block_ids, _IS_HELD, "free")
        self._holders[indices] -= 1
        left = indices[self._holders[indices] == 0]
        kept, emptied = left[self._is_indexed[left]], left[~self._is_indexed[left]]
        self._set(kept, BlockState.CACHED)
        self._set(emptied, BlockState.FREE)
        # The end of a sequence is of no use without its beginning: it goes first.
        self._cached.update((BlockId(block), None) for block in reversed(kept.tolist()))
        self._free.extend(map(BlockId, emptied.tolist()))
        return len(block_ids)

    # ---- the prefix index

    def watch_evictions(self, on_evicted: Callable[[BlockId], None]) -> None:
        """`on_evicted` is called for each indexed block whose content is given up, before anyone can get it."""
        self._on_evicted = on_evicted

    def index(self, block_ids: Sequence[BlockId]) -> None:
        """From now on these active blocks are kept as cached when their last holder has gone."""
        indices = self._require(block_ids, (BlockState.ACTIVE,), "index")
        if self._is_indexed[indices].any():
            raise ValueError("cannot index a block twice")
        self._is_indexed[indices] = True
        self._num_indexed += len(block_ids)

    def unindex(self, block_ids: Sequence[BlockId]) -> None:
        """These active blocks are not kept when their last holder has gone; they are indexed."""
        indices = self._require(block_ids, (BlockState.ACTIVE,), "unindex")
        if not self._is_indexed[indices].all():
            raise ValueError("cannot unindex a block that is not indexed")
        self._is_indexed[indices] = False
        self._num_indexed -= len(block_ids)

    @property
    def num_indexed(self) -> int:
        return self._num_indexed

    def is_indexed(self, block_id: BlockId) -> bool:
        return bool(self._is_indexed[block_id])

    # ---- looking

    def state(self, block_id: BlockId) -> BlockState:
        return _STATES[int(self._states[block_id])]

    def counts(self) -> dict[BlockState, int]:
        """Number of blocks in every state, zeros included; the sum is `num_blocks`."""
        return {state: self._counts[state] for state in BlockState}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one place and all counts are true."""
        codes = np.bincount(self._states, minlength=len(_STATES)).tolist()
        seen = {state: int(count) for state, count in zip(_STATES, codes, strict=True)}
        if seen != self.counts():
            raise AssertionError(f"counts {self.counts()} differ from the states {seen}")
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if free != self._in_state(BlockState.FREE) or cached != self._in_state(BlockState.CACHED):
            raise AssertionError("the lists of free and cached blocks differ from the states")
        is_held = np.isin(self._states, [_CODE[state] for state in _IS_HELD])
        if not np.array_equal(is_held, self._holders > 0) or (self._holders < 0).any():
            raise AssertionError("a block is held by nobody, or free and held")
        if (self._holders[self._states == _CODE[BlockState.RESERVED]] != 1).any():
            raise AssertionError("a reserved block has several holders")
        indexed = set(np.flatnonzero(self._is_indexed).tolist())
        if len(indexed) != self._num_indexed:
            raise AssertionError(f"{len(indexed)} blocks are indexed, {self._num_indexed} counted")
        if not cached <= indexed <= cached | self._in_state(BlockState.ACTIVE):
            raise AssertionError("a cached block is not indexed, or an indexed one neither cached nor active")

    def _evict(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            return
        evicted = [self._cached.popitem(last=False)[0] for _ in range(num_blocks)]
        indices = np.array(evicted, dtype=np.int64)
        self._is_indexed[indices] = False
        self._num_indexed -= num_blocks
        self._set(indices, BlockState.FREE)
        self._free.extend(evicted)
        for block_id in evicted:
            self._on_evicted(block_id)

    def _require(self, block_ids: Sequence[BlockId], states: tuple[BlockState, ...], act: str) -> npt.NDArray[np.int64]:
        """The ids as an array, all of them in one of `states`."""
        indices = np.array(block_ids, dtype=np.int64)
        outside = indices[(indices < 0) | (indices >= self.num_blocks)]
        if outside.size:
            raise ValueError(f"cannot {act} block {outside[0]}: the pool has {self.num_blocks}")
        if np.unique(indices).size < indices.size:
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

    def _in_state(self, state: BlockState) -> set[int]:
        return set(np.flatnonzero(self._states == _CODE[state]).tolist())


def _nobody_knows(block_id: BlockId) -> None:
    raise RuntimeError(f"block {block_id} is indexed, and nobody watches evictions")
