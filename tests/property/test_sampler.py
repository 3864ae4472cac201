"""The sampler's draws follow the exact distribution, and do not depend on company."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.sampling import SamplingParams
from shared.engine.executor import SequenceFault
from shared.engine.sampler import sample

NUM_DRAWS = 4000
LOGITS = np.array([0.3, -1.2, 2.0, 0.9, 0.9, -3.0, 1.4, 0.0], dtype=np.float32)


def _exact(params: SamplingParams) -> list[float]:
    """Probability of each id, by plain loops."""
    weights = [math.exp(float(logit) / params.temperature) for logit in LOGITS]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    held = 0.0
    for token in order:
        kept.append(token)
        held += weights[token] / total
        if held >= params.top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


def _limit(degrees: int) -> float:
    """Chi-square value that chance passes once in 100,000 (Wilson and Hilferty's approximation, z = 4.265)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.265 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("by_index", [True, False], ids=["one seed, many positions", "one position, many seeds"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 6, 0.9), (2.0, 3, 0.99)]
)
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, by_index: bool) -> None:
    """Chi-square over 4,000 draws, along the positions of one answer and across seeds at one position."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=20_260)
    probabilities = _exact(params)
    counts = [0] * len(LOGITS)
    for number in range(1, NUM_DRAWS + 1):
        if by_index:
            token = sample(LOGITS, params, number)
        else:
            token = sample(LOGITS, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=number), 17)
        assert not isinstance(token, SequenceFault)
        counts[token] += 1

    impossible = [count for count, probability in zip(counts, probabilities, strict=True) if probability == 0]
    possible = [(count, p) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    chi_square = sum((count - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for count, p in possible)
    assert 0 == sum(impossible)
    assert chi_square < _limit(len(possible) - 1)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=900),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 2.0]),
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
    token = sample(logits, params, index)

    assert not isinstance(token, SequenceFault)
    num_likelier = int((logits > logits[token]).sum())
    assert num_likelier < (1 if temperature == 0.0 or top_p == 1e-9 else top_k or len(values))
    assert token == sample(logits.copy(), params, index)
