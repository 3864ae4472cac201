"""The decode worker's table: continued answers, growth and preemption, parking, prompts that are here already."""

from collections.abc import Iterator

import pytest

from decode_worker.growth import PARKED_S
from decode_worker.sequence import HeldSequence, Stage
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import FinishReason
from shared.engine.decode_runner import Join, Leave
from shared.engine.executor import SampledToken, SequenceFault
from shared.kv.frames import RejectCode
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2
from tests.support.decode_table import EOS, FIRST, Reader, Table, token


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    """Of a decode worker."""
    metrics = Metrics("decode", "decode-0")
    yield metrics
    metrics.close()


@pytest.fixture
def table(metrics: Metrics) -> Table:
    """Sixteen blocks of four tokens."""
    return Table(metrics)


def run_to(table: Table, key: RequestKey, upto: int, *, first: int = 2) -> None:
    """Steps of this sequence alone."""
    for index in range(first, upto + 1):
        table.step(tokens=(token(key, index),))


def read(table: Table, row: HeldSequence) -> Reader:
    """Somebody reads it from the first token that is held."""
    reader = Reader()
    ticket = row.attach_ticket
    table.service.attach(row.key, ticket=ticket, from_index=row.outbox.acked_upto + 1, reader=reader)
    return reader


def test_a_continued_answer_joins_without_a_first_token(table: Table) -> None:
    """It is committed by coverage alone, replays what the client has, and its reader begins behind that."""
    key = table.reserve(delivered=(50, 51))
    row = table.begin_copy(key)
    assert len(row.block_table) == 6  # never more than its longest answer needs
    table.end_copy(row)
    join = table.engine.commands[0]
    assert isinstance(join, Join)
    assert (join.sequence.outputs, join.sequence.may_compute_upto) == ((50, 51), 2 + 8)
    assert table.service.take_first_token(row, SampledToken(token_id=TokenId(99)), 0) is None
    with pytest.raises(ServingError, match="3 is the first"):
        table.service.attach(key, ticket=row.attach_ticket, from_index=2, reader=Reader())
    reader = read(table, row)
    table.step(joined=(key,))
    table.step(tokens=(token(key, 3, FinishReason.LENGTH),))
    table.service.ack(key, 3, reader)

    assert table.events.names() == ["reserved", "kv_committed", "sequence_done"]
    assert table.events.posted[2].sequence_done.completion_tokens == 3
    assert row.outputs == [50, 51, 53]


def test_the_work_of_an_attempt_is_told_when_it_is_let_go(table: Table) -> None:
    """Replayed and new tokens apart, and how many of the new ones went to no gateway; told again by the tombstone."""
    key = table.reserve(delivered=(50, 51))
    row = table.begin_copy(key)
    table.end_copy(row)
    reader = read(table, row)
    table.step(joined=(key,))
    table.step(replayed={key: 1})
    table.step(tokens=(token(key, 3),))
    table.service.ack(key, 3, reader)
    table.step(tokens=(token(key, 4),))
    table.command("r", abort=scheduler_pb2.Abort())
    table.step(tokens=(token(key, 5),))  # made while its Leave was on the way
    table.step(left=(key,))
    table.command("r", abort=scheduler_pb2.Abort())

    first, again = (event.released for event in table.events.posted[-2:])
    assert (3, 1, 2) == (first.computed_tokens, first.replayed_tokens, first.undelivered_tokens)
    assert (0, 3, 1, 2) == (
        again.blocks_freed,
        again.computed_tokens,
        again.replayed_tokens,
        again.undelivered_tokens,
    )


def test_an_answer_that_the_client_has_whole_only_ends(table: Table) -> None:
    """Its end was lost on the way: no KV, no step, only the word that it has ended."""
    key = table.reserve(delivered=(50, EOS))
    row = table.row(key)
    read(table, row)

    assert table.events.names() == ["reserved", "sequence_done"]
    assert row.outbox.end is not None
    assert (row.outbox.end.index, row.outbox.end.reason) == (2, FinishReason.STOP)
    assert table.pool.num_available == 16
    assert row.stage is Stage.ENDED


