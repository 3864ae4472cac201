"""The console script."""

import signal
import subprocess
import sys

import pytest

from cli import entry, main


def test_ctrl_c_during_the_imports_is_quiet() -> None:
    """No traceback of half-imported modules: the signal itself ends the process."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "import cli.entry\n"
        "sys.meta_path.insert(0, Finder())\n"
        "cli.entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=200)

    assert (-signal.SIGINT, b"", b"") == (done.returncode, done.stdout, done.stderr)


def test_afterwards_ctrl_c_is_an_interrupt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subcommand can clean up behind itself."""
    seen: list[object] = []
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(main, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    try:
        entry.main()
    finally:
        signal.signal(signal.SIGINT, before)

    assert [signal.default_int_handler] == seen
