"""The waiting queue: order, bounds, places."""

import pytest

from scheduler.waiting import Waiter, Waiting
from shared.domain.ids import RequestId


def waiter(name: str, tokens: int = 10) -> Waiter:
    """A request of so many prompt tokens."""
    return Waiter(request_id=RequestId(name), num_prompt_tokens=tokens, max_total_tokens=tokens + 5)


def filled(*names: str) -> Waiting:
    """A queue of at most three requests and a hundred tokens."""
    waiting = Waiting(max_requests=3, max_prompt_tokens=100)
    for name in names:
        waiting.admit(waiter(name))
    return waiting


def test_who_comes_back_takes_the_old_place() -> None:
    """In front of everyone younger, whatever happened meanwhile."""
    waiting = filled("a", "b", "c")
    came_back = waiting.remove(RequestId("a"))
    assert came_back is not None
    waiting.admit(waiter("d"))
    waiting.put_back(came_back)
    waiting.check()

    assert ["a", "b", "c", "d"] == [each.request_id for each in waiting]
    assert [0, 1, 2, 3] == [waiting.position(each.request_id) for each in waiting]


def test_bounds_in_requests_and_in_tokens() -> None:
    """Whichever is met first."""
    assert not filled("a", "b", "c").can_admit(1)
    assert filled("a").can_admit(90)
    assert not filled("a").can_admit(91)


def test_a_prompt_above_the_token_bound_is_admitted_to_an_empty_queue() -> None:
    """It would never get in otherwise; behind others it is refused."""
    assert filled().can_admit(1000)
    assert not filled("a").can_admit(1000)


def test_removing_gives_the_room_back() -> None:
    """And removing twice does nothing."""
    waiting = filled("a", "b")
    assert waiting.remove(RequestId("a")) is not None
    assert waiting.remove(RequestId("a")) is None
    waiting.check()

    assert (1, 10, None, 0) == (
        len(waiting),
        waiting.num_prompt_tokens,
        waiting.get(RequestId("a")),
        waiting.position(RequestId("a")),
    )


def test_one_request_has_one_place() -> None:
    """Putting it in twice is a bug."""
    with pytest.raises(ValueError, match="waits already"):
        filled("a").admit(waiter("a"))
