"""The decode worker's table alone: time, credit, ends, and who is told what."""

from collections.abc import Iterator
from unittest.mock import ANY

import pytest

from decode_worker.sequence import HeldSequence, Stage
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.domain.refusals import RefusedKind
from shared.domain.request import FinishReason
from shared.engine.decode_runner import Grant, Join, Leave
from shared.engine.executor import SampledToken, SequenceFault
from shared.kv.frames import RejectCode
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2
from tests.support.decode_table import EOS, FIRST, Reader, Table, token
from tests.support.refusals import refused


@pytest.fixture
def table() -> Iterator[Table]:
    """A fresh table."""
    metrics = Metrics("decode", "decode-0")
    yield Table(metrics)
    metrics.close()


def test_a_reservation_expires_ten_seconds_after_its_last_sign(table: Table) -> None:
    """Told as a failed transfer, its blocks free; a sign of the sender puts it off; a release finds nothing more."""
    key = table.reserve()
    table.clock.advance(6)
    table.service.sign(table.row(key))
    table.clock.advance(9.9)
    table.service.sweep()
    assert table.events.names() == ["reserved"]
    table.clock.advance(0.1)
    table.service.sweep()

    assert table.events.names() == ["reserved", "attempt_failed"]
    assert table.events.posted[1].attempt_failed.error.code == "KV_TRANSFER_FAILED"
    assert table.pool.num_available == 16
    assert table.service.find(key) is RejectCode.GONE
    table.command("r", abort=scheduler_pb2.Abort())
    assert table.events.posted[2].released.blocks_freed == 0


def test_an_expired_reservation_keeps_its_blocks_while_a_copy_runs(table: Table) -> None:
    """It fails at once, and its blocks come back when the copy has returned."""
    key = table.reserve()
    row = table.begin_copy(key)
    table.clock.advance(10)
    table.service.sweep()

    assert table.events.names() == ["reserved", "attempt_failed"]
    assert table.pool.num_free == 14
    table.end_copy(row)
    assert table.pool.num_available == 16
    assert table.events.num_heartbeats_asked == 2  # blocks are free, then a place


def test_a_sequence_that_nobody_reads_fails_after_45_seconds(table: Table) -> None:
    """Counted from the commit, or from when its gateway went; a gateway that reads holds it for ever."""
    key = table.reserve()
    row = table.running(key)
    reader = Reader()
    table.clock.advance(44)
    table.service.sweep()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    table.clock.advance(500)
    table.service.sweep()
    table.service.detach_all(reader)
    table.clock.advance(44.9)
    table.service.sweep()
    assert table.events.names() == ["reserved", "kv_committed"]
    table.clock.advance(0.1)
    table.service.sweep()

    assert table.events.names() == ["reserved", "kv_committed", "attempt_failed"]
    assert table.events.posted[2].attempt_failed.error.message == "gateway_lost"
    assert table.engine.commands[-1] == Leave(key=key)
    assert table.pool.num_free == 13
    table.step(left=(key,))
    assert table.pool.num_available == 16


def test_an_answer_that_nobody_takes_fails_too(table: Table) -> None:
    """It has ended and gave its blocks back, but its tokens were never acknowledged."""
    key = table.reserve()
    table.running(key)
    table.step(tokens=(token(key, 2, FinishReason.STOP),))
    assert table.pool.num_available == 16
    table.clock.advance(45)
    table.service.sweep()

    assert table.events.names() == ["reserved", "kv_committed", "attempt_failed"]


def test_a_done_answer_is_kept_until_its_release_or_for_a_minute(table: Table) -> None:
    """A gateway may ask again for the end; after the release, or 60 s without one, only the tombstone is left."""
    reader = Reader()
    keys = [table.reserve(name) for name in ("released", "kept")]
    for key in keys:
        row = table.running(key)
        table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
        table.step(tokens=(token(key, 2, FinishReason.STOP),))
        table.service.ack(key, 2, reader)
        table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    assert table.events.names().count("sequence_done") == 2
    table.command("released", release=scheduler_pb2.Release())
    table.service.detach_all(reader)
    table.clock.advance(59.9)
    table.service.sweep()
    assert isinstance(table.service.find(keys[1]), HeldSequence)
    table.clock.advance(0.1)
    table.service.sweep()

    assert [table.service.find(key) for key in keys] == [RejectCode.UNKNOWN_TRANSFER, RejectCode.GONE]
    assert table.service.is_idle


