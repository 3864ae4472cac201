"""Requests and outcomes are valid by construction."""

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, TokenId
from shared.domain.request import TERMINAL_STATES, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams


def test_a_request_needs_a_prompt_and_room_for_a_token() -> None:
    """An empty prompt or no output is refused before anything is built on it."""
    sampling = SamplingParams(seed=1)

    with pytest.raises(ValueError, match="prompt_ids"):
        RequestSpec(request_id=RequestId("r"), prompt_ids=(), max_tokens=1, sampling=sampling)
    with pytest.raises(ValueError, match="max_tokens"):
        RequestSpec(request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=0, sampling=sampling)


def test_total_tokens_are_prompt_and_output() -> None:
    """What a reservation must hold."""
    spec = RequestSpec(
        request_id=RequestId("r"), prompt_ids=(TokenId(1),) * 5, max_tokens=7, sampling=SamplingParams(seed=1)
    )

    assert (5, 12) == (spec.num_prompt_tokens, spec.max_total_tokens)


@pytest.mark.parametrize("state", [state for state in RequestState if state not in TERMINAL_STATES])
def test_only_an_end_is_an_outcome(state: RequestState) -> None:
    """A live state cannot be told as an outcome."""

    with pytest.raises(ValueError, match="is not an end"):
        Outcome(state=state)


def test_an_outcome_has_an_error_exactly_when_it_is_not_finished() -> None:
    """A finished answer with an error, or a failure without one, cannot be said."""
    error = ServingError(ErrorCode.INTERNAL, "the server failed")

    with pytest.raises(ValueError, match="an error exactly when"):
        Outcome(state=RequestState.FINISHED, error=error)
    with pytest.raises(ValueError, match="an error exactly when"):
        Outcome(state=RequestState.FAILED)
    assert Outcome(state=RequestState.FAILED, error=error).error is error
