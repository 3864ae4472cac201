"""The real model behind the `Executor` protocol: one forward pass a step, then the sampler."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.sampler import sample
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.llama import LlamaModel
from shared.model.paging import Segment


class TorchExecutor:
    """Stateless beside model and cache: what a row gives depends on that row alone, whoever shares its step."""

    def __init__(
        self, model: LlamaModel, memory: KvMemory, *, window: int, eos_ids: frozenset[TokenId], chunk_tokens: int
    ) -> None:
        self._model = model
        self._memory = memory
        self._window = window
        self._eos_ids = eos_ids
        self._chunk_tokens = chunk_tokens

    @property
    def layout(self) -> KvLayout:
        return self._memory.layout

    @property
    def window(self) -> int:
        return self._window

    @property
    def eos_ids(self) -> frozenset[TokenId]:
        return self._eos_ids

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        """Borders at multiples of the chunk from token 0, so that a prompt's bits do not depend on when it came."""
        num_tokens = spec.num_prompt_tokens
        return (*range(self._chunk_tokens, num_tokens, self._chunk_tokens), num_tokens)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        logits = iter(
            self._model.forward(
                self._memory,
                [
                    Segment(
                        token_ids=chunk.spec.prompt_ids[chunk.start : chunk.end],
                        start=chunk.start,
                        block_table=chunk.block_table.indices,
                        want_logits=chunk.is_last and chunk.wants_token,
                    )
                    for chunk in chunks
                ],
            )
        )
        return [
            _sampled(next(logits), chunk.spec, 1) if chunk.is_last and chunk.wants_token else None for chunk in chunks
        ]

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Nothing to compare with: the frames' checksums are the proof."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        logits = iter(
            self._model.forward(
                self._memory,
                [
                    Segment(
                        token_ids=row.input_tokens,
                        start=row.position,
                        block_table=row.block_table.indices,
                        want_logits=row.wants_token,
                    )
                    for row in rows
                ],
            )
        )
        return [_sampled(next(logits), row.spec, row.index) if row.wants_token else None for row in rows]

    def release(self, key: RequestKey) -> None:
        """Nothing is kept for a sequence."""

    def interrupt(self) -> None:
        """A forward pass cannot be cut short; it ends by itself soon."""


def _sampled(logits: npt.NDArray[np.float32], spec: RequestSpec, index: int) -> SampledToken | SequenceFault:
    drawn = sample(logits, spec.sampling, index)
    return drawn if isinstance(drawn, SequenceFault) else SampledToken(token_id=drawn)
