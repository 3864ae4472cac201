"""What a request asks to be done to its logits before a token is chosen: bias, penalties, end tokens put off."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from shared.domain.ids import TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams

_FIRST_PLACES = 256  # doubled as distinct tokens come: at most twice what the sequence needs
# A penalty near 0 would divide a logit out of float32's range, and infinities have no difference.
_LARGEST_LOGIT = 3e38


class LogitAdjustments:
    """Of one sequence, whose output it follows: a step costs the new tokens and one pass over the distinct ones."""

    def __init__(self, spec: RequestSpec, eos_ids: Collection[TokenId], vocab_size: int) -> None:
        """Ids beyond the vocabulary are left out: no token has them."""
        sampling = spec.sampling
        biases = [(token_id, bias) for token_id, bias in sampling.logit_bias if token_id < vocab_size]
        self._sampling = sampling
        self._bias_ids = np.array([token_id for token_id, _ in biases], dtype=np.int64)
        self._biases = np.array([bias for _, bias in biases], dtype=np.float64)
        ends = {*sampling.stop_token_ids, *(() if spec.ignore_eos else eos_ids)}
        self._end_ids = np.array(sorted(token_id for token_id in ends if token_id < vocab_size), dtype=np.int64)
        self._counts = _TokenCounts(spec.prompt_ids) if sampling.has_penalties else None

    @staticmethod
    def are_needed(sampling: SamplingParams, index: int) -> bool:
        """Whether anything changes the logits of output token `index`."""
        return bool(sampling.logit_bias) or sampling.has_penalties or index <= sampling.min_tokens

    def apply(self, logits: npt.NDArray[np.float32], index: int, outputs: Sequence[TokenId]) -> None:
        """Change the logits [vocab] of output token `index` in place; `outputs` are the tokens before it.

        Added bias first; then the repetition penalty (positive logits of prompt and output tokens are divided by it,
        negative ones multiplied); then presence and frequency x count are taken from output tokens; the tokens that
        would end the answer become impossible up to token `min_tokens`. Each logit is computed in float64 and rounded
        once a kind.
        """
        if len(self._bias_ids):
            logits[self._bias_ids] = logits[self._bias_ids] + self._biases
        if self._counts is not None:
            self._counts.follow(outputs)
            ids, counts = self._counts.ids, self._counts.counts
            values = logits[ids].astype(np.float64)
            penalty = self._sampling.repetition_penalty
            with np.errstate(over="ignore"):
                values = np.where(values > 0.0, values / penalty, values * penalty)
            values -= self._sampling.frequency_penalty * counts + self._sampling.presence_penalty * (counts > 0)
            logits[ids] = np.clip(values, -_LARGEST_LOGIT, _LARGEST_LOGIT)
        if index <= self._sampling.min_tokens:
            logits[self._end_ids] = -np.inf


class _TokenCounts:
    """The distinct tokens of prompt and output, and how often each is in the output."""

    def __init__(self, prompt_ids: Sequence[TokenId]) -> None:
        self._places: dict[TokenId, int] = {}
        self._ids = np.zeros(_FIRST_PLACES, dtype=np.int64)
        self._counts = np.zeros(_FIRST_PLACES, dtype=np.int64)
        self._num_followed = 0
        for token_id in prompt_ids:
            self._place(token_id)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[distinct tokens], in order of first appearance."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[distinct tokens], output only."""
        return self._counts[: len(self._places)]

    def follow(self, outputs: Sequence[TokenId]) -> None:
        """Count what has come since the last call; the outputs of one sequence only grow."""
        for token_id in outputs[self._num_followed :]:
            place = self._place(token_id)
            self._counts[place] += 1
        self._num_followed = len(outputs)

    def _place(self, token_id: TokenId) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
        return place
