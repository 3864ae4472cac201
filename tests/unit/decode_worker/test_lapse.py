"""What time does to an attempt of the decode worker."""

from collections.abc import Iterator

import pytest

from decode_worker.growth import PARKED_S
from decode_worker.lapse import DONE_KEPT_S, UNATTENDED_S, Lapse, lapsed
from decode_worker.sequence import HeldSequence
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch
from shared.domain.request import FinishReason
from shared.obs.metrics import Metrics
from tests.support.decode_table import Reader, Table, token


@pytest.fixture
def table() -> Iterator[Table]:
    """A fresh table."""
    metrics = Metrics("decode", "decode-0")
    yield Table(metrics)
    metrics.close()


def running(table: Table, *, timeout_ms: int = 0, max_tokens: int = 20) -> HeldSequence:
    """A sequence in the batch, which nobody reads."""
    return table.running(table.reserve(timeout_ms=timeout_ms, max_tokens=max_tokens))


def code_of(verdict: Lapse | ServingError | None) -> ErrorCode:
    """Of a failure."""
    assert isinstance(verdict, ServingError)
    return verdict.code


def test_a_deadline_counts_from_the_reservation(table: Table) -> None:
    """Whether or not somebody reads, before and after the commit."""
    receiving = table.row(table.reserve("a", timeout_ms=2_000))
    begun = running(table, timeout_ms=2_000)
    begun.reader = Reader()
    for row in (receiving, begun):
        assert lapsed(row, table.clock.monotonic() + 1.9) is None
        assert ErrorCode.DEADLINE_EXCEEDED is code_of(lapsed(row, table.clock.monotonic() + 2.0))


def test_an_answer_that_was_taken_in_time_stays_one(table: Table) -> None:
    """After its last acknowledgement no deadline makes it a failure."""
    row = running(table, timeout_ms=2_000, max_tokens=2)
    table.service.attach(row.key, ticket=row.attach_ticket, from_index=1, reader=(reader := Reader()))
    table.step(tokens=(token(row.key, 2, FinishReason.LENGTH),))
    table.service.ack(row.key, 2, reader)
    assert lapsed(row, table.clock.monotonic() + 3.0) is None


def test_one_that_ends_already_does_not_fail_too(table: Table) -> None:
    """Aborted or broken off: its end is on the way."""
    row = running(table, timeout_ms=1_000)
    row.release_epoch = Epoch(5)
    assert lapsed(row, table.clock.monotonic() + 2.0) is None
    row.release_epoch, row.is_preempted = None, True
    assert lapsed(row, table.clock.monotonic() + 2.0) is None


def test_without_a_reader_it_fails_after_a_while(table: Table) -> None:
    """Final: a gateway that lives would have come back."""
    row = running(table)
    assert lapsed(row, table.clock.monotonic() + UNATTENDED_S - 0.1) is None
    assert ErrorCode.CANCELLED is code_of(lapsed(row, table.clock.monotonic() + UNATTENDED_S))


def test_without_a_lease_only_what_still_waits_for_its_prompt_fails(table: Table) -> None:
    """Retryable; a committed one needs none."""
    verdict = lapsed(table.row(table.reserve("a")), table.clock.monotonic(), has_lease=False)
    assert ErrorCode.KV_TRANSFER_FAILED is code_of(verdict)
    assert lapsed(running(table), table.clock.monotonic(), has_lease=False) is None


def test_a_parked_one_gives_its_blocks_to_others(table: Table) -> None:
    """Its outbox is full for so long."""
    row = running(table)
    row.reader = Reader()
    row.granted_upto = row.outbox.last_index
    assert lapsed(row, row.moved_at + PARKED_S - 0.1) is None
    assert Lapse.PARKED is lapsed(row, row.moved_at + PARKED_S)


def test_a_done_one_is_forgotten_where_nobody_asks(table: Table) -> None:
    """After a minute without its Release."""
    row = running(table, max_tokens=2)
    table.service.attach(row.key, ticket=row.attach_ticket, from_index=1, reader=(reader := Reader()))
    table.step(tokens=(token(row.key, 2, FinishReason.LENGTH),))
    table.service.ack(row.key, 2, reader)
    table.service.detach_all(reader)
    table.step(left=(row.key,))
    assert lapsed(row, table.clock.monotonic() + DONE_KEPT_S - 0.1) is None
    assert Lapse.FORGOTTEN is lapsed(row, table.clock.monotonic() + DONE_KEPT_S)


def test_the_sweep_does_what_is_decided(table: Table) -> None:
    """A late sequence fails with the code of the deadline, and gives its blocks back once the engine has let go."""
    row = running(table, timeout_ms=2_000)
    table.service.sweep()
    table.clock.advance(2.0)
    table.service.sweep()
    table.step(left=(row.key,))
    failed = [event for event in table.events.posted if event.WhichOneof("event") == "attempt_failed"]
    assert ["DEADLINE_EXCEEDED"] == [event.attempt_failed.error.code for event in failed]
    assert 0 == table.service.block_counts()["active"]


def test_a_drain_hands_over_what_has_not_ended(table: Table) -> None:
    """Waiting, running, or ended and not read to its end; what is told as done, or aborted, is left alone."""
    waiting = table.reserve("a")
    begun = table.running(table.reserve("b"))
    reader = Reader()
    done = table.running(table.reserve("c", max_tokens=2, prompt=(1, 2, 3, 4)))
    table.service.attach(done.key, ticket=done.attach_ticket, from_index=1, reader=reader)
    table.step(tokens=(token(done.key, 2, FinishReason.LENGTH),))
    table.service.ack(done.key, 2, reader)
    table.service.hand_over()
    preempted = [event.key.request_id for event in table.events.posted if event.WhichOneof("event") == "preempted"]
    assert ["a", "b"] == preempted
    table.step(left=(begun.key, done.key))
    assert table.service.is_idle
    assert not isinstance(table.service.find(waiting), HeldSequence)
