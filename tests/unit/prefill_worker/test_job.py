"""A job of the prefill worker: what follows from its state."""

import pytest

from prefill_worker.job import Moments, PrefillJob
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.request import RequestSpec, SequenceState
from shared.domain.sampling import SamplingParams
from shared.domain.worker import KvTarget


@pytest.fixture
def job() -> PrefillJob:
    """Ten prompt tokens, received at 100 s."""
    spec = RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=tuple(TokenId(token) for token in range(10)),
        max_tokens=5,
        sampling=SamplingParams(seed=1),
    )
    target = KvTarget(
        worker_id=WorkerId("decode-0"),
        address="host:1",
        incarnation=Incarnation(1),
        transfer_id=TransferId(1),
        transports=("grpc",),
    )
    return PrefillJob(
        key=RequestKey(spec.request_id, Attempt(1)),
        spec=spec,
        epoch=Epoch(1),
        target=target,
        moments=Moments(received_at=100.0),
    )


def test_settled_means_over_and_untouched(job: PrefillJob) -> None:
    """Neither the engine nor the copy thread may have the blocks."""
    job.is_over = job.is_in_engine = True
    job.num_reads = 1
    seen = [job.is_settled]
    job.is_in_engine = False
    seen.append(job.is_settled)
    job.num_reads = 0
    seen.append(job.is_settled)

    assert seen == [False, False, True]
    assert job.sequence_state is SequenceState.DONE
    assert job.remaining_tokens == 0


def test_phases_are_measured_as_far_as_they_were_reached(job: PrefillJob) -> None:
    """Waiting for blocks, computing, and what sending took beyond the last step."""
    assert job.phases_ms() == {}
    job.moments.started_at = 100.5
    job.moments.computed_at = 101.5
    assert job.phases_ms() == {"queue_ms": 500, "compute_ms": 1000}
    job.moments.acknowledged_at = 101.75
    job.moments.ended_at = 102.0

    assert job.phases_ms() == {"queue_ms": 500, "compute_ms": 1000, "transfer_exposed_ms": 250, "total_ms": 2000}