def test_what_could_never_end_here_is_refused_for_good(table: Table) -> None:
    """Four prompt tokens and 61 to come are a block more than the pool has."""
    table.reserve("fits", max_tokens=60)
    table.reserve("never", max_tokens=61)

    assert table.events.names() == ["reserved", "attempt_failed"]
    assert table.events.posted[1].attempt_failed.error.code == ErrorCode.NEVER_FITS.value


def test_a_block_for_each_running_sequence_is_not_given_to_new_ones(metrics: Metrics) -> None:
    """Six blocks: three are held by what runs; the next takes two, which leaves one, and the next finds too few."""
    table = Table(metrics, num_blocks=6)
    table.running(table.reserve("a"))
    table.reserve("b", prompt=(1, 1, 1, 1))
    table.reserve("c", prompt=(2,), max_tokens=1)

    assert table.events.names() == ["reserved", "kv_committed", "reserved", "reserve_refused"]
    assert table.events.posted[3].reserve_refused.free_blocks == 1


def test_the_youngest_is_preempted_for_an_older_one(metrics: Metrics) -> None:
    """It leaves the engine, its tokens so far go out, and its blocks serve the older when the engine has let go."""
    table = Table(metrics, num_blocks=7)
    old = table.running(table.reserve("a"))
    young = table.running(table.reserve("b", prompt=(1, 1, 1, 1)))
    reader = read(table, young)
    reader_of_old = read(table, old)
    assert table.pool.num_available == 1
    run_to(table, old.key, 5)
    table.service.ack(old.key, 5, reader_of_old)  # credit to go on: one block is there for it
    run_to(table, old.key, 9, first=6)
    num_touched = reader.num_touched
    table.service.ack(old.key, 9, reader_of_old)

    assert table.events.names()[-1] == "preempted"
    assert table.events.posted[-1].key.request_id == "b"
    assert table.engine.commands[-1] == Leave(key=young.key)
    assert (young.reader, reader.num_touched) == (None, num_touched + 1)
    assert dict(table.service.heartbeat().sequences)["preempted"] == 1
    table.step(tokens=(token(young.key, 2),))  # made while its Leave was on the way
    before = len(old.block_table)
    table.step(left=(young.key,))

    assert len(old.block_table) == before + 1
    assert table.service.find(young.key) is RejectCode.GONE
    with pytest.raises(ServingError) as caught:
        table.service.attach(young.key, ticket=young.attach_ticket, from_index=1, reader=reader)
    assert caught.value.code is ErrorCode.REQUEST_NOT_FOUND
    table.command("b", abort=scheduler_pb2.Abort())
    assert (table.events.posted[-1].released.blocks_freed, table.events.posted[-1].released.computed_tokens) == (0, 1)
    assert b'firsttoken_preemptions_total{cause="blocks"} 1.0' in metrics.render()
    table.service.check_integrity()


def test_a_younger_reservation_gives_way_to_what_runs(metrics: Metrics) -> None:
    """Its KV is still on the way, and refused from now on; its blocks serve at once."""
    table = Table(metrics, num_blocks=6)
    old = table.running(table.reserve("a"))
    waiting = table.row(table.reserve("b", prompt=(1, 1, 1, 1)))
    reader = read(table, old)
    run_to(table, old.key, 5)
    table.service.ack(old.key, 5, reader)
    run_to(table, old.key, 9, first=6)
    table.service.ack(old.key, 9, reader)

    assert table.events.names()[-1] == "preempted"
    assert (waiting.stage, waiting.reject_code) == (Stage.ENDED, RejectCode.GONE)
    assert table.service.find(waiting.key) is RejectCode.GONE
    assert len(old.block_table) == 5
    table.service.check_integrity()


