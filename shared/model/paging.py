"""Where a step's keys and values lie in the paged cache: row numbers for one scatter and one gather a layer.

The cache's memory is taken as rows of one head's `head_dim` numbers. In the block form of `shared.kv.layout` the rows
of a token in layer l are those in layer 0 plus a constant, so the numbers are made once a step, for layer 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.layout import NUM_HALVES, KvLayout
from shared.model.layers import as_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence, to be computed in a step.

    `token_ids` are those at positions `start`, `start + 1`, ...; everything before `start` is in the cache already.
    `block_table` [blocks] are the sequence's blocks in order. `want_logits` asks for the logits of the last token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: npt.NDArray[np.int64]
    want_logits: bool

    @property
    def end(self) -> int:
        """Positions of the sequence that are in the cache after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Row numbers in layer 0, flat: `written` [token, half, kv head], `read` by segment [half, kv head, position]."""

    written: torch.Tensor
    read: torch.Tensor
    lengths: tuple[int, ...]
    """Positions to read, by segment."""
    layer_stride: int
    """Rows from one layer to the next."""


def plan_pages(layout: KvLayout, segments: Sequence[Segment], num_blocks: int) -> PagePlan:
    """Raises ValueError when a segment is empty, or its table too short or beyond the cache."""
    size = layout.block_size
    rows_per_token = NUM_HALVES * layout.num_kv_heads
    block_rows = layout.num_layers * rows_per_token * size
    heads = np.arange(rows_per_token, dtype=np.int64) * size
    written: list[npt.NDArray[np.int64]] = []
    read: list[npt.NDArray[np.int64]] = []
    for segment in segments:
        table = segment.block_table[: layout.num_blocks_for(segment.end)]
        if not segment.token_ids or len(table) * size < segment.end:
            raise ValueError(f"{len(segment.token_ids)} tokens from {segment.start} do not fit {len(table)} blocks")
        if table.min() < 0 or table.max() >= num_blocks:
            raise ValueError("a block lies outside the cache")
        slots = (table[:, None] * block_rows + np.arange(size)).reshape(-1)[: segment.end]
        read.append((heads[:, None] + slots).reshape(-1))
        written.append((slots[segment.start :, None] + heads).reshape(-1))
    return PagePlan(
        written=as_tensor(np.concatenate(written)),
        read=as_tensor(np.concatenate(read)),
        lengths=tuple(segment.end for segment in segments),
        layer_stride=rows_per_token * size,
    )
