"""What is tied to a parent does not outlive it, however the parent dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")

PARENT = """
import os, subprocess, sys
leash = [sys.executable, "-P", "-m", "cli.leash", str(os.getpid())]
child = subprocess.Popen([*leash, sys.executable, "-P", "-c", "import signal; print('up', flush=True); signal.pause()"],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_kill_9_of_the_parent_takes_the_child_along() -> None:
    """No handler of the parent runs; the kernel does it."""
    with subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert _is_alive(child_pid)

        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()

        ends_at = time.monotonic() + 60
        while _is_alive(child_pid) and time.monotonic() < ends_at:
            time.sleep(0.01)
        assert not _is_alive(child_pid)


def test_a_parent_that_is_gone_already_means_no_start() -> None:
    """It died between the fork and our asking the kernel: the command must not run at all."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli.leash", str(os.getppid()), sys.executable, "-c", "print('ran')"],
        check=False,
        capture_output=True,
        text=True,
    )

    assert 1 == done.returncode
    assert "" == done.stdout
    assert "gone" in done.stderr
