"""Tests of `shared.engine.step_loop`."""

import asyncio
import threading

import pytest

from shared.engine import step_loop
from shared.engine.step_loop import MAX_UNDELIVERED_REPORTS, StepLoop


class _Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    def unix_ms(self) -> int:
        return 0


class _Runner:
    """A command n makes n steps; 0 is only answered, -1 breaks the thread. `gate` holds a step."""

    def __init__(self) -> None:
        self.left = 0
        self.answers: list[str] = []
        self.num_steps = 0
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.was_idle = threading.Event()
        self.is_interrupted = False

    @property
    def has_work(self) -> bool:
        if not self.left:
            self.was_idle.set()  # asked where no command waits: what comes now finds the thread asleep
        return self.left > 0

    def apply(self, command: int) -> None:
        if command < 0:
            raise ArithmeticError("told to")
        self.answers.append(f"answer {command}")
        self.left += command

    def acknowledge(self) -> str | None:
        if not self.answers:
            return None
        answer = ", ".join(self.answers)
        self.answers.clear()
        return answer

    def step(self) -> str | None:
        self.threads.add(threading.current_thread().name)
        if not self.left:
            return None
        self.in_step.set()
        self.gate.wait()
        self.left -= 1
        self.num_steps += 1
        return f"step {self.num_steps}"

    def interrupt(self) -> None:
        self.is_interrupted = True
        self.gate.set()


class _Harness:
    """A loop with a runner, its reports in a queue, its deaths in a list."""

    def __init__(self) -> None:
        self.runner = _Runner()
        self.clock = _Clock()
        self.reports: asyncio.Queue[str] = asyncio.Queue()
        self.deaths: asyncio.Queue[BaseException] = asyncio.Queue()
        self.loop: StepLoop[int, str] = StepLoop(
            self.runner, self.reports.put_nowait, on_dead=self.deaths.put_nowait, clock=self.clock
        )

    async def take(self, count: int) -> list[str]:
        async with asyncio.timeout(30):
            return [await self.reports.get() for _ in range(count)]


async def _in_step(harness: _Harness) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, harness.runner.in_step.wait, 60)


async def _idle(harness: _Harness) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, harness.runner.was_idle.wait, 60)


async def test_answers_and_steps_come_in_order_from_one_thread() -> None:
    """A command's answer precedes the step after it; the runner is driven on the engine thread alone."""
    harness = _Harness()
    harness.loop.start()
    harness.loop.submit(2)
    reports = await harness.take(3)
    harness.loop.submit(0)
    reports += await harness.take(1)
    await harness.loop.stop()

    assert ["answer 2", "step 1", "step 2", "answer 0"] == reports
    assert {"engine"} == harness.runner.threads


async def test_commands_during_a_step_wait_for_its_border() -> None:
    """They are applied together when it ends, and answered before the next step."""
    harness = _Harness()
    harness.runner.gate.clear()
    harness.loop.start()
    harness.loop.submit(2)
    await _in_step(harness)
    harness.loop.submit(1)
    harness.loop.submit(0)
    harness.runner.gate.set()
    reports = await harness.take(5)
    await harness.loop.stop()

    assert ["answer 2", "step 1", "answer 1, answer 0", "step 2", "step 3"] == reports


async def test_the_age_of_a_step_tells_a_stall() -> None:
    """0 while idle, and the time since the last border while busy."""
    harness = _Harness()
    harness.runner.gate.clear()
    before = (harness.loop.is_busy, harness.loop.last_step_age())
    harness.loop.start()
    harness.loop.submit(1)
    await _in_step(harness)
    harness.clock.now += 11
    during = (harness.loop.is_busy, harness.loop.last_step_age())
    harness.runner.gate.set()
    await harness.take(2)
    await harness.loop.stop()

    assert [(False, 0.0), (True, 11.0), (False, 0.0)] == [
        before,
        during,
        (harness.loop.is_busy, harness.loop.last_step_age()),
    ]


async def test_stop_interrupts_a_step_and_delivers_nothing_more() -> None:
    """What waited is dropped; stopping twice is fine."""
    harness = _Harness()
    harness.runner.gate.clear()
    harness.loop.start()
    harness.loop.submit(5)
    await _in_step(harness)
    await harness.take(1)
    await harness.loop.stop()
    await harness.loop.stop()

    assert (True, 0, 0) == (harness.runner.is_interrupted, harness.reports.qsize(), harness.deaths.qsize())
    assert harness.runner.num_steps <= 1


