"""Threads that compute one step together: they take items of work in order and wait only for work, never for threads.

numba's own parallel loops take the interpreter's lock at the start of each, some 200 times a step, and wait until every
thread has come. Here a step is one piece of compiled code that all threads run at the same time:

    ticket = atomic_add(next)            each thread always holds one ticket, the number of an item of the step
    phase of items [first, end):
        while ticket < end:              the items of a phase in any order, by any thread
            work on item ticket - first
            ticket = finish(team)        counts the item as done, takes the next ticket
        await_done(team, end)            until the phase's items are done, whoever does them

A thread that comes late finds most items taken and goes through; if it never comes, the others do everything. So the
thread that leads starts at once, and a helper's wake-up costs nothing but its share. Which thread does an item changes
no bit: an item's result depends on the item alone.

Memory of a team, in words of 8 bytes, each counter in a cache line of its own:

    0 next ticket | 8 items done | 16 step is open | 24 helpers inside | 32 stop | 40 semaphore of 32 bytes
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
    atomic_store,
    relax,
    semaphore_post,
    semaphore_try,
    semaphore_wait,
    yield_core,
)

_NEXT, _DONE, _OPEN, _INSIDE, _STOP, _SEMAPHORE = 0, 64, 128, 192, 256, 320  # bytes
_TEAM_WORDS = 48
_SPINS = 2000
"""Turns of a waiting loop, some 20 ns each, before a thread gives its core away: an item takes 1 to 30 us."""


@compiled
def take(team: int) -> int:
    """A first ticket."""
    return atomic_add(team + _NEXT, 1)


@compiled
def finish(team: int) -> int:
    """The item of the ticket held is done; returns the next ticket."""
    atomic_add(team + _DONE, 1)
    return atomic_add(team + _NEXT, 1)


@compiled
def await_done(team: int, end: int) -> None:
    """Until items [0, end) of the step are done and what they wrote is visible."""
    while True:
        for _ in range(_SPINS):
            if atomic_load(team + _DONE) >= end:
                return
            relax()
        yield_core()


@compiled
def open_step(team: int, num_helpers: int) -> None:
    """By the leader, before it runs the step itself."""
    atomic_store(team + _NEXT, 0)
    atomic_store(team + _DONE, 0)
    atomic_add(team + _OPEN, 1)
    for _ in range(num_helpers):
        semaphore_post(team + _SEMAPHORE)


@compiled
def close_step(team: int) -> None:
    """By the leader, after its own run of the step: returns when no helper is inside any more."""
    atomic_add(team + _OPEN, -1)
    while True:
        for _ in range(_SPINS):
            if atomic_load(team + _INSIDE) == 0:
                return
            relax()
        yield_core()


@compiled
def enter(team: int) -> int:
    """By a helper: waits for work. 1: a step is open, call `leave` after it; 0: none any more; -1: the team ends."""
    for _ in range(_SPINS):
        if semaphore_try(team + _SEMAPHORE) == 0:
            break
        relax()
    else:
        semaphore_wait(team + _SEMAPHORE)
    if atomic_load(team + _STOP) != 0:
        return -1
    # Inside is told before open is read, and the leader closes before it looks who is inside: one of the two sees.
    atomic_add(team + _INSIDE, 1)
    if atomic_load(team + _OPEN) != 0:
        return 1
    atomic_add(team + _INSIDE, -1)
    return 0


@compiled
def leave(team: int) -> None:
    """By a helper, after its run of the step."""
    atomic_add(team + _INSIDE, -1)


class Team:
    """The leader's helpers: `num_threads - 1` threads that run `help_until_stopped(team address, thread number)`.

    That function is compiled code that loops over `enter`, the step, `leave`. The helpers are daemons and end when the
    team is closed or forgotten; one thread at a time may lead.
    """

    def __init__(self, num_threads: int, help_until_stopped: Callable[[int, int], Any]) -> None:
        if num_threads < 1:
            raise ValueError("a team has at least one thread, the leader")
        self.num_threads = num_threads
        self._memory: npt.NDArray[np.int64] = np.zeros(_TEAM_WORDS + 7, dtype=np.int64)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        if _c_library().sem_init(ctypes.c_void_p(self.address + _SEMAPHORE), 0, 0):
            raise OSError("this system has no semaphores inside a process")
        self._threads = [
            threading.Thread(target=_help, args=(self._memory, help_until_stopped, self.address, each), daemon=True)
            for each in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._memory, self.address, num_threads - 1)

    @property
    def num_helpers(self) -> int:
        return self.num_threads - 1

    def close(self) -> None:
        """End the helpers and wait for them."""
        self._end()
        for thread in self._threads:
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
