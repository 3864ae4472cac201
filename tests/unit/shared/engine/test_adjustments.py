"""Tests of `shared.engine.adjustments`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shared.domain.ids import RequestId, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.adjustments import LogitAdjustments

EOS = TokenId(7)


def _spec(prompt: Sequence[int] = (0,), *, ignore_eos: bool = False, **sampling: Any) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=tuple(map(TokenId, prompt)),
        max_tokens=100,
        sampling=SamplingParams(seed=1, **sampling),
        ignore_eos=ignore_eos,
    )


def _adjusted(
    spec: RequestSpec, outputs: Sequence[int] = (), logits: Sequence[float] = (1, 2, 3, -4, 5, -6, 7, 8)
) -> list[float]:
    """The logits of the token after `outputs`."""
    values = np.array(logits, dtype=np.float32)
    adjustments = LogitAdjustments(spec, {EOS}, len(values))
    adjustments.apply(values, len(outputs) + 1, list(map(TokenId, outputs)))
    return values.tolist()


def test_bias_is_added() -> None:
    """To the named tokens alone; ids beyond the vocabulary mean no token and do no harm."""
    spec = _spec(logit_bias=((TokenId(1), 2.5), (TokenId(3), -100.0), (TokenId(8), 50.0), (TokenId(10**9), 1.0)))

    assert [1, 4.5, 3, -104, 5, -6, 7, 8] == _adjusted(spec)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    """SMP-02: the prompt's tokens 0 and 2 are left alone; 2 once and 4 thrice generated are lowered."""
    spec = _spec((0, 2, 2), presence_penalty=0.5, frequency_penalty=0.25)

    assert [1, 2, 2.25, -4, 3.75, -6, 7, 8] == _adjusted(spec, (4, 2, 4, 4))


def test_the_repetition_penalty_looks_at_prompt_and_output() -> None:
    """SMP-02: from the first token on; positive logits are divided, negative ones multiplied, each token once."""
    spec = _spec((0, 3, 3), repetition_penalty=2.0)

    assert [0.5, 2, 3, -8, 5, -6, 7, 8] == _adjusted(spec)
    assert [0.5, 2, 3, -8, 2.5, -12, 7, 8] == _adjusted(spec, (4, 5, 4, 3))


def test_everything_in_its_order() -> None:
    """Bias first: (5 + 3) / 2 - 0.5 - 2 * 0.25."""
    spec = _spec(logit_bias=((TokenId(4), 3.0),), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)

    assert 3.0 == _adjusted(spec, (4, 4))[4]


@pytest.mark.parametrize(
    ("ignore_eos", "num_outputs", "impossible"),
    [(False, 0, [2, 7]), (False, 1, [2, 7]), (False, 2, []), (True, 1, [2])],
)
def test_end_tokens_wait_for_min_tokens(ignore_eos: bool, num_outputs: int, impossible: list[int]) -> None:
    """Tokens 1 and 2 of two are no end token; an EOS that is ignored ends nothing and stays possible."""
    spec = _spec(min_tokens=2, stop_token_ids=(TokenId(2), TokenId(99)), ignore_eos=ignore_eos)
    values = _adjusted(spec, [0] * num_outputs)

    assert impossible == [token_id for token_id, value in enumerate(values) if value == -np.inf]


def test_counts_follow_the_output_step_by_step() -> None:
    """Told token by token, in pieces (a replay) or all at once, through many distinct tokens: the same logits."""
    rng = np.random.default_rng(3)
    outputs = [TokenId(int(number)) for number in rng.integers(0, 2000, 3000)]
    logits = rng.normal(0, 5, 2000).astype(np.float32)
    spec = _spec(range(700), presence_penalty=1.5, frequency_penalty=0.3, repetition_penalty=1.3)
    followed = LogitAdjustments(spec, {EOS}, 2000)
    for length in (*range(300), 900, 901, 2999):
        ours, fresh = logits.copy(), logits.copy()
        followed.apply(ours, length + 1, outputs[:length])
        if length in (0, 299, 900, 2999):
            LogitAdjustments(spec, {EOS}, 2000).apply(fresh, length + 1, tuple(outputs[:length]))
            assert fresh.tolist() == ours.tolist()


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_a_penalty_leaves_no_infinity(penalty: float) -> None:
    """Any positive number is allowed; the order of the punished and the others stays."""
    values = _adjusted(_spec((0, 3, 5), repetition_penalty=penalty))

    assert np.isfinite(values).all()


def test_needed_only_where_something_changes() -> None:
    """The usual request costs nothing; `min_tokens` only as long as it holds."""
    needed = LogitAdjustments.are_needed

    assert not needed(SamplingParams(seed=1, top_k=5, stop_token_ids=(TokenId(1),)), 1)
    assert needed(SamplingParams(seed=1, logit_bias=((TokenId(1), 1.0),)), 9)
    assert needed(SamplingParams(seed=1, frequency_penalty=-0.1), 1)
    assert [True, True, False] == [needed(SamplingParams(seed=1, min_tokens=2), index) for index in (1, 2, 3)]
