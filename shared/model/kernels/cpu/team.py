"""Threads that compute one step together: they take items of work in order and wait only for work, never for threads.

numba's own parallel loops take the interpreter's lock at the start of each, some 200 times a step, and wait until every
thread has come. Here a step is one piece of compiled code that all threads run at the same time:

    item = first_item(round, begin, num_items)       one that nobody has, or -1
    while item >= 0:
        work on the item
        item = next_item(round, begin, num_items)    counts it as done, takes another
    begin = await_done(round, begin, num_items)      until the phase's items are done, whoever does them

Each thread has a lane: the items of a phase are dealt to the lanes in equal runs of neighbours, so that a thread reads
memory onwards and what it has asked for ahead is its own. A thread whose lane is empty takes what is left of others.
So a thread that comes late finds items taken and goes through; if it never comes, the others do everything. The thread
that leads starts at once, a helper's wake-up costs nothing but its share, and a helper whose core was taken away keeps
nobody waiting unless it was in the middle of an item. Which thread does an item changes no bit: an item's result
depends on the item alone.

A lane is a row of places, through all phases of a step: `begin` is the place where a phase begins, the same in each
lane. Lanes are equally long: a place without an item counts as done when it is taken.

Each step is a round, an odd number; between steps the number is even. A helper that is still on its way through an old
round gets no item any more, whatever it reads of the new step.

Memory of a team, in bytes, each counter in a cache line of its own:

    0 places done | 64 stop | 128 semaphore of 32 bytes | 192 lane 0: round x 2^32 + next place | 256 lane 1 ...
"""

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model.kernels.cpu.jit import compiled
from shared.model.kernels.cpu.words import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    relax,
    semaphore_post,
    semaphore_try,
    semaphore_wait,
    yield_core,
)

_DONE, _STOP, _SEMAPHORE, _LANES = 0, 64, 128, 192
_LINE = 64
_ROUND = 1 << 32
_SPINS = 2000
"""Turns of a waiting loop, some 20 ns each, before a thread gives its core away: an item takes 1 to 30 us."""


Round = tuple[int, int, int, int]
"""Address of the team, number of the round, this thread and the number of lanes, for compiled code."""


@compiled
def places_of(num_lanes: int, num_items: int) -> int:
    """Places of a lane in a phase; lane n has the items from n x as many on."""
    return (num_items + num_lanes - 1) // num_lanes


@compiled
def first_item(of: Round, begin: int, num_items: int) -> int:
    """An item of the phase that is this thread's now, or -1."""
    team, number, thread, num_lanes = of
    places = places_of(num_lanes, num_items)
    for turn in range(num_lanes):
        lane = thread + turn
        if lane >= num_lanes:
            lane -= num_lanes
        next_place = team + _LANES + lane * _LINE
        while True:
            word = atomic_load(next_place)
            place = word % _ROUND - begin
            if word // _ROUND != number or place >= places:
                break
            if atomic_replace(next_place, word, word + 1) == word:
                item = lane * places + place
                if item < num_items:
                    return item
                atomic_add(team + _DONE, 1)
    return -1


@compiled
def next_item(of: Round, begin: int, num_items: int) -> int:
    """Counts the item held as done; another, or -1."""
    atomic_add(of[0] + _DONE, 1)
    return first_item(of, begin, num_items)


@compiled
def await_done(of: Round, begin: int, num_items: int) -> int:
    """Until the phase is done and what it wrote is visible, or the round is over; returns where the next begins."""
    team, number, _, num_lanes = of
    end = begin + places_of(num_lanes, num_items)
    while True:
        for _ in range(_SPINS):
            if atomic_load(team + _DONE) >= end * num_lanes or atomic_load(team + _LANES) // _ROUND != number:
                return end
            relax()
        yield_core()


@compiled
def open_round(team: int, num_lanes: int) -> int:
    """By the leader, before it runs the step itself; returns the round's number."""
    number = atomic_load(team + _LANES) // _ROUND + 1
    atomic_store(team + _DONE, 0)
    _set_lanes(team, num_lanes, number)
    for _ in range(num_lanes - 1):
        semaphore_post(team + _SEMAPHORE)
    return number


@compiled
def close_round(team: int, num_lanes: int, number: int) -> None:
    """By the leader, after its own run of the step, with which all items are done."""
    _set_lanes(team, num_lanes, number + 1)


@compiled
def _set_lanes(team: int, num_lanes: int, number: int) -> None:
    """All at their beginning; the first as the last, whose number is that of the round."""
    for lane in range(num_lanes - 1, -1, -1):
        atomic_store(team + _LANES + lane * _LINE, number * _ROUND)


@compiled
def join_round(team: int) -> int:
    """By a helper: waits for work. The number of a round to run; 0: none any more, ask again; -1: the team ends."""
    for _ in range(_SPINS):
        if semaphore_try(team + _SEMAPHORE) == 0:
            break
        relax()
    else:
        semaphore_wait(team + _SEMAPHORE)
    if atomic_load(team + _STOP) != 0:
        return -1
    number = atomic_load(team + _LANES) // _ROUND
    return number if number % 2 == 1 else 0


class Team:
    """The leader's helpers: `num_threads - 1` threads that run `help_until_stopped(team address, thread number)`.

    That function is compiled code that loops over `join_round` and the step. The helpers are daemons and end when the
    team is closed or forgotten; one thread at a time may lead.
    """

    def __init__(self, num_threads: int, help_until_stopped: Callable[[int, int], Any]) -> None:
        if num_threads < 1:
            raise ValueError("a team has at least one thread, the leader")
        self.num_threads = num_threads
        self._memory: npt.NDArray[np.int64] = np.zeros((_LANES + (num_threads + 1) * _LINE) // 8, dtype=np.int64)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        if _c_library().sem_init(ctypes.c_void_p(self.address + _SEMAPHORE), 0, 0):
            raise OSError("this system has no semaphores inside a process")
        self.threads = [
            threading.Thread(target=_help, args=(self._memory, help_until_stopped, self.address, each), daemon=True)
            for each in range(1, num_threads)
        ]
        for thread in self.threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._memory, self.address, num_threads - 1)

    def close(self) -> None:
        """End the helpers and wait for them."""
        self._end()
        for thread in self.threads:
            thread.join()


def _help(memory: npt.NDArray[np.int64], run: Callable[[int, int], Any], address: int, thread: int) -> None:
    """A helper's life; it holds the team's memory, so that a forgotten team's words stay until it has ended."""
    run(address, thread)
    del memory


def _stop(memory: npt.NDArray[np.int64], address: int, num_helpers: int) -> None:
    memory[(address + _STOP - memory.ctypes.data) // 8] = 1
    for _ in range(num_helpers):
        _c_library().sem_post(ctypes.c_void_p(address + _SEMAPHORE))


def _c_library() -> ctypes.CDLL:
    """Functions of the process itself, the C library's among them."""
    return ctypes.CDLL(None)
