"""The paged cache as torch sees it: where a step's keys and values are written, and how they are read back."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.memory import KvMemory
from shared.model.model import Segment
from shared.model.torch_layers import as_tensor


class StepCache:
    """The cache during one step. It lies in the worker's memory, whatever device computes."""

    def __init__(self, memory: KvMemory, segments: Sequence[Segment], device: torch.device) -> None:
        size = memory.layout.block_size
        self._keys = _as_numbers(memory, memory.keys())
        self._values = _as_numbers(memory, memory.values())
        self._device = device
        self._lengths = [segment.end for segment in segments]
        tables = [segment.block_table[: memory.layout.num_blocks_for(segment.end)] for segment in segments]
        self._tables = [as_tensor(table.copy()) for table in tables]
        positions = [np.arange(segment.start, segment.end) for segment in segments]
        blocks = [table[places // size] for table, places in zip(tables, positions, strict=True)]
        self._blocks = as_tensor(np.concatenate(blocks))
        self._slots = as_tensor(np.concatenate([places % size for places in positions]))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [rows of all segments, kv head, head_dim], rounded to the cache's type."""
        self._keys[self._blocks, layer, :, :, self._slots] = keys.to(self._keys.device, self._keys.dtype)
        self._values[self._blocks, layer, :, self._slots] = values.to(self._values.device, self._values.dtype)

    def read(self, layer: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of segment `place` as float32: keys [kv head, head_dim, length], values [kv head, length, head_dim]."""
        table, length = self._tables[place], self._lengths[place]
        keys = self._keys[table, layer].permute(1, 2, 0, 3).flatten(2)[:, :, :length]
        values = self._values[table, layer].transpose(0, 1).flatten(1, 2)[:, :length]
        return keys.to(self._device, torch.float32), values.to(self._device, torch.float32)


def _as_numbers(memory: KvMemory, half: npt.NDArray[np.generic]) -> torch.Tensor:
    tensor = as_tensor(half)
    return tensor.view(torch.bfloat16) if memory.layout.dtype == "bfloat16" else tensor
