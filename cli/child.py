"""One child process of `firsttoken up`: started on a leash, in a session of its own, with its log in a file."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from cli.plan import ChildSpec


class Child:
    """One start of one ChildSpec. Whoever calls `start` must see to it that `wait` is awaited or `kill` called."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec, log_path: Path) -> "Child":
        """Raises OSError. The own session keeps a terminal's Ctrl-C away: `up` alone decides the order of the drain.

        Must be called from the main thread: the kernel ties the leash to the thread that forked.
        """
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "cli.leash", str(os.getpid()), *spec.command),
                env=dict(spec.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        """Also its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once its end has been seen."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code; negative: the signal that killed it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """It and whatever it started."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass


def describe_exit(code: int) -> str:
    """For people: `exit code 1`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
