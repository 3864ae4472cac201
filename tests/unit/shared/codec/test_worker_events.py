"""Every event of a worker says which attempt and which epoch it answers."""

import pytest

from shared.codec import worker_events
from shared.codec.errors import detail_to_error
from shared.codec.kv import target_from_wire
from shared.codec.request import key_from_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TransferId, WorkerId
from shared.domain.request import FinishReason, SequenceState
from shared.domain.worker import KvTarget, Work
from shared.wire import common_pb2
from shared.wire.scheduler_pb2 import WorkerEvent

KEY = RequestKey(RequestId("r"), Attempt(3))
EPOCH = Epoch(2**63)
TARGET = KvTarget(
    worker_id=WorkerId("decode-0"),
    address="host:1",
    incarnation=Incarnation(2**64 - 1),
    transfer_id=TransferId(5),
    transports=("grpc",),
)
ERROR = ServingError(ErrorCode.KV_CORRUPT, "damaged")
EVENTS = {
    "reserved": worker_events.reserved(KEY, EPOCH, target=TARGET, attach_ticket=b"t"),
    "reserve_refused": worker_events.reserve_refused(KEY, EPOCH, needed_blocks=3, free_blocks=2),
    "prefill_done": worker_events.prefill_done(KEY, EPOCH, computed_tokens=9),
    "kv_committed": worker_events.kv_committed(KEY, EPOCH, num_bytes=2**40),
    "sequence_done": worker_events.sequence_done(KEY, EPOCH, reason=FinishReason.LENGTH, completion_tokens=4),
    "attempt_failed": worker_events.attempt_failed(KEY, EPOCH, error=ERROR),
    "released": worker_events.released(
        KEY, EPOCH, blocks_freed=6, work=Work(computed_tokens=7, replayed_tokens=3, undelivered_tokens=2)
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_names_its_attempt_and_epoch(name: str) -> None:
    """Over the wire, too."""
    event = WorkerEvent.FromString(EVENTS[name].SerializeToString())

    assert event.WhichOneof("event") == name
    assert key_from_wire(event.key) == KEY
    assert event.scheduler_epoch == EPOCH


def test_events_carry_what_was_said() -> None:
    """Each field where the wire has it."""
    assert target_from_wire(EVENTS["reserved"].reserved.target) == TARGET
    assert EVENTS["reserved"].reserved.attach_ticket == b"t"
    refused = EVENTS["reserve_refused"].reserve_refused
    assert (refused.needed_blocks, refused.free_blocks) == (3, 2)
    assert EVENTS["prefill_done"].prefill_done.computed_tokens == 9
    assert EVENTS["kv_committed"].kv_committed.bytes == 2**40
    done = EVENTS["sequence_done"].sequence_done
    assert (done.finish_reason, done.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 4)
    assert detail_to_error(EVENTS["attempt_failed"].attempt_failed.error) == ERROR
    released = EVENTS["released"].released
    assert (released.blocks_freed, released.computed_tokens) == (6, 7)
    assert (released.replayed_tokens, released.undelivered_tokens) == (3, 2)


def test_an_inventory_entry_says_what_is_held() -> None:
    """The state by its word."""
    entry = worker_events.inventory_entry(KEY, SequenceState.RUNNING, attach_ticket=b"t", last_index=8)

    assert key_from_wire(entry.key) == KEY
    assert (entry.sequence_state, entry.attach_ticket, entry.last_index) == ("running", b"t", 8)
