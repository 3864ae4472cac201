"""Keeps the children of `firsttoken up` running: starts, restarts with backoff, drains in order, leaves none behind.

A child that ends before everything was ready once is shown with its last lines; a few times of that, or one start
with bad settings, ends the whole run. After that a dead child is restarted for ever, at most every MAX_RESTART_DELAY_S.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

from cli.child import Child, describe_exit
from cli.plan import ChildSpec, DrainStage
from cli.problem import EXIT_FAILED, EXIT_USAGE, CommandProblem
from cli.run_folder import RunFolder
from shared.aio.backoff import Backoff

FIRST_RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 10.0
STEADY_AFTER_S = 30.0  # a child that lived this long starts its next backoff from the beginning
MAX_DEATHS_BEFORE_READY = 3
KILL_TIMEOUT_S = 5.0  # the kernel needs moments; more only for a process that hangs in the kernel itself
NUM_TAIL_LINES = 12


class Supervisor:
    """One per run. `say` gets one line a note. Call `run` once; `stop` from any task; `kill` at any time."""

    def __init__(self, folder: RunFolder, *, drain_timeout_s: float, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._drain_timeout_s = drain_timeout_s
        self._say = say
        self._children: dict[str, tuple[ChildSpec, Child]] = {}
        self._was_ready = False
        self._stopping = asyncio.Event()

    def set_ready(self) -> None:
        """From now on a dead child is restarted without limit."""
        self._was_ready = True

    @property
    def pids(self) -> dict[str, int]:
        """Of the children that run now."""
        return {child_id: child.pid for child_id, (_, child) in self._children.items() if child.is_running}

    async def keep(self, spec: ChildSpec) -> None:
        """Runs one child until `stop`. Raises CommandProblem if it cannot come up at all."""
        backoff = Backoff(initial_s=FIRST_RESTART_DELAY_S, max_s=MAX_RESTART_DELAY_S, random=random.random)
        num_deaths = 0
        while not self._stopping.is_set():
            started_at = asyncio.get_running_loop().time()
            log_begin = self._folder.log_size(spec.child_id)
            code = await self._run_once(spec)
            if self._stopping.is_set():
                return
            num_deaths += 1
            if asyncio.get_running_loop().time() - started_at > STEADY_AFTER_S:
                backoff.reset()
            self._judge(spec.child_id, code, num_deaths, log_begin)
            delay_s = backoff.next_delay()
            self._say(
                f"{spec.child_id} ended with {describe_exit(code)}; starting it again in {delay_s:.1f} s "
                f"(log: {self._folder.log_path(spec.child_id)})"
            )
            await self._wait_for_stop(delay_s)

    async def _run_once(self, spec: ChildSpec) -> int:
        """One life of a child; returns its exit code. One that cannot even be started counts as one that failed."""
        try:
            child = await Child.start(spec, self._folder.log_path(spec.child_id))
        except OSError as error:
            self._say(f"{spec.child_id} cannot be started: {error}")
            return EXIT_FAILED
        self._children[spec.child_id] = (spec, child)
        if self._stopping.is_set():  # the stop came while it was being started, and did not see it
            child.kill()
        return await child.wait()

    def _judge(self, child_id: str, code: int, num_deaths: int, log_begin: int) -> None:
        """Shows why a child does not come up; raises CommandProblem when another start makes no sense."""
        if self._was_ready:
            return
        for line in self._folder.tail(child_id, NUM_TAIL_LINES, begin=log_begin):
            self._say(f"  {child_id} | {line}")
        if code == EXIT_USAGE or num_deaths >= MAX_DEATHS_BEFORE_READY:
            raise CommandProblem(
                f"{child_id} does not start ({describe_exit(code)}, {num_deaths} tries); "
                f"its log is {self._folder.log_path(child_id)}"
            )

    async def _wait_for_stop(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def stop(self) -> None:
        """Drains stage by stage: each is told to stop, has its time, and is killed if it takes longer."""
        self._stopping.set()
        for stage in DrainStage:
            running = [child for spec, child in self._children.values() if spec.stage is stage and child.is_running]
            for child in running:
                child.terminate()
            if not await _all_ended(running, self._drain_timeout_s):
                names = ", ".join(self._names(child for child in running if child.is_running))
                self._say(f"{names} did not stop within {self._drain_timeout_s:.0f} s: killed")
                self.kill(stage)
                await _all_ended(running, KILL_TIMEOUT_S)

    def kill(self, stage: DrainStage | None = None) -> None:
        """At once: all children, or those of one stage."""
        self._stopping.set()
        for spec, child in self._children.values():
            if stage is None or spec.stage is stage:
                child.kill()

    async def end_all(self) -> None:
        """Nothing of this run is left afterwards, whatever happened before."""
        self.kill()
        await _all_ended([child for _, child in self._children.values()], KILL_TIMEOUT_S)

    def _names(self, children: Iterable[Child]) -> list[str]:
        wanted = {child.pid for child in children}
        return [child_id for child_id, (_, child) in self._children.items() if child.pid in wanted]


async def _all_ended(children: list[Child], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.wait()
    except TimeoutError:
        return False
    return True