def test_a_full_outbox_is_parked_and_preempted_after_ten_seconds(table: Table, metrics: Metrics) -> None:
    """The clock starts with the last token that was made or taken."""
    row = table.running(table.reserve())
    reader = read(table, row)
    run_to(table, row.key, 8)
    assert dict(table.service.heartbeat().sequences)["parked"] == 1
    table.clock.advance(PARKED_S - 0.1)
    table.service.ack(row.key, 1, reader)
    table.clock.advance(PARKED_S - 0.1)
    table.service.sweep()
    assert table.events.names() == ["reserved", "kv_committed"]
    table.clock.advance(0.2)
    table.service.sweep()

    assert table.events.names() == ["reserved", "kv_committed", "preempted"]
    assert b'firsttoken_preemptions_total{cause="parked"} 1.0' in metrics.render()
    table.step(left=(row.key,))
    assert table.pool.num_available == 16


def test_a_prompt_that_is_here_needs_no_transfer(table: Table, metrics: Metrics) -> None:
    """Its whole blocks are shared as soon as the engine has found them good; token 1 alone commits the next one."""
    first = table.running(table.reserve("a"))
    second = table.row(table.reserve("b"))

    assert table.events.posted[-1].reserved.target.tokens_held == 4
    assert b'firsttoken_prefix_cache_tokens_total{result="hit"} 4.0' in metrics.render()
    assert second.block_table.block_ids[0] == first.block_table.block_ids[0]
    assert table.service.take_first_token(second, FIRST, 0) is None
    assert isinstance(table.engine.commands[-2], Join)
    table.step(joined=(second.key,))
    assert table.events.posted[-1].kv_committed.bytes == 0
    for name in ("a", "b"):
        table.command(name, abort=scheduler_pb2.Abort())
    table.step(left=(first.key, second.key))

    assert table.pool.num_available == 16
    assert dict(table.service.heartbeat().blocks)["cached"] == 1
    table.service.check_integrity()


def test_a_continued_answer_whose_prompt_is_here_joins_at_once(table: Table) -> None:
    """Nothing has to arrive: its engine work begins before prefill hears of it."""
    table.running(table.reserve("a"))
    key = table.reserve("b", delivered=(50,))

    assert table.row(key).is_in_engine
    assert isinstance(table.engine.commands[-1], Join)


@pytest.mark.parametrize(("shares_answers", "expected"), [(True, 8), (False, 4)])
def test_generated_tokens_are_shared_where_the_numbers_are_the_same(
    metrics: Metrics, *, shares_answers: bool, expected: int
) -> None:
    """The next turn of a conversation begins with this one: of its twelve tokens the last was never fed."""
    table = Table(metrics, shares_answers=shares_answers)
    row = table.running(table.reserve("a"))
    run_to(table, row.key, 7)
    table.step(tokens=(token(row.key, 8, FinishReason.LENGTH),))
    table.reserve("b", prompt=(7, 8, 9, 10, *row.outputs, 1))

    assert table.events.posted[-1].reserved.target.tokens_held == expected


def test_kv_that_was_found_wrong_is_not_shared(table: Table) -> None:
    """Whether the engine refuses it when it joins, or finds a block rotten that others have shared since."""
    row = table.begin_copy(table.reserve("a"))
    table.end_copy(row)
    table.service.take_first_token(row, FIRST, 0)
    table.step(faults={row.key: fault()})
    first = table.running(table.reserve("b"))
    assert table.events.posted[-2].reserved.target.tokens_held == 0
    second = table.row(table.reserve("c"))
    assert second.tokens_held == 4
    table.step(faults={first.key: fault()})
    table.reserve("d")

    assert table.events.posted[-1].reserved.target.tokens_held == 0
    table.service.check_integrity()
    for name in ("c", "d"):
        table.command(name, abort=scheduler_pb2.Abort())
    assert table.pool.num_free == 16


def fault() -> SequenceFault:
    """What the engine says of it."""
    return SequenceFault(ErrorCode.KV_CORRUPT, "wrong digest")
