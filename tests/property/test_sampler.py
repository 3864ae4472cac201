"""Oracle (3): the sampler's draws follow the exact distribution. And they do not depend on company, to the last bit."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.drawing import draw
from shared.engine.executor import SampledToken, SequenceFault
from shared.engine.sampler import Sampler, SamplingRow

NUM_DRAWS = 2000
LOGITS = np.array([0.3, -1.2, 2.0, 0.9, 0.9, -3.0, 1.4, 0.0], dtype=np.float32)
PROMPT = (TokenId(2), TokenId(0))
OUTPUTS = [TokenId(token_id) for token_id in (6, 3, 6)]
EOS = TokenId(7)

# Each cut and each change of the logits alone, then together.
ALONE: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"logit_bias": ((TokenId(1), 3.0), (TokenId(2), -1.5))},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.7},
    {"min_tokens": 10, "stop_token_ids": (TokenId(2),)},
]
TOGETHER: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"top_k": 6, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 3, "top_p": 0.99},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.5},
    {"temperature": 1.2, "logit_bias": ((TokenId(5), 4.0),), "min_tokens": 10, "top_k": 5, "frequency_penalty": 1.0},
]


def _bent_logits(params: SamplingParams) -> list[float]:
    """After bias, penalties and `min_tokens`, by plain loops; the end tokens are EOS and the request's own."""
    values = [float(logit) for logit in LOGITS]
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in {*PROMPT, *OUTPUTS}:
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = OUTPUTS.count(token_id)
        values[token_id] -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
    if len(OUTPUTS) < params.min_tokens:
        for token_id in (EOS, *params.stop_token_ids):
            values[token_id] = -math.inf
    return values