def test_credit_moves_in_quarters_of_the_outbox(table: Table) -> None:
    """The engine may compute eight tokens ahead, and is told of room for two more when two are acknowledged."""
    key = table.reserve()
    row = table.running(key)
    join = table.engine.commands[0]
    assert isinstance(join, Join)
    assert join.sequence.may_compute_upto == 8
    reader = Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    table.step(tokens=(token(key, 2),))
    table.service.ack(key, 1, reader)
    assert len(table.engine.commands) == 2  # with the block that it grew by
    table.service.ack(key, 2, reader)

    assert table.engine.commands[2] == Grant(key=key, upto_index=10, block_table=ANY)
    assert table.service.num_outbox_tokens == 0


def test_with_stop_strings_every_acknowledgement_gives_room(table: Table) -> None:
    """Four ahead, so that each one counts."""
    key = table.reserve(has_stop_strings=True)
    row = table.running(key)
    join = table.engine.commands[0]
    assert isinstance(join, Join)
    assert join.sequence.may_compute_upto == 4
    reader = Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    table.service.ack(key, 1, reader)

    assert table.engine.commands[1] == Grant(key=key, upto_index=5, block_table=ANY)


def test_tokens_made_while_leaving_are_dropped_and_counted(table: Table) -> None:
    """The engine may finish a step before it lets go; Released comes after, with the blocks and the true count."""
    key = table.reserve()
    table.running(key)
    table.command("r", abort=scheduler_pb2.Abort())
    table.command("r", abort=scheduler_pb2.Abort())
    table.step(tokens=(token(key, 2),))
    assert table.events.names() == ["reserved", "kv_committed"]
    table.step(tokens=(token(key, 3, FinishReason.LENGTH),))
    table.step(left=(key, key))

    released = table.events.posted[2].released
    assert (released.blocks_freed, released.computed_tokens) == (3, 2)
    assert len(table.events.posted) == 3
    assert [command for command in table.engine.commands if isinstance(command, Leave)] == [Leave(key=key)]


def test_a_commit_that_the_engine_finds_wrong_fails_the_attempt(table: Table) -> None:
    """KvCommitted is not told before the engine has checked the KV."""
    key = table.reserve()
    row = table.begin_copy(key)
    table.end_copy(row)
    table.service.take_first_token(row, FIRST, 0)
    assert table.events.names() == ["reserved"]
    table.step(faults={key: SequenceFault(ErrorCode.KV_CORRUPT, "wrong digest")})

    assert table.events.names() == ["reserved", "attempt_failed"]
    assert table.events.posted[1].attempt_failed.error.code == "KV_CORRUPT"
    assert table.pool.num_available == 16


def test_an_end_token_as_token_1_ends_the_answer(table: Table) -> None:
    """No join, no KV: the frames are refused and the blocks free at once."""
    key = table.reserve()
    row = table.row(key)
    table.service.take_first_token(row, SampledToken(token_id=EOS), 3)

    assert row.stage is Stage.ENDED
    assert table.pool.num_available == 16
    assert table.engine.commands == []
    assert row.outbox.end is not None
    assert row.outbox.end.reason is FinishReason.STOP
    assert row.cached_tokens == 3


def test_late_and_doubled_words_change_nothing_and_are_counted(table: Table) -> None:
    """Token 1 again, another one's acknowledgement, one of what was acknowledged or does not exist, and after the end."""
    key = table.reserve()
    row = table.running(key)
    reader, stranger = Reader(), Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    assert table.service.take_first_token(row, SampledToken(token_id=TokenId(99)), 0) is None
    table.step(tokens=(token(key, 2),))
    table.service.ack(key, 2, stranger)
    assert 0 == row.outbox.acked_upto
    table.service.ack(key, 1, reader)
    table.service.ack(key, 1, reader)
    table.service.ack(key, 3, reader)
    assert (1, [50, 52]) == (row.outbox.acked_upto, row.outputs)
    table.command("r", abort=scheduler_pb2.Abort())
    table.step(left=(key,))
    table.service.ack(key, 2, reader)

    counts = {RefusedKind.DOUBLED_FIRST_TOKEN: 1, RefusedKind.LATE_ACK: 2, RefusedKind.LATE_READER: 2}
    assert counts == refused(table.metrics)


def test_what_a_reader_had_before_is_no_late_acknowledgement(table: Table) -> None:
    """It says so with its first attach; less than that is late."""
    key = table.reserve(delivered=(50, 51))
    row, reader = table.row(key), Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=3, reader=reader)
    table.service.ack(key, 2, reader)
    assert {} == refused(table.metrics)
    table.service.ack(key, 1, reader)

    assert {RefusedKind.LATE_ACK: 1} == refused(table.metrics)


