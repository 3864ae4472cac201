"""What is told of rows, in each state."""

import pytest

from decode_worker import reports
from decode_worker.outbox import Outbox
from decode_worker.reservations import Reservation
from decode_worker.sequence import HeldSequence, Stage, hold
from shared.codec.request import finish_reason_from_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, BlockId, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import SampledToken
from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")


@pytest.fixture
def row() -> HeldSequence:
    """A continued answer: four prompt tokens, all of them found here, two delivered."""
    spec = RequestSpec(
        request_id=RequestId("r"), prompt_ids=(TokenId(7),) * 4, max_tokens=9, sampling=SamplingParams(seed=1)
    )
    granted = Reservation(
        key=RequestKey(spec.request_id, Attempt(3)),
        transfer_id=TransferId(6),
        attach_ticket=b"ticket",
        blocks=(BlockId(8), BlockId(3)),
        num_shared=1,
        last_sign_at=1.0,
    )
    delivered = (TokenId(50), TokenId(51))
    return hold(
        spec,
        granted,
        delivered=delivered,
        epoch=Epoch(1),
        layout=LAYOUT,
        incarnation=Incarnation(9),
        outbox=Outbox(capacity=2, num_delivered=len(delivered)),
        now=1.0,
    )


def test_inventory_names_what_is_held_and_what_has_ended(row: HeldSequence) -> None:
    """A continued answer has the index of its last delivered token before it makes one."""
    told = reports.inventory([row], [RequestKey(RequestId("gone"), Attempt(1))])

    assert [(entry.key.request_id, entry.sequence_state, entry.last_index) for entry in told.entries] == [
        ("r", "waiting_kv", 2),
        ("gone", "done", 0),
    ]
    assert told.entries[0].attach_ticket == b"ticket"


def test_an_end_that_was_told_is_told_again(row: HeldSequence) -> None:
    """With the length of the answer: a new scheduler has not heard the event. Before it was told nothing is said of it."""
    row.take(3, SampledToken(token_id=TokenId(52)), FinishReason.LENGTH)
    row.stage = Stage.ENDED
    (before,) = reports.inventory([row], ()).entries
    row.is_done_reported = True
    (after,) = reports.inventory([row], ()).entries

    assert [("done", None), ("done", FinishReason.LENGTH)] == [
        (entry.sequence_state, finish_reason_from_wire(entry.finish_reason)) for entry in (before, after)
    ]
    assert 3 == after.last_index


@pytest.mark.parametrize("state", ["waiting_kv", "running", "parked", "preempted", "done"])
def test_every_state_is_counted(row: HeldSequence, state: str) -> None:
    """Parked is a running one whose outbox is full, by the credit that the engine has."""
    if state in ("running", "parked"):
        row.stage = Stage.RUNNING
        row.granted_upto = 4
    if state == "parked":
        for index in (3, 4):
            row.take(index, SampledToken(token_id=TokenId(52)), None)
    if state in ("preempted", "done"):
        row.stage = Stage.ENDED
    row.is_preempted = state == "preempted"

    assert {name: count for name, count in reports.sequence_counts([row]).items() if count} == {state: 1}
    assert set(reports.sequence_counts([])) == {"waiting_kv", "running", "parked", "preempted", "done"}


@pytest.mark.parametrize("outcome", ["finished", "failed", "preempted", "aborted"])
def test_the_end_is_told_without_content(row: HeldSequence, outcome: str) -> None:
    """Counts, ids of request and attempt, and how it ended."""
    match outcome:
        case "finished":
            row.take(3, SampledToken(token_id=TokenId(52)), FinishReason.LENGTH)
            row.is_done_reported = True
        case "failed":
            row.error = ServingError(ErrorCode.KV_CORRUPT, "told as it is")
        case _:
            row.is_preempted = outcome == "preempted"
    fields = reports.ended_fields(row)

    assert fields["outcome"] == outcome
    assert fields["code"] == ("KV_CORRUPT" if outcome == "failed" else None)
    assert (fields["delivered_tokens"], fields["tokens_held"], fields["prompt_tokens"]) == (2, 4, 4)
    assert fields["output_tokens"] == (3 if outcome == "finished" else 2)
