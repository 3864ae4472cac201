"""A child on its leash: log, process group, exit, and the death of its parent."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from cli.child import Child, describe_exit
from cli.plan import ChildSpec, DrainStage


def python_child(code: str, child_id: str = "child-0", stage: DrainStage = DrainStage.CORE) -> ChildSpec:
    """A child that runs a few lines of Python."""
    return ChildSpec(
        child_id=child_id, command=(sys.executable, "-P", "-c", code), environ=dict(os.environ), stage=stage
    )


async def test_output_goes_to_the_log(tmp_path: Path) -> None:
    """stdout and stderr, appended, so that a restart keeps what the first start said."""
    log = tmp_path / "log"
    log.write_text("before\n")
    spec = python_child("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")

    child = await Child.start(spec, log)

    assert 3 == await child.wait()
    assert not child.is_running
    assert {"before", "out", "err"} == set(log.read_text().split())


async def test_a_child_is_out_of_reach_of_the_terminal(tmp_path: Path) -> None:
    """Its own session: Ctrl-C goes to `up` alone, which decides the order."""
    child = await Child.start(python_child("import signal; signal.pause()"), tmp_path / "log")

    assert os.getsid(child.pid) == child.pid
    assert os.getsid(0) != child.pid

    child.kill()
    assert -signal.SIGKILL == await child.wait()


async def test_terminate_asks(tmp_path: Path) -> None:
    """SIGTERM, which a service answers with a drain."""
    code = (
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('up', flush=True); signal.sigwait({signal.SIGTERM}); sys.exit(7)"
    )
    log = tmp_path / "log"
    child = await Child.start(python_child(code), log)
    async with asyncio.timeout(30):
        while "up" not in log.read_text():
            await asyncio.sleep(0.01)

    child.terminate()

    assert 7 == await child.wait()
    child.terminate()  # to one that has ended: nothing


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (2, "exit code 2"), (-9, "signal SIGKILL"), (-200, "signal 200")]
)
def test_an_exit_in_words(code: int, text: str) -> None:
    """What the notes say."""
    assert text == describe_exit(code)
