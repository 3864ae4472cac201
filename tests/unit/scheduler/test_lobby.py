"""Requests that came before the first workers."""

from dataclasses import replace

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.lobby import Lobby
from scheduler.messages import PersistRecord, RecordsFound, StartReceived, StreamId
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId
from shared.domain.worker import LossLimits
from tests.support.scheduler_peers import make_spec


def start(request_id: str, stream: int) -> StartReceived:
    """A first message."""
    return StartReceived(
        stream=StreamId(stream),
        spec=make_spec(request_id),
        gateway_incarnation=Incarnation(1),
        last_attempt_seen=Attempt(0),
        epoch_seen=Epoch(0),
        unix_ms=0,
    )


def test_it_is_open_for_a_while_after_the_first_look() -> None:
    """Whenever that is."""
    lobby = Lobby(hold_s=10.0, max_requests=2)

    assert [True, True, False] == [lobby.is_open(now) for now in (100.0, 109.9, 110.0)]
    assert 11.0 == lobby.age_s(111.0)


def test_it_is_bounded_and_keeps_the_order_in_which_they_were_asked() -> None:
    """A second Start of a request takes the place of the first, also when it is full."""
    lobby = Lobby(hold_s=10.0, max_requests=2)
    assert [True, True, False] == [lobby.hold(start(name, n)) for name, n in (("b", 1), ("a", 0), ("c", 2))]
    again = replace(start("a", 0), stream=StreamId(7))
    assert lobby.hold(again)

    assert [again, start("b", 1)] == list(lobby)


def test_whoever_leaves_is_gone() -> None:
    """By request or by stream; others stay."""
    lobby = Lobby(hold_s=10.0, max_requests=3)
    for n, name in enumerate("abc"):
        lobby.hold(start(name, n))
    lobby.drop(StreamId(1))
    lobby.drop(StreamId(9))

    assert start("c", 2) == lobby.take(RequestId("c"))
    assert None is lobby.take(RequestId("c"))
    assert (1, [start("a", 0)]) == (len(lobby), list(lobby))
    assert [start("a", 0), None] == [lobby.get(RequestId(name)) for name in "ab"]


def test_whose_a_request_is_that_is_held_or_adopted() -> None:
    """As its gateway has said it, where the store knew nothing of it, too; no other id has it."""
    limits = CoreLimits(max_queued_requests=2, max_queued_prompt_tokens=99, loss=LossLimits(), gateway_grace_s=5.0)
    core = SchedulerCore(limits, Epoch(1))
    core.step(RecordsFound(records=()), 0.0)
    core.step(replace(start("r-1", 1), key_hash="a"), 0.0)
    effects = core.step(replace(start("r-10", 2), key_hash="b", last_attempt_seen=Attempt(1)), 0.0)

    owners = [core.key_hash_of(RequestId(name)) for name in ("r-1", "r-10", "r-", "r-100", "")]
    assert ["a", "b", None, None, None] == owners
    assert ["b"] == [effect.stored.key_hash for effect in effects if isinstance(effect, PersistRecord)]
