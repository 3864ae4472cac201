"""Logits to tokens, for all rows of a step. The random number of output token i is Philox(key = seed, counter = i)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.domain.errors import ErrorCode
from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.engine.adjustments import LogitAdjustments
from shared.engine.drawing import draw
from shared.engine.executor import SampledToken, SequenceFault
from shared.engine.logprobs import token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """Output token `index` of a sequence is wanted; `outputs` are the tokens before it, and are not kept."""

    key: RequestKey
    spec: RequestSpec
    index: int
    outputs: Sequence[TokenId]


class Sampler:
    """A row's result depends on its own sequence alone, to the last bit: what is shared by the rows of a step is exact
    (comparisons), all arithmetic is done row by row.

    Keeps for a sequence what its penalties need, from its first token on (or its first after a replay) until `release`.
    """

    def __init__(self, eos_ids: Collection[TokenId]) -> None:
        self._eos_ids = eos_ids
        self._adjustments: dict[RequestKey, LogitAdjustments] = {}

    def sample_batch(
        self, logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow]
    ) -> list[SampledToken | SequenceFault]:
        """One token a row from logits [rows, vocab], which are left as they are.

        In this order: logit bias, penalties and `min_tokens` (`LogitAdjustments`), log probabilities, then at
        temperature 0 argmax, ties to the lowest id, else a draw (`drawing.draw`). Logits that are not finite are a
        fault of their row.
        """
        # A value that is no number shows in both; each is one pass that allocates nothing of the logits' size.
        are_finite = np.isfinite(logits.min(axis=1)) & np.isfinite(logits.max(axis=1))
        best_ids = logits.argmax(axis=1)
        results: list[SampledToken | SequenceFault] = []
        for row, its_logits, is_finite, best_id in zip(rows, logits, are_finite, best_ids, strict=True):
            if is_finite:
                results.append(self._sample(row, its_logits, int(best_id)))
            else:
                results.append(SequenceFault(ErrorCode.INTERNAL, "the model gave a value that is no number"))
        return results

    def release(self, key: RequestKey) -> None:
        """Forget what is kept for a sequence; unknown keys are fine."""
        self._adjustments.pop(key, None)

    def _sample(self, row: SamplingRow, logits: npt.NDArray[np.float32], best_id: int) -> SampledToken | SequenceFault:
        params = row.spec.sampling
        if LogitAdjustments.are_needed(params, row.index):
            logits = logits.copy()
            self._adjustments_of(row, len(logits)).apply(logits, row.index, row.outputs)
            best_id = int(logits.argmax())
            if logits[best_id] == -np.inf:
                return SequenceFault(ErrorCode.INVALID_REQUEST, "min_tokens: every token would end the answer")
        token_id = TokenId(best_id) if params.is_greedy else draw(logits, params, row.index)
        if params.top_logprobs is None:
            return SampledToken(token_id=token_id)
        return SampledToken(token_id=token_id, logprobs=token_logprobs(logits, token_id, params.top_logprobs))

    def _adjustments_of(self, row: SamplingRow, vocab_size: int) -> LogitAdjustments:
        known = self._adjustments.get(row.key)
        if known is None:
            known = self._adjustments[row.key] = LogitAdjustments(row.spec, self._eos_ids, vocab_size)
        return known
