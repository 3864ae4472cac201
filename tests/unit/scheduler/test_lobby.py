"""Requests that came before the first workers."""

from dataclasses import replace

from scheduler.lobby import Lobby
from scheduler.messages import StartReceived, StreamId
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId
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


def test_it_is_bounded_and_keeps_the_order() -> None:
    """A second Start of a request takes the place of the first, also when it is full."""
    lobby = Lobby(hold_s=10.0, max_requests=2)
    assert [True, True, False] == [lobby.hold(start(name, n)) for n, name in enumerate("abc")]
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
    assert [True, False] == [RequestId(name) in lobby for name in "ab"]
