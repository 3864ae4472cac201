"""Tests of `shared.engine.logprobs`."""

import math

import numpy as np
import pytest

from shared.domain.ids import TokenId
from shared.engine.logprobs import token_logprobs

LOGITS = np.log(np.array([1, 4, 3, 4, 8], dtype=np.float32)) + np.float32(5)
PROBABILITIES = [0.05, 0.2, 0.15, 0.2, 0.4]


@pytest.mark.parametrize("token_id", range(5))
def test_the_chosen_token_has_its_own(token_id: int) -> None:
    """Natural logarithm of softmax, whether or not it is among the likeliest."""
    logprobs = token_logprobs(LOGITS, TokenId(token_id), 1)

    assert math.log(PROBABILITIES[token_id]) == pytest.approx(logprobs.logprob, abs=1e-6)


@pytest.mark.parametrize(("num_top", "expected"), [(0, []), (1, [4]), (2, [4, 1]), (4, [4, 1, 3, 2])])
def test_the_likeliest_are_listed(num_top: int, expected: list[int]) -> None:
    """Likeliest first, ties by rising id, each with its own."""
    top = token_logprobs(LOGITS, TokenId(0), num_top).top

    assert expected == [token_id for token_id, _ in top]
    assert [math.log(PROBABILITIES[token_id]) for token_id in expected] == pytest.approx(
        [logprob for _, logprob in top], abs=1e-6
    )


def test_they_add_up_to_one() -> None:
    """All tokens of a large vocabulary, whatever the size of its logits."""
    logits = np.random.default_rng(2).normal(300, 9, 40_000).astype(np.float32)
    top = token_logprobs(logits, TokenId(0), 40_000).top

    assert 1.0 == pytest.approx(sum(math.exp(logprob) for _, logprob in top), abs=1e-6)


def test_impossible_tokens_are_not_listed() -> None:
    """JSON has no minus infinity, and nobody could choose them."""
    logits = np.array([1, -np.inf, 1], dtype=np.float32)
    logprobs = token_logprobs(logits, TokenId(0), 3)

    assert [0, 2] == [token_id for token_id, _ in logprobs.top]
    assert math.log(0.5) == pytest.approx(logprobs.logprob, abs=1e-6)
