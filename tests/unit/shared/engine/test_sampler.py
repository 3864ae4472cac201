"""Tests of `shared.engine.sampler`."""

import numpy as np
import numpy.typing as npt
import pytest

from shared.domain.errors import ErrorCode
from shared.domain.sampling import SamplingParams
from shared.engine.executor import SequenceFault
from shared.engine.sampler import sample, uniform

MASK = (1 << 64) - 1


def _philox4x64(counter: int, key: int) -> list[int]:
    """Philox4x64-10 as Salmon, Moraes, Dror and Shaw (2011) define it."""
    words = [(counter >> (64 * place)) & MASK for place in range(4)]
    key_0, key_1 = key, 0
    for _ in range(10):
        product_0, product_1 = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (product_1 >> 64) ^ words[1] ^ key_0,
            product_1 & MASK,
            (product_0 >> 64) ^ words[3] ^ key_1,
            product_0 & MASK,
        ]
        key_0, key_1 = (key_0 + 0x9E3779B97F4A7C15) & MASK, (key_1 + 0xBB67AE8584CAA73B) & MASK
    return words


def _logits(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def test_the_reference_is_philox() -> None:
    """The known answer of the authors' own test vectors for counter 0 and key 0."""
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]

    assert expected == _philox4x64(0, 0)


@pytest.mark.parametrize(("seed", "index"), [(0, 1), (7, 1), (7, 2), (MASK, 1_000_000), (1 << 63, 12345)])
def test_uniform_is_philox_at_key_and_counter(seed: int, index: int) -> None:
    """The first word's top 53 bits, at counter = index and key = seed."""
    assert (_philox4x64(index, seed)[0] >> 11) / 2**53 == uniform(seed, index)


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 is argmax; seed and index do not matter."""
    logits = _logits(1, 5, 5, 4)

    assert {1} == {sample(logits, SamplingParams(temperature=0, seed=seed), seed + 1) for seed in range(20)}


def test_the_logits_are_left_as_they_were() -> None:
    """The caller's array is not scratch space."""
    logits = _logits(1, 5, 2)
    sample(logits, SamplingParams(seed=1), 1)

    assert [1, 5, 2] == logits.tolist()


@pytest.mark.parametrize("top_k", [1, 2])
def test_top_k_keeps_exactly_k(top_k: int) -> None:
    """Ties at the border go to the lowest ids."""
    logits = _logits(0, 3, 3, 3, 1)
    drawn = {sample(logits, SamplingParams(top_k=top_k, seed=9), index) for index in range(1, 200)}

    assert set(range(1, 1 + top_k)) == drawn


def test_top_p_keeps_the_fewest_that_hold_it() -> None:
    """Weights 5, 3, 2 of 10: 0.5 is held by one, 0.51 needs two, 0.81 all three."""
    logits = np.log(np.array([2, 5, 3], dtype=np.float32))
    drawn = {
        top_p: {sample(logits, SamplingParams(top_p=top_p, seed=4), index) for index in range(1, 200)}
        for top_p in (0.49, 0.51, 0.81)
    }

    assert {0.49: {1}, 0.51: {1, 2}, 0.81: {0, 1, 2}} == drawn


def test_top_p_counts_within_top_k() -> None:
    """Weights 5, 3, 2; of the likeliest two, 0.6 is held by the first alone (5 of 8)."""
    logits = np.log(np.array([2, 5, 3], dtype=np.float32))
    drawn = {sample(logits, SamplingParams(top_p=0.6, top_k=2, seed=4), index) for index in range(1, 200)}

    assert {1} == drawn


@pytest.mark.parametrize("num_tokens", [2_000, 10_000])
def test_a_wide_nucleus_is_exact(num_tokens: int) -> None:
    """Equal tokens, 0.9 of them wanted: more than a first look takes, so the lowest 90 % of the ids and no other."""
    logits = np.zeros(num_tokens, dtype=np.float32)
    drawn = [sample(logits, SamplingParams(top_p=0.9, seed=4), index) for index in range(1, 200)]
    highest = max(token for token in drawn if not isinstance(token, SequenceFault))

    assert 0.85 * num_tokens <= highest < 0.9 * num_tokens


@pytest.mark.parametrize("temperature", [5e-324, 1e-10, 2.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    """No overflow, no division by nothing: near 0 it is argmax, at 2 it is some token."""
    logits = _logits(-80, 60, 20)
    drawn = {sample(logits, SamplingParams(temperature=temperature, seed=3), index) for index in range(1, 50)}

    assert {1} == drawn


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_a_fault(bad: float) -> None:
    """A broken row fails its own sequence, greedy or not."""
    for temperature in (0.0, 1.0):
        result = sample(_logits(1, bad), SamplingParams(temperature=temperature, seed=3), 1)
        assert isinstance(result, SequenceFault)
        assert ErrorCode.INTERNAL is result.code
