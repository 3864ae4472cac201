"""Which attempt counts."""

from gateway.attempts import Attempts
from gateway.clients.scheduler import Placed, Requeued
from shared.domain.ids import Attempt, Incarnation, WorkerId


def place(attempt: int) -> Placed:
    """Where an attempt is."""
    return Placed(
        attempt=Attempt(attempt),
        decode_worker=WorkerId("d"),
        decode_address="127.0.0.1:1",
        decode_incarnation=Incarnation(1),
        attach_ticket=b"t",
        prefill_worker=WorkerId("p"),
    )


def requeued(attempt: int) -> Requeued:
    """The question about it."""
    return Requeued(attempt=Attempt(attempt), reason="preempted")


def test_a_place_counts_until_its_attempt_is_closed() -> None:
    """By Requeued or by whoever read it; told again it is nothing new."""
    attempts = Attempts()
    assert (None, 0) == (attempts.next_place, attempts.last_seen)
    assert [True, False] == [attempts.placed(place(1)), attempts.placed(place(1))]
    assert (place(1), 1) == (attempts.next_place, attempts.last_seen)
    attempts.requeued(requeued(1))
    assert (None, requeued(1)) == (attempts.next_place, attempts.question)
    assert not attempts.placed(place(1))
    assert attempts.placed(place(2))
    attempts.close(Attempt(2))
    assert (None, 2) == (attempts.next_place, attempts.last_seen)


def test_a_newer_place_closes_what_was_before() -> None:
    """Also one of which nothing was heard: its places came to nothing."""
    attempts = Attempts()
    attempts.placed(place(1))
    attempts.placed(place(4))

    assert (True, False, place(4)) == (
        attempts.is_closed(Attempt(3)),
        attempts.is_closed(Attempt(4)),
        attempts.next_place,
    )


def test_a_question_about_an_attempt_that_was_never_heard_of() -> None:
    """Its place was lost with a control stream: it is closed all the same."""
    attempts = Attempts()
    attempts.requeued(requeued(2))

    assert (2, None) == (attempts.last_seen, attempts.next_place)
    assert not attempts.placed(place(2))


def test_a_scheduler_that_was_not_there_hears_what_was_closed() -> None:
    """The last attempt of which nothing more is taken, which may be below the last one seen."""
    attempts = Attempts()
    assert 0 == attempts.last_closed
    attempts.close(Attempt(2))
    attempts.close(Attempt(1))
    assert (2, 2) == (attempts.last_closed, attempts.last_seen)
