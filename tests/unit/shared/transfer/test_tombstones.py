"""Tombstones remember ended attempts for a while."""

from shared.domain.ids import Attempt, RequestId, RequestKey
from shared.domain.worker import Work
from shared.transfer.tombstones import Tombstone, Tombstones


def key(number: int) -> RequestKey:
    """The first attempt of request `number`."""
    return RequestKey(RequestId(f"r{number}"), Attempt(1))


def test_an_attempt_is_remembered_for_its_lifetime() -> None:
    """Found with what was computed until the lifetime is over; the other attempt of the request is not meant."""
    tombstones = Tombstones(lifetime_s=60)
    tombstones.bury(key(1), 100.0, work=Work(computed_tokens=7))

    assert tombstones.find(key(1), 159.9) == Tombstone(expires_at=160.0, work=Work(computed_tokens=7))
    assert tombstones.find(RequestKey(RequestId("r1"), Attempt(2)), 101.0) is None
    assert tombstones.find(key(1), 160.0) is None
    assert len(tombstones) == 0


def test_burying_again_starts_the_lifetime_again() -> None:
    """The newest end counts, and its place in the order of expiry is the last."""
    tombstones = Tombstones(lifetime_s=60)
    tombstones.bury(key(1), 0.0)
    tombstones.bury(key(2), 10.0)
    tombstones.bury(key(1), 20.0)

    assert tombstones.keys(30.0) == (key(2), key(1))
    assert tombstones.keys(75.0) == (key(1),)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    """The number is bounded whatever the load."""
    tombstones = Tombstones(max_items=2)
    for number in range(3):
        tombstones.bury(key(number), float(number))

    assert tombstones.keys(3.0) == (key(1), key(2))
