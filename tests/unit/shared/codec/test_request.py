"""Requests and outcomes survive the wire; what the wire cannot mean is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.request import (
    cancel_reason_from_wire,
    finish_reason_from_wire,
    finish_reason_to_wire,
    key_from_wire,
    key_to_wire,
    outcome_from_wire,
    outcome_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import MAX_SEED, SamplingParams
from shared.wire import common_pb2, scheduler_pb2

specs = st.builds(
    RequestSpec,
    request_id=st.text(min_size=1, max_size=26).map(RequestId),
    prompt_ids=st.lists(st.integers(0, 2**32 - 1).map(TokenId), min_size=1, max_size=50).map(tuple),
    max_tokens=st.integers(1, 2**32 - 1),
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**32 - 1),
        seed=st.integers(0, MAX_SEED),
    ),
    ignore_eos=st.booleans(),
    has_stop_strings=st.booleans(),
    kv_salt=st.integers(0, 2**64 - 1),
)


@given(specs)
def test_a_spec_survives_the_wire(spec: RequestSpec) -> None:
    """Every field comes back as it went."""
    wire = common_pb2.RequestSpec.FromString(spec_to_wire(spec).SerializeToString())

    assert spec == spec_from_wire(wire)


def test_a_spec_that_cannot_be_is_refused() -> None:
    """A peer's message without a prompt is INVALID_REQUEST, not a crash."""

    with pytest.raises(ServingError) as caught:
        spec_from_wire(common_pb2.RequestSpec(request_id="r", max_tokens=1))

    assert ErrorCode.INVALID_REQUEST is caught.value.code


def test_a_key_survives_the_wire() -> None:
    """Request and attempt come back as they went."""
    key = RequestKey(RequestId("r"), Attempt(3))

    assert key == key_from_wire(key_to_wire(key))


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_finish_reason_survives_the_wire(reason: FinishReason | None) -> None:
    """None is the unspecified zero."""

    assert reason is finish_reason_from_wire(finish_reason_to_wire(reason))


@pytest.mark.parametrize("reason", CancelReason)
def test_a_cancel_reason_survives_the_wire(reason: CancelReason) -> None:
    """One that nobody here knows is the default."""

    assert reason is cancel_reason_from_wire(reason.value, CancelReason.DELETE)
    assert reason is cancel_reason_from_wire("a reason of tomorrow", reason)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.LENGTH, blocks_freed=3),
        Outcome(state=RequestState.CANCELLED, error=ServingError(ErrorCode.CANCELLED, "disconnect")),
        Outcome(state=RequestState.FAILED, error=ServingError(ErrorCode.WORKER_LOST, "the decode worker was lost")),
    ],
)
def test_an_outcome_survives_the_wire(outcome: Outcome) -> None:
    """Kind, reason, error and the freed blocks come back as they went."""
    wire = scheduler_pb2.Outcome.FromString(outcome_to_wire(outcome).SerializeToString())

    assert outcome == outcome_from_wire(wire)


def test_an_outcome_without_a_kind_is_refused() -> None:
    """The zero of the enum means nothing."""

    with pytest.raises(ServingError, match="without a kind"):
        outcome_from_wire(scheduler_pb2.Outcome())
