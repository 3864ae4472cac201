"""The real model behind the `Executor` protocol: one forward pass a step, then the sampler."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.sampler import Sampler, SamplingRow
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.model import Model, Segment


class ModelExecutor:
    """What a row gives depends on its own sequence alone, whoever shares its step."""

    def __init__(
        self, model: Model, memory: KvMemory, *, window: int, eos_ids: frozenset[TokenId], chunk_tokens: int
    ) -> None:
        self._model = model
        self._memory = memory
        self._window = window
        self._eos_ids = eos_ids
        self._chunk_tokens = chunk_tokens
        self._sampler = Sampler(eos_ids)

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
        logits = self._model.forward(
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
            on_layers,
        )
        rows = [
            SamplingRow(key=chunk.key, spec=chunk.spec, index=1, outputs=())
            if chunk.is_last and chunk.wants_token
            else None
            for chunk in chunks
        ]
        return self._sampled(logits, rows)

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Nothing to compare with: the frames' checksums are the proof."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        logits = self._model.forward(
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
        wanted = [
            SamplingRow(key=row.key, spec=row.spec, index=row.index, outputs=row.outputs) if row.wants_token else None
            for row in rows
        ]
        return self._sampled(logits, wanted)

    def release(self, key: RequestKey) -> None:
        self._sampler.release(key)

    def interrupt(self) -> None:
        """A forward pass cannot be cut short; it ends by itself soon."""

    def _sampled(
        self, logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow | None]
    ) -> list[SampledToken | SequenceFault | None]:
        """A token for each row that wants one, which the logits [rows that want one, vocab] belong to."""
        results = iter(self._sampler.sample_batch(logits, [row for row in rows if row is not None]))
        return [None if row is None else next(results) for row in rows]