def _kept(weights: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that the cuts leave, by plain loops."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    held = 0.0
    for token in order:
        if held >= params.top_p * total:
            break
        kept.append(token)
        held += weights[token]
    return [token for token in kept if weights[token] >= params.min_p * max(weights)]


def _exact(params: SamplingParams) -> list[float]:
    """Probability of each id."""
    weights = [math.exp(value / params.temperature) for value in _bent_logits(params)]
    kept = _kept(weights, params)
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


def _limit(degrees: int) -> float:
    """Chi-square value that chance passes once in 100,000 (Wilson and Hilferty's approximation, z = 4.265)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.265 * math.sqrt(part)) ** 3


def _row(name: str, params: SamplingParams, *, index: int, outputs: Sequence[TokenId] = ()) -> SamplingRow:
    spec = RequestSpec(request_id=RequestId(name), prompt_ids=PROMPT, max_tokens=10**9, sampling=params)
    return SamplingRow(key=RequestKey(RequestId(name), Attempt(1)), spec=spec, index=index, outputs=outputs)


def _tokens(results: Sequence[SampledToken | SequenceFault]) -> list[int]:
    assert all(isinstance(result, SampledToken) for result in results)
    return [int(result.token_id) for result in results if isinstance(result, SampledToken)]


@pytest.mark.parametrize("fields", ALONE + TOGETHER, ids=str)
def test_draws_follow_the_exact_distribution(fields: dict[str, Any]) -> None:
    """Chi-square over 2,000 seeds at one place of an answer, in steps of 40 rows of one kind."""
    probabilities = _exact(SamplingParams(**fields, seed=0))
    counts = [0] * len(LOGITS)
    sampler = Sampler({EOS})
    logits = np.tile(LOGITS, (40, 1))
    for start in range(0, NUM_DRAWS, 40):
        rows = [
            _row(str(seed), SamplingParams(**fields, seed=seed), index=len(OUTPUTS) + 1, outputs=OUTPUTS)
            for seed in range(start, start + 40)
        ]
        for token in _tokens(sampler.sample_batch(logits, rows)):
            counts[token] += 1

    impossible = [count for count, probability in zip(counts, probabilities, strict=True) if probability == 0]
    possible = [(count, p) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    chi_square = sum((count - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for count, p in possible)
    assert 0 == sum(impossible)
    assert chi_square < _limit(len(possible) - 1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 6, 0.9)]
)
def test_draws_along_an_answer_follow_it_too(temperature: float, top_k: int, top_p: float) -> None:
    """One seed, 2,000 places: neighbours in an answer are as independent as seeds are."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=20_260)
    plain = SamplingParams(temperature=temperature, seed=0)
    weights = [math.exp(float(value) / plain.temperature) for value in LOGITS]
    kept = _kept(weights, params)
    counts = [0] * len(LOGITS)
    for index in range(1, NUM_DRAWS + 1):
        counts[draw(LOGITS, params, index)] += 1

    total = sum(weights[token] for token in kept)
    expected = {token: NUM_DRAWS * weights[token] / total for token in kept}
    assert NUM_DRAWS == sum(counts[token] for token in kept)
    assert sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items()) < _limit(len(kept) - 1)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    top_k=st.integers(0, 7),
    top_p=st.sampled_from([1e-9, 0.19, 0.42, 0.61, 0.87, 1.0]),
    min_p=st.sampled_from([0.0, 0.04, 0.3, 0.9, 1.0]),
)
def test_exactly_the_kept_tokens_are_drawn(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    """Small vocabularies full of ties: no token beyond the cuts, and each within them that is likely enough to be seen."""
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=77)
    weights = [math.exp(value / 2.0) for value in values]
    kept = _kept(weights, params)
    total = sum(weights[token] for token in kept)
    drawn = {int(draw(logits, params, index)) for index in range(1, 150)}

    assert drawn <= set(kept)
    assert {token for token in kept if weights[token] / total > 0.25} <= drawn


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 40]),
        "top_p": st.sampled_from([0.3, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([(), ((TokenId(3), 2.5),)]),
        "min_tokens": st.sampled_from([0, 500]),
        "top_logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=40, deadline=None)
@given(crowd=st.lists(PARAMS, min_size=2, max_size=9), data_seed=st.integers(0, 1000), data=st.data())
def test_smp_01_a_row_is_the_same_alone_and_in_any_crowd(
    crowd: list[dict[str, Any]], data_seed: int, data: st.DataObject
) -> None:
    """Token and log probabilities to the last bit, with others of any kind beside it and in any order."""
    rng = np.random.default_rng(data_seed)
    logits = rng.normal(0, 3, (len(crowd), int(rng.integers(50, 1500)))).astype(np.float32)
    rows = [_row(str(place), SamplingParams(**fields), index=4, outputs=OUTPUTS) for place, fields in enumerate(crowd)]
    alone = [
        result
        for place, row in enumerate(rows)
        for result in Sampler({EOS}).sample_batch(logits[place : place + 1], [row])
    ]
    order = data.draw(st.permutations(range(len(rows))))
    together = Sampler({EOS}).sample_batch(logits[list(order)], [rows[place] for place in order])

    assert [alone[place] for place in order] == together


def test_smp_01_a_seeded_answer_beside_others() -> None:
    """24 tokens of seed 7 at temperature 0.9: alone, beside an unseeded, a seeded and eight others, first and last."""
    steps = np.random.default_rng(11).normal(0, 2, (24, 400)).astype(np.float32)

    def answer(seeds: Sequence[int], place: int) -> list[int]:
        sampler = Sampler({EOS})
        outputs: list[list[TokenId]] = [[] for _ in seeds]
        for index, logits in enumerate(steps, start=1):
            rows = [
                _row(str(seed), SamplingParams(temperature=0.9, seed=seed), index=index, outputs=outputs[number])
                for number, seed in enumerate(seeds)
            ]
            matrix = np.stack([logits if seed == 7 else np.roll(logits, seed) for seed in seeds])
            for number, token in enumerate(_tokens(sampler.sample_batch(matrix, rows))):
                outputs[number].append(TokenId(token))
        return [int(token) for token in outputs[place]]

    crowds: list[tuple[list[int], int]] = [
        ([7, 555], 0),
        ([8, 7], 1),
        ([1, 2, 3, 4, 7, 5, 6, 8, 9], 4),
        ([9, 8, 6, 5, 4, 3, 2, 1, 7], 8),
    ]
    assert [answer([7], 0)] * len(crowds) == [answer(seeds, place) for seeds, place in crowds]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=900),
    temperature=st.sampled_from([0.1, 1.0, 2.0]),
    top_k=st.integers(0, 1000),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(1, 1_000_000),
)
def test_any_row_gives_an_allowed_token(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int, index: int
) -> None:
    """The token is in the vocabulary, among the top_k likeliest, and the same when asked again."""
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    token = draw(logits, params, index)

    num_likelier = int((logits > logits[token]).sum())
    assert num_likelier < (1 if top_p == 1e-9 else top_k or len(values))
    assert token == draw(logits.copy(), params, index)
