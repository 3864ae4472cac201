"""A whole system of real processes, started as a person would: by `firsttoken up`."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support import ports, processes
from tests.support.http_client import HttpAnswer, exchange
from tests.support.metrics import Scrape, scrape
from tests.support.polling import INTERVAL_S, eventually

FIRSTTOKEN = str(Path(sys.executable).parent / "firsttoken")
START_TIMEOUT_S = 180.0  # the first start of a machine may have to prepare the model
STOP_TIMEOUT_S = 90.0  # the drain limit of a service (30 s) and more
LOG_TAIL_LINES = 15
LOG_LINE_CHARS = 400
LOGS_LINE = "logs: "
POLL_S = 0.05
REDIS_TIMEOUT_S = 10.0
# A gateway that hears nothing of the scheduler within a second shows a fleet without it, in which nothing is live.
SCHEDULER_ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process as `firsttoken status --json` shows it."""

    role: str
    id: str
    pid: int | None
    address: str
    admin_url: str
    ready: bool

    @property
    def admin_port(self) -> int:
        return int(self.admin_url.rsplit(":", 1)[1].rstrip("/"))

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    @property
    def live_pid(self) -> int:
        assert self.pid, f"{self.id} has no known process"
        return self.pid


def _is_live(service: Service) -> bool:
    return service.pid is None or processes.is_live(service.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The fleet, the queue and the pools at one moment."""

    services: tuple[Service, ...]
    queue: int
    requests: Mapping[str, int]
    blocks: Mapping[str, Mapping[str, int]]
    unreleased: int
    sequences: Mapping[str, int]
    peers: tuple[str, ...]
    """Admin URLs of the other gateways."""

    def of_role(self, role: str) -> list[Service]:
        return sorted((s for s in self.services if s.role == role), key=lambda s: s.id)

    def one(self, role: str) -> Service:
        """The only one of its role. Raises LookupError where there is none or more than one."""
        found = self.of_role(role)
        if len(found) != 1:
            raise LookupError(f"{len(found)} of role {role}")
        return found[0]

    @property
    def live_requests(self) -> dict[str, int]:
        """States that are not an end and have requests."""
        ends = ("finished", "cancelled", "failed")
        return {state: n for state, n in self.requests.items() if n and state not in ends}


def parse_status(document: Mapping[str, Any]) -> Status:
    """Raises KeyError or TypeError if a field is missing or unknown."""
    return Status(
        services=tuple(Service(**service) for service in document["services"]),
        queue=document["queue"],
        requests=document["requests"],
        blocks=document["blocks"],
        unreleased=document["unreleased"],
        sequences=document["sequences"],
        peers=tuple(document["peers"]),
    )


async def _status_at(admin_port: int) -> Status:
    answer = await exchange(admin_port, "GET", "/status")
    if answer.status != 200:
        raise LookupError(f"the gateway is only starting: {answer.status}")
    return parse_status(answer.json())


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A running system."""

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path
    mark: str
    workers: Mapping[str, int]
    """How many of each role there are when all is well."""

    @property
    def admin_port(self) -> int:
        return self.port + ports.ADMIN_OFFSET

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def status(self) -> Status:
        """As the scheduler tells the first gateway.

        Raises OSError while the gateway is away, LookupError while it is only starting, or no scheduler answers it.
        """
        clock = asyncio.get_running_loop()
        deadline = clock.time() + SCHEDULER_ANSWERS_WITHIN_S
        while not (status := await _status_at(self.admin_port)).of_role("scheduler"):
            if clock.time() >= deadline:
                raise LookupError("no scheduler answers the gateway")
            await asyncio.sleep(INTERVAL_S)
        return status

    async def gateways(self) -> list[Service]:
        """All, each by its own word, the first one first. Raises OSError, or LookupError while one is only starting."""
        first = await _status_at(self.admin_port)
        others = [await _status_at(urlsplit(url).port or 0) for url in first.peers]
        return [status.one("gateway") for status in (first, *others)]

    async def metrics(self, service: Service) -> Scrape:
        return await scrape(service.admin_port)

    async def role_metrics(self, role: str) -> list[Scrape]:
        """The metrics of every process of a role."""
        return [await scrape(service.admin_port) for service in (await self.status()).of_role(role)]

    async def get(self, path: str, **options: Any) -> HttpAnswer:
        return await exchange(self.port, "GET", path, **options)

    async def delete(self, request_id: str) -> HttpAnswer:
        return await exchange(self.port, "DELETE", f"/v1/requests/{request_id}")

    async def wait_ready(self, *, within_s: float = 60.0) -> Status:
        """Every service is ready, and each gateway says so itself; none is missing, or the memory of a process that was killed."""
        status = await eventually(
            self.status,
            lambda s: (
                all(len(s.of_role(role)) == count for role, count in self.workers.items())
                and all(service.ready and _is_live(service) for service in s.services)
            ),
            within_s=within_s,
            what="all services ready",
        )
        await eventually(
            self.gateways,
            lambda gateways: all(gateway.ready for gateway in gateways),
            within_s=within_s,
            what="all gateways ready",
        )
        await eventually(
            lambda: exchange(self.admin_port, "GET", "/readyz"),
            lambda answer: answer.status == 200,
            within_s=within_s,
            what="the gateway is ready",
        )
        return status

    def pids(self) -> set[int]:
        """Every live process of this system, by the operating system's word."""
        return processes.marked_pids(self.mark)

    @property
    def log_folder(self) -> Path | None:
        """Where each child has its log; None before `up` has said it."""
        said = self.log_path.read_text(errors="replace").splitlines()
        return next((Path(line.removeprefix(LOGS_LINE)) for line in said if line.startswith(LOGS_LINE)), None)

    def log_tail(self) -> str:
        """The ends of the logs of `up` and of each of its children; a word where a stopped system took them along."""
        if not self.log_path.exists():
            return "the system has been stopped, and its logs are gone"
        folder = self.log_folder
        paths = [self.log_path, *([] if folder is None else sorted(folder.glob("*.log")))]
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in paths)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_gone(self, *, within_s: float) -> None:
        """Returns when no process of this system is left. Raises AssertionError, and ends them, when some are left."""
        deadline = time.monotonic() + within_s
        while True:
            self.process.poll()
            left = self.pids()
            if not left:
                return
            if time.monotonic() > deadline:
                named = [f"{pid}: {processes.command_line(pid)}" for pid in sorted(left)]
                processes.kill_all(left)
                raise AssertionError(f"left after {within_s} s: {named}\n{self.log_tail()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends it by SIGINT to `up` alone. Raises AssertionError if that fails or leaves a process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                code = self.process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                processes.kill_all(self.pids())
                raise AssertionError(f"`up` has not stopped in {STOP_TIMEOUT_S} s\n{self.log_tail()}") from None
            assert 0 == code, self.log_tail()
        self.wait_gone(within_s=40.0)
        shutil.rmtree(self.log_path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What to start: `ClusterPlan().scripted().prefill(2).start()`."""

    is_scripted: bool = False
    num_prefill: int = 1
    num_decode: int = 1
    num_gateways: int = 1
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    redis: str | None = None

    def scripted(self) -> Self:
        return replace(self, is_scripted=True)

    def prefill(self, count: int) -> Self:
        return replace(self, num_prefill=count)

    def decode(self, count: int) -> Self:
        return replace(self, num_decode=count)

    def gateways(self, count: int) -> Self:
        """On neighbouring ports from the cluster's own on."""
        return replace(self, num_gateways=count)

    def redis_url(self, url: str) -> Self:
        return replace(self, redis=url)

    def setting(self, name: str, value: object) -> Self:
        """A setting of every service that has it, by its field name."""
        return replace(self, settings={**self.settings, f"FIRSTTOKEN_{name.upper()}": str(value)})

    @contextmanager
    def start(self) -> Generator[Cluster]:
        """A running system, stopped at the end with the proof that no process is left."""
        cluster = self.launch()
        try:
            yield cluster
        except BaseException:
            processes.kill_all(cluster.pids())
            cluster.process.wait(timeout=STOP_TIMEOUT_S)
            raise
        cluster.stop()

    def launch(self) -> Cluster:
        """Starts it and returns once it is ready; the caller stops it. Raises AssertionError with the log if it does not get ready."""
        port, mark = ports.gateway_port(self.num_gateways), uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTTOKEN_")}
        if self.redis is None:  # nobody takes it away: where it is slow, the machine is busy
            environ["FIRSTTOKEN_REDIS_TIMEOUT_S"] = str(REDIS_TIMEOUT_S)
        environ |= self.settings
        environ[processes.MARK_NAME] = mark
        log = Path(tempfile.mkdtemp(prefix="firsttoken-test-")) / "up.log"
        with log.open("wb") as output:
            # On a leash: a test run that is itself killed leaves no system behind.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cli.leash", str(os.getpid()), FIRSTTOKEN, *self._arguments(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        cluster = Cluster(
            port=port,
            process=process,
            log_path=log,
            mark=mark,
            workers={"prefill": self.num_prefill, "decode": self.num_decode},
        )
        _wait_ready_line(cluster)
        return cluster

    def _arguments(self, port: int) -> list[str]:
        arguments = ["up", "--port", str(port), "--prefill", str(self.num_prefill), "--decode", str(self.num_decode)]
        if self.is_scripted:
            arguments.append("--scripted")
        if self.num_gateways > 1:
            arguments += ["--gateways", str(self.num_gateways)]
        if self.redis is not None:
            arguments += ["--redis-url", self.redis]
        return arguments


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(line[:LOG_LINE_CHARS] for line in lines)


def _wait_ready_line(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    wanted = f"ready {cluster.base_url}"
    while wanted not in cluster.log_path.read_text(errors="replace").splitlines():
        if cluster.process.poll() is not None or time.monotonic() > deadline:
            processes.kill_all(cluster.pids())
            cluster.process.wait(timeout=STOP_TIMEOUT_S)
            raise AssertionError(f"no line {wanted!r} (exit {cluster.process.returncode})\n{cluster.log_tail()}")
        time.sleep(POLL_S)
