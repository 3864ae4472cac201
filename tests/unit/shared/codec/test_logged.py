"""What is logged is what is read."""

from shared.codec.logged import (
    outcome_from_bytes,
    outcome_to_bytes,
    spec_from_bytes,
    spec_to_bytes,
    tokens_from_bytes,
    tokens_to_bytes,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, TokenId
from shared.domain.logged import LoggedTokens
from shared.domain.request import FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams, TokenLogprobs


def test_tokens_with_and_without_log_probabilities() -> None:
    """Number, attempt and what was cached come along."""
    plain = LoggedTokens(first_index=3, ids=(TokenId(1), TokenId(2**32 - 1)), attempt=Attempt(2), cached_tokens=16)
    logprob = TokenLogprobs(logprob=-0.5, top=((TokenId(1), -0.25),))
    rich = LoggedTokens(first_index=1, ids=(TokenId(1),), logprobs=(logprob,), attempt=Attempt(1))
    for tokens in (plain, rich):
        assert tokens == tokens_from_bytes(tokens_to_bytes(tokens))
    assert (4, 1) == (plain.last_index, rich.last_index)


def test_question_and_end() -> None:
    """Both kinds of end."""
    spec = RequestSpec(
        request_id=RequestId("r"), prompt_ids=(TokenId(5),), max_tokens=2, sampling=SamplingParams(seed=2**64 - 1)
    )
    assert spec == spec_from_bytes(spec_to_bytes(spec))
    ends = (
        Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.LENGTH),
        Outcome(state=RequestState.FAILED, error=ServingError(ErrorCode.KV_CORRUPT, "bad")),
    )
    assert ends == tuple(outcome_from_bytes(outcome_to_bytes(end)) for end in ends)
