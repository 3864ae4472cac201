"""Tests of `shared.engine.drawing`: the random numbers, and exactly which tokens a draw may give."""

import numpy as np
import numpy.typing as npt
import pytest

from shared.domain.sampling import SamplingParams
from shared.engine.drawing import draw, likeliest, uniform

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


def _weighing(*weights: float) -> npt.NDArray[np.float32]:
    """Logits of tokens with these probabilities, up to a factor."""
    return np.log(np.array(weights, dtype=np.float32))


def _drawn(logits: npt.NDArray[np.float32], params: SamplingParams, num_draws: int = 300) -> set[int]:
    """All that comes in so many places of one answer."""
    return {int(draw(logits, params, index)) for index in range(1, num_draws)}


def test_the_reference_is_philox() -> None:
    """The known answer of the authors' own test vectors for counter 0 and key 0."""
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]

    assert expected == _philox4x64(0, 0)


@pytest.mark.parametrize(("seed", "index"), [(0, 1), (7, 1), (7, 2), (MASK, 1_000_000), (1 << 63, 12345)])
def test_uniform_is_philox_at_key_and_counter(seed: int, index: int) -> None:
    """The first word's top 53 bits, at counter = index and key = seed."""
    assert (_philox4x64(index, seed)[0] >> 11) / 2**53 == uniform(seed, index)


def test_a_draw_is_the_inverse_of_the_distribution() -> None:
    """The token whose share of the line from 0 to 1, in order of id, holds the random number."""
    weights = [0.1, 0.4, 0.2, 0.3]
    ends = np.cumsum(weights)
    expected = [int(np.searchsorted(ends, uniform(5, index), side="right")) for index in range(1, 500)]

    assert expected == [draw(_weighing(*weights), SamplingParams(seed=5), index) for index in range(1, 500)]


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 1000, 49_152])
def test_sums_in_groups_are_sums(num_tokens: int) -> None:
    """Equal tokens, also around whole groups: the token is the random number's share of the vocabulary."""
    logits = np.zeros(num_tokens, dtype=np.float32)
    drawn = [draw(logits, SamplingParams(seed=3), index) for index in range(1, 200)]

    assert [int(uniform(3, index) * num_tokens) for index in range(1, 200)] == drawn


def test_tokens_without_weight_are_never_drawn() -> None:
    """Minus infinity is no chance, at either end of the vocabulary and in whole groups of it."""
    logits = np.full(2000, -np.inf, dtype=np.float32)
    logits[[700, 1500]] = 3.0

    assert {700, 1500} == _drawn(logits, SamplingParams(seed=8))


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, []), (1, [1]), (3, [1, 3, 0]), (4, [1, 3, 0, 4]), (5, [1, 3, 0, 4, 2]), (9, [1, 3, 0, 4, 2])],
)
def test_the_likeliest_come_first_and_ties_by_id(count: int, expected: list[int]) -> None:
    """Exactly so many, whichever of equals lie at the border; 0 and -0 are equal."""
    assert expected == likeliest(_logits(0.0, 7.5, -3.0, 7.5, -0.0), count).tolist()


def test_the_likeliest_are_those_of_a_stable_sort() -> None:
    """Many values of both signs, many of them equal, infinities among them."""
    values = np.random.default_rng(1).integers(-50, 50, 5000).astype(np.float32) / np.float32(8)
    values[::97] = -np.inf
    expected = np.argsort(-values, kind="stable")

    assert [expected[:count].tolist() for count in (1, 40, 3000, 5000)] == [
        likeliest(values, count).tolist() for count in (1, 40, 3000, 5000)
    ]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_top_k_keeps_exactly_k(top_k: int) -> None:
    """Ties at the border go to the lowest ids."""
    assert set(range(1, 1 + top_k)) == _drawn(_logits(0, 3, 3, 3, 1), SamplingParams(top_k=top_k, seed=9))


@pytest.mark.parametrize(("top_p", "expected"), [(0.49, {1}), (0.51, {1, 2}), (0.79, {1, 2}), (0.81, {0, 1, 2})])
def test_top_p_keeps_the_fewest_that_hold_it(top_p: float, expected: set[int]) -> None:
    """Weights 5, 3, 2 of 10: 0.5 is held by one, 0.8 by two."""
    assert expected == _drawn(_weighing(2, 5, 3), SamplingParams(top_p=top_p, seed=4))


@pytest.mark.parametrize(("top_p", "expected"), [(0.25, {0}), (0.5, {0, 1}), (0.6, {0, 1, 2}), (0.75, {0, 1, 2})])
def test_top_p_takes_the_lowest_of_equals(top_p: float, expected: set[int]) -> None:
    """Four equal tokens: exactly held is held, and ties go to the lowest ids."""
    assert expected == _drawn(_logits(1, 1, 1, 1), SamplingParams(top_p=top_p, seed=4))


def test_top_p_counts_within_top_k() -> None:
    """Weights 5, 3, 2; of the likeliest two, 0.6 is held by the first alone (5 of 8)."""
    assert {1} == _drawn(_weighing(2, 5, 3), SamplingParams(top_p=0.6, top_k=2, seed=4))


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.19, {0, 1, 2, 3}), (0.21, {1, 2, 3}), (0.59, {1, 2, 3}), (0.61, {1, 3}), (1.0, {1, 3})]
)
def test_min_p_keeps_what_is_near_the_likeliest(min_p: float, expected: set[int]) -> None:
    """Weights 1, 5, 3, 5: relative to the likeliest 0.2, 1, 0.6, 1; equals of the likeliest always stay."""
    assert expected == _drawn(_weighing(1, 5, 3, 5), SamplingParams(min_p=min_p, seed=4))


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({"top_k": 3, "min_p": 0.7}, {1, 3}),
        ({"top_k": 1, "min_p": 0.1}, {1}),
        ({"top_p": 0.9, "min_p": 0.1}, {1, 2, 3}),
        ({"top_p": 0.3, "min_p": 0.1}, {1}),
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.1}, {1, 3}),
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.7}, {1, 3}),
    ],
)
def test_cuts_together(cuts: dict[str, float], expected: set[int]) -> None:
    """Weights 1, 5, 3, 5 of 14: a token stays where each cut in turn leaves it."""
    assert expected == _drawn(_weighing(1, 5, 3, 5), SamplingParams(seed=4, **cuts))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_tokens", [2_000, 10_000])
def test_a_wide_nucleus_is_exact(num_tokens: int) -> None:
    """Equal tokens, 0.9 of them wanted: more than a first look takes, so the lowest 90 % of the ids and no other."""
    highest = max(_drawn(np.zeros(num_tokens, dtype=np.float32), SamplingParams(top_p=0.9, seed=4)))

    assert 0.85 * num_tokens <= highest < 0.9 * num_tokens


@pytest.mark.parametrize("temperature", [5e-324, 1e-10, 2.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    """No overflow, no division by nothing: near 0 it is argmax, at 2 it is some token."""
    assert {1} == _drawn(_logits(-80, 60, 20), SamplingParams(temperature=temperature, seed=3))


def test_extreme_logits_give_a_token() -> None:
    """Differences beyond float32's range are no chance at all."""
    assert {2} == _drawn(_logits(-3e38, 1, 3e38), SamplingParams(temperature=0.5, seed=3))
