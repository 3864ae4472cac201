"""`firsttoken chat` as a person meets it: in a terminal, against real processes."""

import asyncio
import os
import pty
import select
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support.cluster import FIRSTTOKEN, Cluster
from tests.support.polling import eventually
from tests.support.script import Script
from tests.support.tcp_proxy import tcp_proxy

CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = b"> "
READ_TIMEOUT_S = 90.0
# CPython's readline shows its prompt before it waits for keys or signals: a Ctrl-C in between is seen at the next key.
# Presses that are seen together are one.
PRESS_AGAIN_AFTER_S = 5.0
pytestmark = pytest.mark.timeout(600)


@dataclass(slots=True, kw_only=True)
class Terminal:
    """A program behind a pseudo-terminal."""

    pid: int
    descriptor: int
    unread: bytes = b""

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def read_until(self, wanted: bytes) -> bytes:
        """All that was shown up to and with `wanted`. Raises AssertionError if it does not come."""
        self._listen(wanted, until=time.monotonic() + READ_TIMEOUT_S)
        assert wanted in self.unread, f"{wanted!r} is not shown, but {self.unread!r}"
        shown, _, self.unread = self.unread.partition(wanted)
        return shown + wanted

    def interrupt(self, wanted: bytes) -> bytes:
        """Ctrl-C, as often as it takes; all that was shown up to and with `wanted`. Raises AssertionError."""
        deadline = time.monotonic() + READ_TIMEOUT_S
        while wanted not in self.unread and time.monotonic() < deadline:
            self.type(CTRL_C)
            self._listen(wanted, until=time.monotonic() + PRESS_AGAIN_AFTER_S)
        return self.read_until(wanted)

    def leave_by_interrupt(self) -> int:
        """Ctrl-C, as often as it takes; the exit code. Raises AssertionError if it does not end."""
        ended = os.pidfd_open(self.pid)
        try:
            for _ in range(round(READ_TIMEOUT_S / PRESS_AGAIN_AFTER_S)):
                self.type(CTRL_C)
                if select.select([ended], [], [], PRESS_AGAIN_AFTER_S)[0]:
                    return self.exit_code()
        finally:
            os.close(ended)
        raise AssertionError(f"Ctrl-C does not leave; shown: {self.unread!r}")

    def _listen(self, wanted: bytes, until: float) -> None:
        """Reads what is shown until `wanted` is, or until then."""
        while wanted not in self.unread:
            if not select.select([self.descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                return
            self.unread += os.read(self.descriptor, 65536)

    def exit_code(self) -> int:
        """Waits for the end."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def conversation(url: str) -> Generator[Terminal]:
    """One that has just been started."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execv(FIRSTTOKEN, [FIRSTTOKEN, "chat", "--url", url])
    try:
        yield Terminal(pid=pid, descriptor=descriptor)
    finally:
        os.close(descriptor)  # a program that still runs is told by its terminal


@pytest.fixture
def terminal(cluster: Cluster) -> Generator[Terminal]:
    """With a conversation that is at its first prompt."""
    with conversation(cluster.base_url) as opened:
        opened.read_until(PROMPT)
        yield opened


# Their messages spell the words in hexadecimal: what is typed does not show what is answered.
LONG = Script(pieces=[b"long "], repeat=1000, step_ms=50)
SHORT = Script(pieces=[b"sh", b"ort"])
STEADY = Script(pieces=[f"p{number} ".encode() for number in range(100)], step_ms=50)


def _talk(terminal: Terminal) -> tuple[bytes, bytes]:
    """An answer that is stopped, then a whole one, then Ctrl-C; what was shown of the two answers."""
    terminal.type(LONG.message.encode() + b"\n")
    begun = terminal.read_until(b"long long ")
    terminal.type(CTRL_C)
    stopped = begun + terminal.read_until(b"stopped")
    terminal.read_until(PROMPT)
    terminal.type(SHORT.message.encode() + b"\n")
    whole = terminal.read_until(b"short")
    terminal.read_until(PROMPT)
    terminal.interrupt(b"Ctrl-C again")
    terminal.read_until(PROMPT)
    return stopped, whole


async def test_ctrl_c_stops_an_answer_and_not_the_program(cluster: Cluster, terminal: Terminal) -> None:
    """The stopped answer is cancelled in the system; the next question is answered; the second Ctrl-C leaves."""
    stopped, whole = await asyncio.to_thread(_talk, terminal)

    assert stopped.count(b"long ") < LONG.num_pieces
    assert whole.endswith(b"\nshort")
    assert 0 == await asyncio.to_thread(terminal.leave_by_interrupt)
    await eventually(cluster.status, lambda s: not s.live_requests, within_s=30.0, what="the stopped answer is gone")


async def test_an_answer_goes_on_behind_a_cut(cluster: Cluster) -> None:
    """What is shown is the uncut answer, and a word that there was a cut; Ctrl-C stops one that was resumed, too."""
    async with tcp_proxy(cluster.port) as proxy:
        with conversation(f"http://127.0.0.1:{proxy.port}") as terminal:

            async def shown(wanted: bytes) -> bytes:
                return await asyncio.to_thread(terminal.read_until, wanted)

            def cut() -> None:
                proxy.cut()
                proxy.restore()

            await shown(PROMPT)
            terminal.type(STEADY.message.encode() + b"\n")
            begun = await shown(b"p10 ")
            cut()
            answer = begun + await shown(b"p99 ")
            assert STEADY.text().encode() == answer[answer.index(b"p0 ") :]
            await shown(b"the connection was cut; resumed")
            await shown(PROMPT)

            terminal.type(LONG.message.encode() + b"\n")
            await shown(b"long long ")
            cut()
            await shown(b"long " * 20)
            terminal.type(CTRL_C)
            await shown(b"stopped")
            await shown(PROMPT)
            await eventually(
                cluster.status, lambda s: not s.live_requests, within_s=30.0, what="the stopped one is gone"
            )
            terminal.type(CTRL_D)
            assert 0 == await asyncio.to_thread(terminal.exit_code)


async def test_ctrl_d_leaves(terminal: Terminal) -> None:
    """At once."""
    terminal.type(CTRL_D)

    assert 0 == await asyncio.to_thread(terminal.exit_code)
