"""One token drawn from its logits: temperature, cuts, and the random number of its place in the answer."""

import numpy as np
import numpy.typing as npt

from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams

# top_p looks at so many of the likeliest tokens before it sorts all: the first is enough for nearly every step of a
# real model, and 20 times cheaper than sorting a vocabulary of 49,152.
_NUM_LIKELY_TOKENS = (512, 8192)
_DOUBLE_BITS = 53
# Dividing by less would leave float32's range; two logits that a model can tell apart are further apart than this.
_LOWEST_TEMPERATURE = 1e-30
_SUM_TOKENS = 256  # weights are summed in groups: 10 times faster than one running sum over a vocabulary


def draw(logits: npt.NDArray[np.float32], params: SamplingParams, index: int) -> TokenId:
    """Output token `index` (from 1), given its logits [vocab]: finite or -inf, at least one finite.

    softmax(logits / temperature), cut to the `top_k` likeliest (ties to the lowest ids), renormalised, cut to the
    fewest likeliest that hold `top_p` of it, cut to those with at least `min_p` times the likeliest's probability, and
    drawn by inverse distribution. Weights are float32, closer to the truth than the logits' own rounding is; their
    sums are float64.
    """
    ids, weights = _kept(logits, params)
    place = _place(weights, uniform(params.seed, index))
    return TokenId(place if ids is None else int(ids[place]))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of an output token: top 53 bits of the first word of Philox4x64-10 at counter `index`."""
    # numpy steps its counter before it makes a block, so it starts one below.
    word = int(np.random.Philox(key=seed, counter=index - 1).random_raw())
    return (word >> (64 - _DOUBLE_BITS)) * 2.0**-_DOUBLE_BITS


def likeliest(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Exactly `count` ids, or all of fewer, by falling logit, ties by rising id."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    if count < len(logits):
        border = len(logits) - count
        ids = np.flatnonzero(logits >= np.partition(logits, border)[border])
    else:
        ids = np.arange(len(logits))
    return _by_falling_logit(logits, ids)[:count]


def _by_falling_logit(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`ids` in order; ties by rising id.

    Sorts whole numbers, five times faster than a stable sort of floats: the upper half has a float's bits, turned so
    that they rise as the float falls, the lower half the id.
    """
    bits = (logits[ids] + np.float32(0.0)).view(np.uint32)  # the sum makes -0 the 0 that it equals
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = np.sort(falling.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64))
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _weights(logits: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float32]:
    """Proportional to the probabilities, the likeliest's exactly 1."""
    with np.errstate(over="ignore", under="ignore"):  # minus infinity is what is meant, and exp makes 0 of it
        weights = logits - logits.max()
        np.divide(weights, np.float32(max(temperature, _LOWEST_TEMPERATURE)), out=weights)
        return np.exp(weights, out=weights)


def _kept(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32]]:
    """Ids that may be drawn, None for all of them, and the weight of each.

    Likeliest first after top_k or top_p, else in order of id.
    """
    ids = likeliest(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    weights = _weights(logits if ids is None else logits[ids], params.temperature)
    if params.top_p < 1.0:
        if ids is None:
            ids = _nucleus(logits, weights, params.top_p)
            weights = weights[ids]
        else:
            num_kept = _num_holding(weights, params.top_p * float(weights.sum(dtype=np.float64)))
            ids, weights = ids[:num_kept], weights[:num_kept]
    if params.min_p > 0.0:
        places = np.flatnonzero(weights >= params.min_p)
        ids, weights = places if ids is None else ids[places], weights[places]
    return ids, weights


def _nucleus(logits: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.int64]:
    """The fewest likeliest ids that hold `top_p` of all the weight."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for count in _NUM_LIKELY_TOKENS:
        if count < len(logits):
            ids = likeliest(logits, count)
            if (num_kept := _num_holding(weights[ids], wanted)) <= count:
                return ids[:num_kept]
    ids = likeliest(logits, len(logits))
    return ids[: _num_holding(weights[ids], wanted)]


def _num_holding(falling: npt.NDArray[np.float32], wanted: float) -> int:
    """How many of the first weights are needed to hold `wanted`; one more than there are when all are not enough."""
    return int(np.searchsorted(np.cumsum(falling, dtype=np.float64), wanted, side="left")) + 1


def _place(weights: npt.NDArray[np.float32], share: float) -> int:
    """Where the running sum of the weights passes `share` of their total; never a place without weight."""
    num_whole = len(weights) // _SUM_TOKENS
    whole = weights[: num_whole * _SUM_TOKENS].reshape(num_whole, _SUM_TOKENS)
    rest = weights[num_whole * _SUM_TOKENS :]
    sums = np.append(whole.sum(axis=1, dtype=np.float64), rest.sum(dtype=np.float64))
    ends = np.cumsum(sums)
    wanted = share * float(ends[-1])
    group = _passed(ends, wanted)
    before = float(ends[group - 1]) if group else 0.0
    start = group * _SUM_TOKENS
    inner: npt.NDArray[np.float64] = np.cumsum(weights[start : start + _SUM_TOKENS], dtype=np.float64)
    return start + _passed(inner, wanted - before)


def _passed(ends: npt.NDArray[np.float64], wanted: float) -> int:
    """The first place whose running sum is above `wanted`.

    Rounding may put the wanted on the very end: then the last place with any weight is meant.
    """
    last = int(np.searchsorted(ends, float(ends[-1]), side="left"))
    return min(int(np.searchsorted(ends, wanted, side="right")), last)