async def test_stop_gives_up_on_a_stuck_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is a daemon: it cannot hold the exit of the process."""
    monkeypatch.setattr(step_loop, "MAX_STOP_S", 0.01)
    harness, before = _Harness(), set(threading.enumerate())
    harness.runner.gate.clear()
    monkeypatch.setattr(harness.runner, "interrupt", lambda: None)
    harness.loop.start()
    harness.loop.submit(1)
    await _in_step(harness)
    await harness.loop.stop()
    engine_threads = [thread for thread in threading.enumerate() if thread.name == "engine" and thread not in before]
    harness.runner.gate.set()

    assert [True] == [thread.daemon for thread in engine_threads]
    engine_threads[0].join(60)


async def test_a_dead_thread_is_told_once() -> None:
    """The exception arrives on the event loop, and the loop is not busy any more."""
    harness = _Harness()
    harness.loop.start()
    harness.loop.submit(-1)
    async with asyncio.timeout(30):
        death = await harness.deaths.get()
    await harness.loop.stop()

    assert isinstance(death, ArithmeticError)
    assert (0, False) == (harness.deaths.qsize(), harness.loop.is_busy)


async def test_a_late_event_loop_makes_the_engine_wait() -> None:
    """Reports that nobody takes are bounded: the thread is stopped after so many, and goes on when they are taken."""
    harness = _Harness()
    harness.loop.start()
    harness.loop.submit(200)
    reached = threading.Event()
    for _ in range(30_000):  # the event loop is held here, so nothing is delivered meanwhile
        reached.wait(0.002)
        if harness.runner.num_steps >= MAX_UNDELIVERED_REPORTS:
            break
    reached.wait(0.02)
    num_steps_ahead = harness.runner.num_steps
    reports = await harness.take(201)
    await harness.loop.stop()

    # One report was the answer, and one more step may be done before its report has to wait.
    assert MAX_UNDELIVERED_REPORTS == num_steps_ahead
    assert "step 200" == reports[-1]


async def test_the_command_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No correct caller gets there; one that does is told."""
    monkeypatch.setattr(step_loop, "MAX_COMMANDS", 2)
    harness = _Harness()
    harness.loop.submit(0)
    harness.loop.submit(0)

    with pytest.raises(OverflowError):
        harness.loop.submit(0)
    await harness.loop.stop()


async def test_start_twice_is_a_bug() -> None:
    """Two threads would share one executor."""
    harness = _Harness()
    harness.loop.start()

    with pytest.raises(RuntimeError, match="started before"):
        harness.loop.start()
    await harness.loop.stop()


async def test_what_a_step_tells_comes_before_its_report() -> None:
    """In the order of telling, on the event loop; after a stop nothing more."""
    harness = _Harness()
    heard: list[str] = []
    step = harness.runner.step

    def telling_step() -> str | None:
        report = step()
        if report is not None:
            harness.loop.tell(harness.reports.put_nowait, f"half of {report}")
            harness.loop.tell(heard.append, report)
        return report

    harness.runner.step = telling_step
    harness.loop.start()
    harness.loop.submit(2)
    reports = await harness.take(5)
    await harness.loop.stop()

    assert ["answer 2", "half of step 1", "step 1", "half of step 2", "step 2"] == reports
    assert ["step 1", "step 2"] == heard


async def test_a_step_after_idleness_waits_for_company_while_there_is_room() -> None:
    """The second command comes while the first waits: one answer for both before the first step, which then begins."""
    harness = _Harness()
    harness.loop = StepLoop(
        harness.runner,
        harness.reports.put_nowait,
        on_dead=harness.deaths.put_nowait,
        clock=harness.clock,
        fill_wait_s=60.0,
        has_room=lambda: harness.runner.left < 2,
    )
    harness.loop.start()
    await _idle(harness)
    harness.loop.submit(1)
    harness.loop.submit(1)
    reports = await harness.take(3)
    await harness.loop.stop()

    assert ["answer 1, answer 1", "step 1", "step 2"] == reports


async def test_the_wait_for_company_is_bounded() -> None:
    """Alone, the step begins after the time that was given; a stop ends the wait at once."""
    harness = _Harness()
    harness.loop = StepLoop(
        harness.runner,
        harness.reports.put_nowait,
        on_dead=harness.deaths.put_nowait,
        clock=harness.clock,
        fill_wait_s=0.01,
        has_room=lambda: True,
    )
    harness.loop.start()
    await _idle(harness)
    harness.loop.submit(1)

    assert ["answer 1", "step 1"] == await harness.take(2)
    await harness.loop.stop()
