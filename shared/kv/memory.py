"""The bytes of the paged KV cache, and a block's way in and out of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId
from shared.kv.layout import NUM_HALVES, KvLayout

ALIGNMENT = 64  # bytes: a cache line, and the widest vector that a kernel loads


class KvMemory:
    """`num_blocks` blocks of zeroed memory, in the block form of `shared.kv.layout`.

    Any thread may use it; that nobody reads or writes a block that another is writing is the owner's promise (a block
    belongs to one sequence until it is whole, is only read after that, and frames are copied in before the sequence
    joins a batch). Blocks are finite numbers from the start and stay so: a masked slot may be multiplied by 0.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = num_blocks * layout.block_bytes
        raw = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.data: npt.NDArray[np.uint8] = raw[start : start + num_bytes].reshape(num_blocks, layout.block_bytes)
        """[block, byte], beginning at a multiple of ALIGNMENT."""

    def keys(self) -> npt.NDArray[Any]:
        """The keys as [block, layer, kv head, head_dim, slot] of the layout's storage type; writes go through."""
        layout = self.layout
        shape = (self.num_blocks, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        return self._halves()[:, :, 0].reshape(shape)

    def values(self) -> npt.NDArray[Any]:
        """The values as [block, layer, kv head, slot, head_dim] of the layout's storage type; writes go through."""
        layout = self.layout
        shape = (self.num_blocks, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim)
        return self._halves()[:, :, 1].reshape(shape)

    def read(self, block_ids: Sequence[BlockId], *, layer_start: int, layer_end: int, num_tokens: int) -> bytes:
        """Layers [layer_start, layer_end) of each block in order, `num_tokens` valid positions in all.

        Slots of the last block beyond the valid ones come out as zeros, whatever lies there. Raises ValueError when the
        tokens do not end in the last block.
        """
        self._check_read(block_ids, layer_start, layer_end, num_tokens)
        by_layer = self._by_layer()
        parts = [by_layer[block_id, layer_start:layer_end] for block_id in block_ids]
        if num_tokens % self.layout.block_size:
            parts[-1] = parts[-1].copy()
            self._clear_beyond(parts[-1], num_tokens % self.layout.block_size)
        # Not one large copy first: fresh memory costs more than what is copied into it.
        return b"".join(part.data for part in parts)

    def read_into(
        self, payload: memoryview, block_ids: Sequence[BlockId], *, layer_start: int, layer_end: int, num_tokens: int
    ) -> None:
        """As `read`, into memory of exactly the right size: one copy. Raises ValueError for another size as well."""
        self._check_read(block_ids, layer_start, layer_end, num_tokens)
        rows = self._rows(payload, len(block_ids), layer_end - layer_start)
        by_layer = self._by_layer()
        for row, block_id in zip(rows, block_ids, strict=True):  # an index array would make a copy in between
            row[...] = by_layer[block_id, layer_start:layer_end]
        if num_tokens % self.layout.block_size:
            self._clear_beyond(rows[-1], num_tokens % self.layout.block_size)

    def write(
        self, block_ids: Sequence[BlockId], *, layer_start: int, layer_end: int, payload: bytes | memoryview
    ) -> None:
        """Set layers [layer_start, layer_end) of each block; ValueError when the payload has another length."""
        self._check_layers(layer_start, layer_end)
        rows = self._rows(payload, len(block_ids), layer_end - layer_start)
        by_layer = self._by_layer()
        for row, block_id in zip(rows, block_ids, strict=True):  # several times as fast as one index array
            by_layer[block_id, layer_start:layer_end] = row

    def _rows(self, payload: bytes | memoryview, num_blocks: int, num_layers: int) -> npt.NDArray[np.uint8]:
        """[block, layer, byte] over a payload."""
        expected = num_blocks * num_layers * self.layout.layer_block_bytes
        if len(payload) != expected:
            raise ValueError(f"payload has {len(payload)} bytes, the range takes {expected}")
        return np.frombuffer(payload, dtype=np.uint8).reshape(num_blocks, num_layers, self.layout.layer_block_bytes)

    def _clear_beyond(self, block: npt.NDArray[np.uint8], num_valid: int) -> None:
        """Zero the slots from `num_valid` on, in both halves of each layer of `block` [layer, byte]."""
        layout, num_layers = self.layout, len(block)
        halves = block.view(layout.storage_dtype).reshape(num_layers, NUM_HALVES, -1)
        halves[:, 0].reshape(num_layers, -1, layout.block_size)[:, :, num_valid:] = 0
        values = halves[:, 1].reshape(num_layers, layout.num_kv_heads, layout.block_size, -1)
        values[:, :, num_valid:] = 0

    def _check_read(self, block_ids: Sequence[BlockId], layer_start: int, layer_end: int, num_tokens: int) -> None:
        self._check_layers(layer_start, layer_end)
        if self.layout.num_blocks_for(num_tokens) != len(block_ids):
            raise ValueError(f"{num_tokens} tokens are not what {len(block_ids)} blocks hold")

    def _halves(self) -> npt.NDArray[Any]:
        """[block, layer, K|V, number]."""
        layout = self.layout
        return self.data.view(layout.storage_dtype).reshape(self.num_blocks, layout.num_layers, NUM_HALVES, -1)

    def _by_layer(self) -> npt.NDArray[np.uint8]:
        return self.data.reshape(self.num_blocks, self.layout.num_layers, self.layout.layer_block_bytes)

    def _check_layers(self, layer_start: int, layer_end: int) -> None:
        if not 0 <= layer_start < layer_end <= self.layout.num_layers:
            raise ValueError(f"layers [{layer_start}, {layer_end}) are not layers of {self.layout.num_layers}")
