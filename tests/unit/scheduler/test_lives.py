"""One pass of placement over the queue."""

from collections.abc import Sequence

import pytest

from scheduler import placement
from scheduler.fleet import Worker
from scheduler.waiting import Waiter
from shared.domain.ids import RequestId
from tests.support.scheduler_world import World


def test_what_was_sought_in_vain_is_not_sought_again_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs as much as one that found no room is passed over unseen; whoever needs less is tried."""
    world = World()
    # The first takes seven of the eight blocks of the larger decode worker; the other has four.
    for prompt, max_tokens in ((60, 52), (30, 60), (30, 60), (30, 80)):
        world.start(prompt, max_tokens)
        while world.writes:
            world.write()
    world.start(2, 10)
    tried: list[RequestId] = []
    choose = placement.choose

    def noted(waiter: Waiter, prefills: Sequence[Worker], *rest: object) -> placement.Pair | None:
        tried.append(waiter.request_id)
        return choose(waiter, prefills, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(placement, "choose", noted)
    world.write()  # the admission of the last one, which is followed by a pass

    assert ["r2", "r5"] == tried
    assert ["r2", "r3", "r4"] == [waiter.request_id for waiter in world.core.waiting]
