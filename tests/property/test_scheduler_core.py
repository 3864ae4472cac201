"""The core against simulated workers, gateways and a store that do everything in any order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import NOT_KNOWN
from shared.domain.errors import ErrorCode
from tests.support.scheduler_world import World

Action = st.SearchStrategy[tuple[str, int, int]]


def does(kind: str, first: int = 0, second: int = 0, *, lowest: int = 0) -> Action:
    """The action with numbers up to these."""
    return st.tuples(st.just(kind), st.integers(lowest, max(first, lowest)), st.integers(lowest, max(second, lowest)))


def often(times: int, kind: str, first: int = 0, second: int = 0, *, lowest: int = 0) -> list[Action]:
    """So many chances of it: `one_of` takes the same object once, however often it is given."""
    return [does(kind, first, second, lowest=lowest) for _ in range(times)]


# What moves a request on comes more often than what disturbs it: else none would get far.
AHEAD = [does("start", 100, 60, lowest=1), does("write"), does("take", 2)]
CALM = [
    *AHEAD,
    *AHEAD,
    does("cancel", 12),
    does("progress", 2, 2),
    does("deliver", 12, 9, lowest=0),
    does("deliver", 12, 9, lowest=0),
    does("heartbeat", 2),
    does("tick"),
    does("dial stream", 12),
    does("break session", 2),
    does("dial", 2),
    does("pause"),
    does("redis away"),
    does("redis back"),
    does("rewrite"),
]
ROUGH = [*CALM, does("progress", 2, 3), does("restart", 2), does("silence", 2), does("break stream", 12)]


# Requests in every state at the end of a scheduler: most are brought under way at once.
UNDER_WAY = [
    *often(6, "start", 40, 40, lowest=1),
    *often(10, "ahead"),
    *often(6, "progress", 2, 2),
    *often(2, "deliver", 12, 9),
]
TAKEN_OVER = [
    *ROUGH,
    *UNDER_WAY,
    *often(3, "take over", 2),
    *often(4, "dial stream", 12),
    *often(4, "dial", 2),
]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(ROUGH), min_size=10, max_size=80))
def test_every_request_ends_once_and_everything_is_released(history: list[tuple[str, int, int]]) -> None:
    """Whatever breaks in whatever order: one outcome on each stream, no illegal event, no block left, no debt."""
    world = World()
    for action in history:
        world.act(*action)
    world.settle()
    world.check_end()


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(CALM), min_size=10, max_size=80))
def test_nothing_but_a_lost_worker_loses_an_answer(history: list[tuple[str, int, int]]) -> None:
    """Sessions and streams that are dialled again, Redis outages and our own pauses fail no attempt."""
    world = World()
    for kind, first, second in history:
        if kind in ("tick", "pause"):
            world.dial_broken()  # nobody stays away for long
        world.act(kind, first, second)
    world.settle()
    world.check_end()
    errors = [told.outcome.error for told in world.outcomes.values() if told.outcome.error is not None]
    assert not [error for error in errors if error.code is ErrorCode.WORKER_LOST]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(TAKEN_OVER), min_size=20, max_size=80))
def test_a_scheduler_that_takes_over_ends_every_request_once(history: list[tuple[str, int, int]]) -> None:
    """However many die, whatever their store has kept, whoever comes back: as with a single one, no debt, no block."""
    world = World()
    for action in history:
        world.act(*action)
    world.settle()
    world.check_end()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of([*CALM, *UNDER_WAY, *often(3, "take over at once", 2)]), min_size=20, max_size=80))
def test_a_scheduler_that_takes_over_loses_no_answer(history: list[tuple[str, int, int]]) -> None:
    """Where gateways and workers find the new one at once nothing fails for it, whatever the store has kept."""
    world = World()
    for kind, first, second in history:
        if kind in ("tick", "pause"):
            world.dial_broken()
        world.act(kind, first, second)
    world.settle()
    world.check_end()
    errors = [told.outcome.error for told in world.outcomes.values() if told.outcome.error is not None]
    lost = [error for error in errors if error.code is ErrorCode.WORKER_LOST or "gateway" in error.message]
    assert not [*lost, *(error for error in errors if error.message == NOT_KNOWN)]
