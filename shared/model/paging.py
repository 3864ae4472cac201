"""Where a step's keys and values lie in the paged cache: made once a step, used in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.layout import KvLayout
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
    """Places in the cache: block and slot of every written token, and each segment's blocks to read with its length."""

    written_blocks: torch.Tensor
    written_slots: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    lengths: tuple[int, ...]


def plan_pages(layout: KvLayout, segments: Sequence[Segment], num_blocks: int) -> PagePlan:
    """Raises ValueError when a segment is empty, or its table too short or beyond the cache."""
    size = layout.block_size
    blocks: list[npt.NDArray[np.int64]] = []
    slots: list[npt.NDArray[np.int64]] = []
    tables: list[torch.Tensor] = []
    for segment in segments:
        table = segment.block_table[: layout.num_blocks_for(segment.end)]
        if not segment.token_ids or len(table) * size < segment.end:
            raise ValueError(f"{len(segment.token_ids)} tokens from {segment.start} do not fit {len(table)} blocks")
        if table.min() < 0 or table.max() >= num_blocks:
            raise ValueError("a block lies outside the cache")
        positions = np.arange(segment.start, segment.end)
        blocks.append(table[positions // size])
        slots.append(positions % size)
        tables.append(as_tensor(table.copy()))
    return PagePlan(
        written_blocks=as_tensor(np.concatenate(blocks)),
        written_slots=as_tensor(np.concatenate(slots)),
        tables=tuple(tables),
        lengths=tuple(segment.end for segment in segments),
    )
