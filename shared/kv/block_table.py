"""The ordered blocks of one sequence: token position to block and slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId


class BlockTable:
    """Immutable. Position p of the sequence lives in block `block_ids[p // block_size]` at offset `p % block_size`."""

    __slots__ = ("block_ids", "block_size", "indices")

    def __init__(self, block_ids: Sequence[BlockId], block_size: int) -> None:
        self.block_ids = tuple(block_ids)
        self.block_size = block_size
        self.indices: npt.NDArray[np.int64] = np.array(self.block_ids, dtype=np.int64)
        """The same ids as an array, for gathering."""
        self.indices.flags.writeable = False

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def capacity_tokens(self) -> int:
        return len(self.block_ids) * self.block_size

    def blocks_of(self, token_start: int, token_end: int) -> tuple[BlockId, ...]:
        """The blocks that hold positions [token_start, token_end); raises IndexError beyond the table's end."""
        if not 0 <= token_start <= token_end <= self.capacity_tokens:
            raise IndexError(f"tokens [{token_start}, {token_end}) are outside a table of {self.capacity_tokens}")
        if token_start == token_end:
            return ()
        return self.block_ids[token_start // self.block_size : -(-token_end // self.block_size)]

    def slot_of(self, position: int) -> int:
        """Slot in the whole cache: block × block size + offset."""
        if not 0 <= position < self.capacity_tokens:
            raise IndexError(f"position {position} is outside a table of {self.capacity_tokens}")
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size
