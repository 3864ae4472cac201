"""A team: all items of all rounds are done once and in the order of phases, whoever does them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shared.model.kernels.cpu.jit import compiled
from shared.model.kernels.cpu.team import (
    Team,
    await_done,
    close_round,
    first_item,
    join_round,
    next_item,
    open_round,
)

_ITEMS = 40
_PHASES = 5


@compiled
def _run(team: int, counts: Any, faults: Any, threads: int, thread: int) -> None:
    """Each phase counts its items up by one; an item whose predecessor is behind it is a fault."""
    while True:
        number = open_round(team, threads) if thread == 0 else join_round(team)
        if number < 0:
            return
        if number > 0:
            begin = 0
            of = (team, number, thread, threads)
            for phase in range(_PHASES):
                item = first_item(of, begin, _ITEMS)
                while item >= 0:
                    before = counts[phase, item]
                    if phase > 0 and counts[phase - 1, (item + 1) % _ITEMS] != before + 1:
                        faults[0] += 1
                    counts[phase, item] = before + 1
                    item = next_item(of, begin, _ITEMS)
                begin = await_done(of, begin, _ITEMS)
        if thread == 0:
            close_round(team, threads, number)
            return


def _start(num_threads: int) -> tuple[Team, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    counts: npt.NDArray[np.int64] = np.zeros((_PHASES, _ITEMS), dtype=np.int64)
    faults: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    return Team(num_threads, lambda address, each: _run(address, counts, faults, num_threads, each)), counts, faults


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_once_and_phases_in_order(num_threads: int) -> None:
    """Many short rounds on more threads than cores: helpers come late, in the middle, and not at all."""
    team, counts, faults = _start(num_threads)
    for _ in range(300):
        _run(team.address, counts, faults, num_threads, 0)
    assert [[300] * _ITEMS] * _PHASES == counts.tolist()
    assert faults[0] == 0
    team.close()


@compiled
def _take_all(team: int, num_items: int, thread: int, threads: int, taken: Any) -> None:
    """A round of one phase by this thread alone; `taken` receives its items in order."""
    number = open_round(team, threads)
    of = (team, number, thread, threads)
    place = 0
    item = first_item(of, 0, num_items)
    while item >= 0:
        taken[place] = item
        place += 1
        item = next_item(of, 0, num_items)
    await_done(of, 0, num_items)
    close_round(team, threads, number)


def test_a_thread_takes_its_own_run_first_and_then_what_others_leave() -> None:
    """Neighbours one after the other: what is asked for ahead is what comes next. Places without an item are passed."""
    team = Team(1, lambda _address, _each: None)
    lanes = Team(3, lambda _address, _each: None)  # its helpers end at once: memory for three lanes is what is wanted
    for num_items, thread, expected in (
        (5, 0, [0, 1, 2, 3, 4]),
        (5, 1, [2, 3, 4, 0, 1]),
        (7, 2, [6, 0, 1, 2, 3, 4, 5]),
    ):
        taken: npt.NDArray[np.int64] = np.full(num_items, -1, dtype=np.int64)
        _take_all(lanes.address, num_items, thread, 3, taken)
        assert expected == taken.tolist()
    alone: npt.NDArray[np.int64] = np.full(4, -1, dtype=np.int64)
    _take_all(team.address, 4, 0, 1, alone)
    assert [0, 1, 2, 3] == alone.tolist()


def test_close_ends_the_helpers_and_may_come_twice() -> None:
    """No thread of a closed team is left; the leader can still compute alone."""
    team, counts, faults = _start(3)
    helpers = list(team.threads)
    assert [True, True] == [thread.is_alive() for thread in helpers]
    team.close()
    team.close()
    assert [False, False] == [thread.is_alive() for thread in helpers]
    _run(team.address, counts, faults, 1, 0)
    assert counts.sum() == _ITEMS * _PHASES


def test_a_forgotten_team_ends_its_helpers() -> None:
    """Nobody needs to close a model that is dropped."""
    team, _, _ = _start(2)
    helpers = list(team.threads)
    del team
    helpers[0].join(timeout=30)
    assert not helpers[0].is_alive()


def test_a_team_has_a_leader() -> None:
    """Zero threads compute nothing."""
    with pytest.raises(ValueError, match="at least one thread"):
        _start(0)
