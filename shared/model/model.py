"""What an executor needs from a model, whichever backend computes it. Loads neither torch nor numba."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig
from shared.model.numerics import deployment_numerics


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


class Model(Protocol):
    """Weights ready for computing. One thread at a time may call `forward`.

    A row's bits (keys, values, logits) depend on its own sequence alone: not on other segments, on how the sequence
    was cut into segments, on their order, or on the number of threads.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def numerics(self) -> str:
        """Backend, kernels and mode as text: equal where equal inputs give equal bits."""
        ...

    def layout(self, block_size: int, kv_dtype: str) -> KvLayout:
        """The cache form, with the numerics of a deployment whose roles both compute like this model."""
        ...

    def forward(
        self, memory: KvMemory, segments: Sequence[Segment], on_layers: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Compute all segments in one step, writing their keys and values into `memory`.

        Returns the logits [segments that want them, vocabulary] in the order of the segments; the array may be valid
        until the next call only. `on_layers(n)` is called, n rising, when the keys and values of the first n layers
        are written; the model may leave out some n, and always leaves out the last. Raises ValueError for a segment
        that is empty or does not fit its blocks, the window or the vocabulary; nothing is written then.
        """
        ...


def check_segments(config: ModelConfig, memory: KvMemory, segments: Sequence[Segment]) -> None:
    """The refusals of `Model.forward`, the same for all backends."""
    block_size = memory.layout.block_size
    for segment in segments:
        table = segment.block_table[: memory.layout.num_blocks_for(segment.end)]
        if not segment.token_ids or len(table) * block_size < segment.end:
            raise ValueError(f"{len(segment.token_ids)} tokens from {segment.start} do not fit {len(table)} blocks")
        if table.min() < 0 or table.max() >= memory.num_blocks:
            raise ValueError("a block lies outside the cache")
        if min(segment.token_ids) < 0 or max(segment.token_ids) >= config.vocab_size:
            raise ValueError(f"a token id lies outside the vocabulary of {config.vocab_size}")
        if segment.end > config.window:
            raise ValueError(f"a sequence is longer than the window of {config.window} tokens")


def model_layout(config: ModelConfig, source_hash: str, numerics: str, block_size: int, kv_dtype: str) -> KvLayout:
    """The cache form of a model, in a deployment whose roles both compute with these numerics."""
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        block_size=block_size,
        numerics=deployment_numerics(source_hash, prefill=numerics, decode=numerics),
    )
