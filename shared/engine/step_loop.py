"""The engine's thread: commands in by a queue, one report out per step, asleep when there is nothing to compute."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shared.domain.clock import Clock

_Command = TypeVar("_Command")
_Report = TypeVar("_Report")
_Note = TypeVar("_Note")
_Command_contra = TypeVar("_Command_contra", contravariant=True)
_Report_co = TypeVar("_Report_co", covariant=True)

# Between two steps a sequence gives one command to begin, one to leave and at most one grant for each token that its
# outbox holds (256): this is that for 256 sequences, doubled. Reaching it means that someone submits without cause.
MAX_COMMANDS = 1 << 17
# A report is as large as the batch. The event loop normally takes each before the next step ends; when it is late by
# this many, the engine waits for it.
MAX_UNDELIVERED_REPORTS = 16
MAX_STOP_S = 10.0  # a step of a large model on a slow CPU; the thread is a daemon, so a stuck one cannot hold the exit


class Runner(Protocol[_Command_contra, _Report_co]):
    """What the thread drives. Called from the engine thread alone, but for `interrupt`."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        ...

    def apply(self, command: _Command_contra, /) -> None: ...

    def acknowledge(self) -> _Report_co | None:
        """Answers to the commands applied since the last call, told before the next step begins; None without any."""
        ...

    def step(self) -> _Report_co | None:
        """One step over what can run now; None when there was nothing to do."""
        ...

    def interrupt(self) -> None: ...


class StepLoop(Generic[_Command, _Report]):
    """Owns the thread. All methods are called from the event loop that started it.

    Commands are applied, and those that want an answer are answered, in order at the next border between steps, so a
    sequence leaves after at most one step. `deliver` gets a report of each step, and one before it if there are
    answers, in order, on the event loop. `on_dead` is called there once if the thread ends by an exception; after it
    nothing is delivered, and the process should end.
    """

    def __init__(
        self,
        runner: Runner[_Command, _Report],
        deliver: Callable[[_Report], None],
        *,
        on_dead: Callable[[BaseException], None],
        clock: Clock,
        fill_wait_s: float = 0.0,
        has_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """`fill_wait_s`: a step after idleness waits so long at most for further commands, while `has_room`."""
        self._runner = runner
        self._deliver = deliver
        self._on_dead = on_dead
        self._clock = clock
        self._fill_wait_s = fill_wait_s
        self._has_room = has_room
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED_REPORTS)
        self._is_stopping = False
        self._was_idle = False
        self._busy_since: float | None = None
        self._ended = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; needs a running event loop, which gets the reports."""
        if self._event_loop is not None:
            raise RuntimeError("the step loop has been started before")
        self._event_loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(self._event_loop,), name="engine", daemon=True).start()

    def submit(self, command: _Command) -> None:
        """Hand over a command; never blocks. Raises OverflowError at MAX_COMMANDS, which no correct caller reaches."""
        with self._changed:
            if len(self._commands) >= MAX_COMMANDS:
                raise OverflowError("the engine's command queue is full")
            self._commands.append(command)
            self._changed.notify()

    def tell(self, deliver: Callable[[_Note], None], note: _Note) -> None:
        """From within a step, in its thread: `deliver(note)` on the event loop, before the report of the step."""
        assert self._event_loop is not None
        self._call(self._event_loop, deliver, note)

    @property
    def is_busy(self) -> bool:
        """Whether a step runs, or is about to."""
        return self._busy_since is not None

    def last_step_age(self) -> float:
        """Seconds since the thread last passed a border between steps; 0 while it has nothing to do."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else max(self._clock.monotonic() - busy_since, 0.0)

    async def stop(self) -> None:
        """End the thread at the next border, dropping what waits; idempotent. Leaves a stuck step after MAX_STOP_S."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._undelivered.release()  # should it be waiting for this very event loop
        self._runner.interrupt()
        if self._event_loop is None:
            return
        try:
            async with asyncio.timeout(MAX_STOP_S):
                await self._ended.wait()
        except TimeoutError:
            return

    def _run(self, event_loop: asyncio.AbstractEventLoop) -> None:
        try:
            while (commands := self._take()) is not None:
                for command in commands:
                    self._runner.apply(command)
                if self._was_idle and self._fill_wait_s > 0:
                    self._fill()
                self._post(event_loop, self._runner.acknowledge())
                self._post(event_loop, self._runner.step())
        except BaseException as error:  # noqa: BLE001 - root of a thread: the process must learn of it
            _call(event_loop, self._on_dead, error)
        finally:
            self._busy_since = None
            _call(event_loop, self._ended.set)

    def _fill(self) -> None:
        """Whoever comes now shares the step that is about to begin. While one runs, the next fills by itself."""
        until = self._clock.monotonic() + self._fill_wait_s
        while self._has_room():
            with self._changed:
                left_s = until - self._clock.monotonic()
                if not self._changed.wait_for(lambda: self._commands or self._is_stopping, left_s):
                    return
                if self._is_stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                self._runner.apply(command)

    def _take(self) -> list[_Command] | None:
        """Wait for commands or work; None when it is time to stop."""
        with self._changed:
            self._was_idle = False
            while not (self._is_stopping or self._commands or self._runner.has_work):
                self._was_idle = True
                self._busy_since = None
                self._changed.wait()
            if self._is_stopping:
                return None
            self._busy_since = self._clock.monotonic()
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _post(self, event_loop: asyncio.AbstractEventLoop, report: _Report | None) -> None:
        if report is not None:
            self._call(event_loop, self._deliver, report)

    def _call(self, event_loop: asyncio.AbstractEventLoop, deliver: Callable[[_Note], None], note: _Note) -> None:
        self._undelivered.acquire()
        _call(event_loop, self._deliver_one, deliver, note)

    def _deliver_one(self, deliver: Callable[[_Note], None], note: _Note) -> None:
        self._undelivered.release()
        if not self._is_stopping:
            deliver(note)


def _call(event_loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    try:
        event_loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return  # the event loop is closed: the process is ending and nobody is left to tell
