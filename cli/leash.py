"""`python -P -m cli.leash PARENT_PID COMMAND…`: becomes COMMAND, which the kernel kills when its parent dies.

This is what leaves nothing behind after `kill -9` of `firsttoken up`: no handler of ours runs then. The order is kept
by exec (the signal survives it), so the leash costs one interpreter start and no process. Linux only; elsewhere it
just becomes the command. Nothing but the standard library is imported here.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie_to_parent(parent_pid: int) -> None:
    """Raises OSError if the kernel refuses; exits if the parent is gone already (it died before we asked)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")


def main(arguments: list[str]) -> None:
    """Does not return."""
    parent_pid, *command = arguments
    tie_to_parent(int(parent_pid))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
