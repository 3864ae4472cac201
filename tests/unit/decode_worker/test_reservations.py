"""Reservations: who holds blocks, until when, and who has ended."""

import pytest

from decode_worker.reservations import Refusal, Reservation, Reservations
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.domain.worker import NO_WORK, Work
from shared.kv.block_pool import BlockPool, BlockState


def key(number: int) -> RequestKey:
    """The first attempt of request `number`."""
    return RequestKey(RequestId(f"r{number}"), Attempt(1))


def spec(number: int) -> RequestSpec:
    """Nine prompt tokens: two whole blocks and one token."""
    return RequestSpec(
        request_id=key(number).request_id,
        prompt_ids=tuple(TokenId(token) for token in range(9)),
        max_tokens=9,
        sampling=SamplingParams(seed=1),
    )


def grant(reservations: Reservations, number: int, num_blocks: int, now: float = 0.0) -> Reservation | Refusal:
    """Ask for blocks in the name of request `number`."""
    return reservations.grant(
        key(number), spec(number), num_blocks=num_blocks, transfer_id=TransferId(number), attach_ticket=b"t", now=now
    )


def test_blocks_are_granted_all_or_none() -> None:
    """A refusal names what is needed and what is free, and takes nothing."""
    pool = BlockPool(4)
    reservations = Reservations(pool=pool, block_size=4, max_sequences=8)

    assert isinstance(grant(reservations, 1, 3), Reservation)
    assert grant(reservations, 2, 2) == Refusal(needed_blocks=2, free_blocks=1)
    assert pool.counts()[BlockState.RESERVED] == 3
    assert reservations.free(key(1)) == 3
    assert reservations.free(key(1)) == 0
    assert pool.num_free == 4


def test_places_run_out_before_blocks() -> None:
    """As many holders as the worker may have sequences; a place comes back with its blocks."""
    reservations = Reservations(pool=BlockPool(4), block_size=4, max_sequences=1)
    grant(reservations, 1, 1)

    assert grant(reservations, 2, 1) == Refusal(needed_blocks=1, free_blocks=0)
    reservations.free(key(1))
    assert isinstance(grant(reservations, 2, 1), Reservation)


def test_a_lease_runs_out_without_a_sign_and_a_commit_ends_it() -> None:
    """10 s after the last sign; a sign starts it anew; what is committed is not leased."""
    pool = BlockPool(4)
    reservations = Reservations(pool=pool, block_size=4, max_sequences=8, lease_s=10)
    grant(reservations, 1, 1, now=0.0)
    grant(reservations, 2, 1, now=0.0)
    reservations.sign(key(2), 5.0)
    reservations.sign(key(9), 5.0)

    assert reservations.expired(9.9) == ()
    assert reservations.expired(10.0) == (key(1),)
    assert reservations.expired(15.0) == (key(1), key(2))
    reservations.commit(key(2))
    assert reservations.expired(99.0) == (key(1),)
    assert pool.counts()[BlockState.ACTIVE] == 1
    with pytest.raises(ValueError, match="committed already"):
        reservations.commit(key(2))
    with pytest.raises(KeyError):
        reservations.commit(key(9))


def test_an_ended_attempt_cannot_come_back() -> None:
    """Its tombstone refuses a late grant for 60 s; nobody is buried while holding blocks."""
    reservations = Reservations(pool=BlockPool(4), block_size=4, max_sequences=8)
    grant(reservations, 1, 1)
    with pytest.raises(ValueError, match="still holds"):
        reservations.bury(key(1), 0.0)
    with pytest.raises(ValueError, match="not new"):
        grant(reservations, 1, 1)
    reservations.free(key(1))
    reservations.bury(key(1), 0.0, work=Work(computed_tokens=3))

    assert reservations.ended(59.0) == (key(1),)
    assert reservations.bury_unknown(key(1), 59.0) == Work(computed_tokens=3)
    with pytest.raises(ValueError, match="not new"):
        grant(reservations, 1, 1, now=59.0)
    assert not reservations.has_ended(key(1), 60.0)
    assert isinstance(grant(reservations, 1, 1, now=60.0), Reservation)


def test_an_attempt_that_was_never_here_cannot_come() -> None:
    """Its Abort overtook its Reserve."""
    reservations = Reservations(pool=BlockPool(4), block_size=4, max_sequences=8)

    assert reservations.bury_unknown(key(1), 0.0) == NO_WORK
    with pytest.raises(ValueError, match="not new"):
        grant(reservations, 1, 1, now=59.0)
