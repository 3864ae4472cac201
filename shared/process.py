"""One process of the system: settings, logs, loop, signals, admin HTTP, exit code. The only reader of the environment
and the only `asyncio.run` of a service.

Exit codes: 0 after a drain, 1 after a failure or a second signal, 2 for bad settings.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar

import structlog
import uvloop

from shared.domain.clock import Clock
from shared.domain.ids import Incarnation
from shared.obs import logs
from shared.obs.admin import JSON, AdminServer, bind, json_page
from shared.obs.metrics import Metrics
from shared.settings import ServiceSettings, SettingsError, WorkerSettings, describe, load

Config = TypeVar("Config", bound=ServiceSettings)
Probe = Callable[[], Awaitable[tuple[bool, str]]]

_PROBE_TIMEOUT_S = 2.0  # Kubernetes gives a probe 1 s by default; a person with curl should see the reason


class RealClock:
    """The clock of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Readiness:
    """May this process get new work? False until `set(True)`. A `probe`, if given, is asked at each /readyz as well."""

    def __init__(self) -> None:
        self.is_ready = False
        self.reason = "starting"
        self.probe: Probe | None = None

    def set(self, ready: bool, reason: str = "") -> None:
        self.is_ready = ready
        self.reason = reason

    async def ask(self) -> tuple[bool, str]:
        """A probe that does not answer in time means not ready."""
        if not self.is_ready or self.probe is None:
            return self.is_ready, self.reason
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return await self.probe()
        except TimeoutError:
            return False, "the readiness probe gave no answer"


class Process:
    """What a service's main gets from the process around it."""

    def __init__(self, role: str, name: str, clock: Clock) -> None:
        self.role = role
        self.name = name
        self.clock = clock
        self.incarnation = Incarnation(secrets.randbits(64))
        self.stopping = asyncio.Event()
        self.readiness = Readiness()
        self.metrics = Metrics(role, name)
        self.log = logs.get_logger(role)
        self.admin_address = ""
        self._dead_reason: str | None = None
        self._admin = AdminServer()
        self._admin.add("/healthz", self._healthz)
        self._admin.add("/readyz", self._readyz)
        self._admin.add("/metrics", self._metrics_page)

    @property
    def admin_url(self) -> str:
        return f"http://{self.admin_address}"

    def add_admin_route(self, path: str, handler: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """A JSON page of the service's own, answered with 200."""
        self._admin.add(path, json_page(handler))

    def set_dead(self, reason: str) -> None:
        """The process can do no more work and should be restarted: not alive, not ready, for good."""
        self._dead_reason = reason
        self.readiness.set(False, reason)
        self.log.error("process is dead", reason=reason)

    async def serve_admin(self, host: str, port: int, body: Callable[[], Awaitable[None]]) -> None:
        """Runs `body` beside the admin server. Raises OSError if the port is taken."""
        sock = bind(host, port)
        bound_host, bound_port = sock.getsockname()[:2]
        self.admin_address = f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"
        self.metrics.tasks(lambda: len(asyncio.all_tasks()))
        async with self._admin.serve(sock):
            self.log.info("admin pages", url=self.admin_url)
            await body()

    async def _healthz(self) -> tuple[int, str, bytes]:
        alive = self._dead_reason is None
        return 200 if alive else 503, JSON, json.dumps({"alive": alive, "reason": self._dead_reason or ""}).encode()

    async def _readyz(self) -> tuple[int, str, bytes]:
        ready, reason = await self.readiness.ask()
        return 200 if ready else 503, JSON, json.dumps({"ready": ready, "reason": reason}).encode()

    async def _metrics_page(self) -> tuple[int, str, bytes]:
        return 200, self.metrics.content_type, self.metrics.render()


def run(role: str, config_type: type[Config], main: Callable[[Process, Config], Awaitable[None]]) -> NoReturn:
    """Runs a service to its end. `main` sets readiness, and drains and returns when `process.stopping` is set."""
    try:
        config = load(config_type, os.environ)
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        sys.exit(2)
    logs.configure(role, config.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(role, config, main))
        # Everything is closed by now. The end of the runner would wait for whatever task or thread is left, without a
        # limit; the interpreter's own for gRPC's threads: 1 to 5 s were measured after connections with keep-alive, and
        # each of them is a second in which a restart or a drain goes on.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _run(role: str, config: Config, main: Callable[[Process, Config], Awaitable[None]]) -> int:
    process = Process(role, _name_of(role, config), RealClock())
    structlog.contextvars.bind_contextvars(process=process.name)
    _handle_signals(process)
    process.log.info("starting", pid=os.getpid(), settings=describe(config))
    try:
        await process.serve_admin(config.host, config.chosen_admin_port, lambda: main(process, config))
    except Exception:  # the root: whatever it was, it is logged and becomes the exit code
        process.log.exception("process failed")
        return 1
    finally:
        process.metrics.close()
    process.log.info("stopped")
    return 0


def _name_of(role: str, config: ServiceSettings) -> str:
    if isinstance(config, WorkerSettings) and config.worker_id:
        return config.worker_id
    return f"{role}-{config.port or os.getpid()}"


def _handle_signals(process: Process) -> None:
    def on_signal(number: signal.Signals) -> None:
        if process.stopping.is_set():
            process.log.warning("second signal, exiting at once", signal=number.name)
            os._exit(1)
        process.log.info("stopping", signal=number.name)
        process.readiness.set(False, "draining")  # at once: nobody should send work to the drain
        process.stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
