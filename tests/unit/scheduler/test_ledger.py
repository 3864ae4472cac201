"""The book of requests: streams, ends, what is stored."""

from scheduler.ledger import Entry, Ledger
from scheduler.messages import StreamId
from shared.domain.ids import Epoch, Incarnation, RequestId
from shared.domain.lifecycle import RetryRule, advance
from shared.domain.lifecycle_events import Admitted, CancelRequested
from shared.domain.request import CancelReason, RequestState
from tests.support.scheduler_peers import make_spec


def ledger(*, max_ends_kept: int = 10) -> Ledger:
    """Keeps ends for 60 s."""
    return Ledger(epoch=Epoch(5), ends_kept_s=60.0, max_ends_kept=max_ends_kept)


def admitted(book: Ledger, name: str) -> Entry:
    """A queued request in the book."""
    event = Admitted(spec=make_spec(name), gateway_incarnation=Incarnation(9), unix_ms=77)
    entry = Entry(record=advance(None, event, 0.0, RetryRule()).record, stream=StreamId(len(name)))
    book.add(entry)
    return entry


def end(book: Ledger, entry: Entry, now: float) -> None:
    """By a cancel."""
    entry.record = advance(entry.record, CancelRequested(reason=CancelReason.DELETE), now, RetryRule()).record
    book.ended(entry, now)


def test_a_new_stream_replaces_the_old_one() -> None:
    """And what the old one says finds nobody."""
    book = ledger()
    entry = admitted(book, "a")
    entry.stream_broken_at = 3.0
    assert StreamId(1) == book.attach(entry, StreamId(8))
    assert (None, entry, None) == (book.by_stream(StreamId(1)), book.by_stream(StreamId(8)), entry.stream_broken_at)


def test_ends_are_forgotten_by_age_and_by_number() -> None:
    """The oldest first; live requests never."""
    book = ledger(max_ends_kept=2)
    live = admitted(book, "live")
    for index, name in enumerate(("a", "b", "c")):
        end(book, admitted(book, name), float(index))
    book.forget_old_ends(3.0)
    assert [None, "b", "c"] == [entry and entry.request_id for entry in map(book.get, map(RequestId, "abc"))]
    book.forget_old_ends(61.5)
    assert [None, None, "c"] == [entry and entry.request_id for entry in map(book.get, map(RequestId, "abc"))]
    assert [live] == book.live()
    assert 1 == book.num_live()


def test_counts_name_every_live_state() -> None:
    """Zeros included, ends not."""
    book = ledger()
    admitted(book, "a")
    end(book, admitted(book, "bb"), 1.0)
    counts = book.num_by_state()
    assert (1, 0, 6) == (counts[RequestState.QUEUED], counts[RequestState.ABORTING], len(counts))


def test_what_is_stored_holds_the_epoch_and_no_prompt() -> None:
    """Outcome fields only once it has ended."""
    book = ledger()
    entry = admitted(book, "a")
    stored = book.stored(entry)
    assert (RequestState.QUEUED, 5, 77, None) == (
        stored.state,
        stored.epoch,
        stored.admitted_unix_ms,
        stored.error_code,
    )
    end(book, entry, 1.0)
    assert "CANCELLED" == book.stored(entry).error_code
