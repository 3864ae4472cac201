"""Threads that compute one step together: they take items of work in order and wait only for work, never for threads.

numba's own parallel loops take the interpreter's lock at the start of each, some 200 times a step, and wait until every
thread has come. Here a step is one piece of compiled code that all threads run at the same time:

    phase of items [begin, end):
        item = first_item(round, end)     the next item that nobody has, or -1
        while item >= 0:
            work on item - begin
            item = next_item(round, end)  counts it as done, takes another
        await_done(round, end)            until the phase's items are done, whoever does them

A thread that comes late finds items taken and goes through; if it never comes, the others do everything. So the thread
that leads starts at once, a helper's wake-up costs nothing but its share, and a helper whose core was taken away keeps
nobody waiting unless it was in the middle of an item. Which thread does an item changes no bit: an item's result
depends on the item alone.

Each step is a round, an odd number; between steps the number is even. A helper that is still on its way through an old
round gets no item any more, whatever it reads of the new step.

Memory of a team, in bytes, each counter in a cache line of its own:

    0 round x 2^32 + next item | 64 items done | 128 stop | 192 semaphore of 32 bytes
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

_NEXT, _DONE, _STOP, _SEMAPHORE = 0, 64, 128, 192
_TEAM_BYTES = 256
_ROUND = 1 << 32
_SPINS = 2000
"""Turns of a waiting loop, some 20 ns each, before a thread gives its core away: an item takes 1 to 30 us."""


Round = tuple[int, int]
"""Address of the team and number of the round, for compiled code."""


@compiled
def first_item(of: Round, end: int) -> int:
    """An item below `end` of the round that is this thread's now, or -1."""
    team, number = of
    while True:
        word = atomic_load(team + _NEXT)
        item = word % _ROUND
        if word // _ROUND != number or item >= end:
            return -1
        if atomic_replace(team + _NEXT, word, word + 1) == word:
            return item


@compiled
def next_item(of: Round, end: int) -> int:
    """Counts the item held as done; another, or -1."""
    atomic_add(of[0] + _DONE, 1)
    return first_item(of, end)


@compiled
def await_done(of: Round, end: int) -> None:
    """Until items [0, end) of the round are done and what they wrote is visible, or the round is over."""
    team, number = of
    while True:
        for _ in range(_SPINS):
            if atomic_load(team + _DONE) >= end or atomic_load(team + _NEXT) // _ROUND != number:
                return
            relax()
        yield_core()


@compiled
def open_round(team: int, num_helpers: int) -> int:
    """By the leader, before it runs the step itself; returns the round's number."""
    number = atomic_load(team + _NEXT) // _ROUND + 1
    atomic_store(team + _DONE, 0)
    atomic_store(team + _NEXT, number * _ROUND)
    for _ in range(num_helpers):
        semaphore_post(team + _SEMAPHORE)
    return number


@compiled
def close_round(team: int, number: int) -> None:
    """By the leader, after its own run of the step, with which all items are done."""
    atomic_store(team + _NEXT, (number + 1) * _ROUND)


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
    number = atomic_load(team + _NEXT) // _ROUND
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
        self._memory: npt.NDArray[np.int64] = np.zeros(_TEAM_BYTES // 8 + 7, dtype=np.int64)
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

    @property
    def num_helpers(self) -> int:
        return self.num_threads - 1

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