def test_of_two_sessions_of_a_resumable_answer_the_higher_counts(table: Table) -> None:
    """The older one's late attach, acknowledgement and finish change nothing, also on the same stream."""
    key = table.reserve()
    row = table.running(key)
    older, newer = Reader(), Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=older, session=1)
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=newer, session=2)
    with pytest.raises(ServingError) as caught:
        table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=older, session=1)
    for reader in (older, newer):
        table.service.ack(key, 1, reader, 1)
        table.service.finish(key, 1, FinishReason.STOP, reader, 1)

    assert ErrorCode.SUPERSEDED is caught.value.code
    assert (newer, 0) == (row.reader, row.outbox.acked_upto)
    table.service.ack(key, 1, newer, 2)
    assert 1 == row.outbox.acked_upto


def test_finish_of_an_impossible_answer_is_refused(table: Table) -> None:
    """More tokens than were made; the sequence goes on."""
    key = table.reserve()
    row = table.running(key)
    reader = Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    with pytest.raises(ServingError, match="1 were made"):
        table.service.finish(key, 2, FinishReason.STOP, reader)

    assert row.is_in_engine


@pytest.mark.parametrize("from_index", [0, 1, 4])
def test_attach_asks_only_for_what_is_held_or_next(table: Table, from_index: int) -> None:
    """Token 1 has been acknowledged, tokens 2 and 3 are next: neither less nor more can be asked for."""
    key = table.reserve()
    row = table.running(key)
    reader = Reader()
    table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=reader)
    table.service.ack(key, 1, reader)
    table.step(tokens=(token(key, 2),))
    with pytest.raises(ServingError, match="is not held"):
        table.service.attach(key, ticket=row.attach_ticket, from_index=from_index, reader=reader)

    table.service.attach(key, ticket=row.attach_ticket, from_index=3, reader=reader)
    assert row.next_unsent == 3


def test_a_dead_engine_frees_everything_and_refuses(table: Table) -> None:
    """Running and arriving attempts fail, one that was leaving is answered, a new one is refused; the rest is drained."""
    running, arriving, leaving = (table.reserve(name, max_tokens=8) for name in ("running", "arriving", "leaving"))
    table.running(running)
    table.running(leaving)
    table.command("leaving", abort=scheduler_pb2.Abort())
    table.events.posted.clear()
    table.service.on_engine_dead()
    table.reserve("late")

    told = [(event.key.request_id, event.WhichOneof("event")) for event in table.events.posted]
    assert told == [
        ("running", "attempt_failed"),
        ("arriving", "attempt_failed"),
        ("leaving", "released"),
        ("late", "reserve_refused"),
    ]
    assert table.service.find(arriving) is RejectCode.GONE
    assert table.pool.num_available == 16
    assert table.service.heartbeat().draining


def test_a_draining_worker_takes_nothing_new(table: Table) -> None:
    """Refused, so that the request waits for another worker; what runs counts until it is done."""
    key = table.reserve()
    table.service.is_draining = True
    table.reserve("late")

    assert table.events.names() == ["reserved", "reserve_refused"]
    assert not table.service.is_idle
    table.command("r", abort=scheduler_pb2.Abort())
    assert table.service.is_idle
    assert table.service.find(key) is RejectCode.GONE


def test_a_spec_that_means_nothing_fails_its_attempt(table: Table) -> None:
    """Refused with a reason instead of ending the session."""
    table.command("r", reserve=scheduler_pb2.Reserve())

    assert table.events.names() == ["attempt_failed"]
    assert table.events.posted[0].attempt_failed.error.code == "INVALID_REQUEST"


def test_heartbeat_and_inventory_tell_what_is_held(table: Table) -> None:
    """Every block state and sequence state with a count, the engine's age, and the ends of the last 60 s."""
    table.reserve("waiting")
    table.running(table.reserve("running"))
    table.command("ended", abort=scheduler_pb2.Abort())
    heartbeat = table.service.heartbeat()
    inventory = {
        entry.key.request_id: (entry.sequence_state, entry.last_index) for entry in table.service.inventory().entries
    }

    assert dict(heartbeat.blocks) == {"free": 11, "reserved": 2, "active": 3, "cached": 0, "quarantined": 0}
    assert dict(heartbeat.sequences) == {"waiting_kv": 1, "running": 1, "parked": 0, "preempted": 0, "done": 0}
    assert heartbeat.last_step_age_ms == 250
    assert inventory == {"waiting": ("waiting_kv", 0), "running": ("running", 1), "ended": ("done", 0)}


def test_commands_of_the_other_role_are_counted_and_dropped(table: Table) -> None:
    """A scheduler that mixes the roles up breaks nothing."""
    table.command("r", prefill=scheduler_pb2.Prefill())

    assert table.events.posted == []
