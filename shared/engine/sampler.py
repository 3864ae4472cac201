"""Logits to a token id. The random number of output token i is Philox(key = seed, counter = i), whatever the batch."""

import numpy as np
import numpy.typing as npt

from shared.domain.errors import ErrorCode
from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams
from shared.engine.executor import SequenceFault

# top_p looks at so many of the likeliest tokens before it sorts all: the first is enough for nearly every step of a
# real model, and 20 times cheaper than sorting a vocabulary of 49,152.
_NUM_LIKELY_TOKENS = (512, 8192)
_DOUBLE_BITS = 53


def sample(logits: npt.NDArray[np.float32], params: SamplingParams, index: int) -> TokenId | SequenceFault:
    """Output token `index` (from 1) given the logits [vocab] of the position before it.

    Temperature 0 is argmax, ties to the lowest id. Else softmax(logits / temperature) in float64, cut to the `top_k`
    likeliest (ties to the lowest ids), renormalised, cut to the fewest likeliest that hold `top_p` of it, and drawn by
    inverse distribution. A row's result depends on its own arguments alone. Logits that are not finite are a fault.
    """
    if not np.isfinite(logits).all():
        return SequenceFault(ErrorCode.INTERNAL, "the model gave a value that is no number")
    if params.is_greedy:
        return TokenId(int(np.argmax(logits)))
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    # Below the smallest double a temperature would divide to infinity: 1e-300 keeps exp() at 0 or 1, as the limit
    # demands.
    scaled /= max(params.temperature, 1e-300)
    weights = np.exp(scaled)
    ids = _kept(weights, params)
    cumulative: npt.NDArray[np.float64] = np.cumsum(weights if ids is None else weights[ids])
    total = float(cumulative[-1])
    place = int(np.searchsorted(cumulative, uniform(params.seed, index) * total, side="right"))
    # Rounding may put the drawn number on the very end: then the last token with any weight is meant.
    place = min(place, int(np.searchsorted(cumulative, total, side="left")))
    return TokenId(place if ids is None else int(ids[place]))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of an output token: top 53 bits of the first word of Philox4x64-10 at counter `index`."""
    # numpy steps its counter before it makes a block, so it starts one below.
    word = int(np.random.Philox(key=seed, counter=index - 1).random_raw())
    return (word >> (64 - _DOUBLE_BITS)) * 2.0**-_DOUBLE_BITS


def _kept(weights: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Ids that may be drawn, likeliest first and ties by id; None for all of them in order of id."""
    num_tokens = len(weights)
    top_k = params.top_k if 0 < params.top_k < num_tokens else num_tokens
    if top_k == num_tokens and params.top_p == 1.0:
        return None
    if top_k < num_tokens:
        ids = _likeliest(weights, top_k)
        return (
            ids if params.top_p == 1.0 else ids[: _num_holding(weights[ids], params.top_p * float(weights[ids].sum()))]
        )
    wanted = params.top_p * float(weights.sum())
    for count in _NUM_LIKELY_TOKENS:
        if count < num_tokens:
            ids = _likeliest(weights, count)
            if (num_kept := _num_holding(weights[ids], wanted)) <= count:
                return ids[:num_kept]
    ids = _likeliest(weights, num_tokens)
    return ids[: _num_holding(weights[ids], wanted)]


def _num_holding(falling: npt.NDArray[np.float64], wanted: float) -> int:
    """How many of the first weights are needed to hold `wanted`; one more than there are when all are not enough."""
    return int(np.searchsorted(np.cumsum(falling), wanted, side="left")) + 1


def _likeliest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Exactly `count` ids by falling weight, ties by rising id."""
    if count == len(weights):
        return np.argsort(-weights, kind="stable")
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > threshold)
    ties = np.flatnonzero(weights == threshold)[: count - len(above)]
    ids = np.concatenate((above, ties))
    return ids[np.lexsort((ids, -weights[ids]))]
