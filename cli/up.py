"""`firsttoken up`: prepares the model, starts Redis and the services, says when they are ready, drains on Ctrl-C."""

import asyncio
import json
import os
import secrets
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.checks import check_nobody_is_active, check_ports, wait_for_redis
from cli.embedded_redis import plan_redis
from cli.notes import Notes
from cli.plan import ChildSpec, Deployment, plan_services
from cli.prepare import ModelChoice, prepare_model
from cli.problem import EXIT_FAILED, CommandProblem
from cli.readiness import wait_until_ready
from cli.run_folder import RunFolder
from cli.supervisor import Supervisor
from shared.aio import scope
from shared.domain.request import Role
from shared.obs import logs
from shared.settings import SCRIPTED_MODEL_NAME

READY_TIMEOUT_S = 180.0  # a worker maps its weights in seconds; a cold disk and two busy cores may take a minute
DRAIN_TIMEOUT_S = 45.0  # a gateway drains for 30 s, cuts what is left and waits for its ends: 41 s; later it is stuck
LOG_CHECK_S = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What was typed. `redis_url` None = the embedded Valkey; `numeric_mode` None = the settings', or the model's."""

    num_gateways: int
    num_prefill: int
    num_decode: int
    model: str | None
    numeric_mode: str | None
    port: int
    redis_url: str | None
    is_scripted: bool
    home: Path


def run_up(options: UpOptions, around: Mapping[str, str]) -> int:
    """Blocks until it has been stopped and no child is left. Returns the exit code; raises CommandProblem."""
    notes = Notes()
    choice = ModelChoice.of(options.model, options.numeric_mode, around)
    check_ports(options.port, options.num_gateways)
    logs.configure("up", "ERROR")  # ours are notes; what the state client logs must not get between them
    if options.redis_url is not None:
        asyncio.run(wait_for_redis(options.redis_url))
        asyncio.run(check_nobody_is_active(options.redis_url))
    try:
        folder = RunFolder.create(options.home)
    except OSError as error:
        raise CommandProblem(f"{options.home} cannot be written ({error.strerror}); name another with --home") from None
    model = None if options.is_scripted else prepare_model(choice, options.home, notes.say)
    redis, redis_url = plan_redis(folder, around) if options.redis_url is None else (None, options.redis_url)
    deployment = Deployment(
        port=options.port,
        num_gateways=options.num_gateways,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        redis_url=redis_url,
        is_redis_own=redis is not None,
        model_dir=None if model is None else model.folder,
        numeric_mode=choice.numeric_mode,
        served_model_name=SCRIPTED_MODEL_NAME if model is None else model.name,
        cluster_token=secrets.token_urlsafe(32),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    notes.say(f"logs: {folder.path}")
    return asyncio.run(_serve(deployment, redis, folder, notes, around))


class _Stop:
    """The first signal asks for a drain, the second for the end at once."""

    def __init__(self, supervisor: Supervisor, notes: Notes) -> None:
        self.asked = asyncio.Event()
        self.exit_code = 0
        self._supervisor = supervisor
        self._notes = notes
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.asked.is_set():
            self._notes.waited()
            self._notes.say("draining; once more to end at once")
            self.asked.set()
        else:
            self.exit_code = EXIT_FAILED
            self._supervisor.kill()


async def _serve(
    deployment: Deployment, redis: ChildSpec | None, folder: RunFolder, notes: Notes, around: Mapping[str, str]
) -> int:
    """Runs every child below one task group; whatever ends it, no child is left."""
    supervisor = Supervisor(folder, drain_timeout_s=DRAIN_TIMEOUT_S, say=notes.say)
    stop = _Stop(supervisor, notes)
    try:
        async with asyncio.TaskGroup() as group:
            async with scope.stop_when(stop.asked):
                if redis is not None:
                    notes.wait_for("Redis")
                    scope.spawn(group, supervisor.keep(redis), name=redis.child_id)
                    await wait_for_redis(deployment.redis_url)
                for spec in plan_services(deployment, around):
                    scope.spawn(group, supervisor.keep(spec), name=spec.child_id)
                await _wait_until_ready(deployment, notes)
                supervisor.set_ready()
                notes.tell(*(f"ready {url}" for url in deployment.urls), curl_line(deployment))
                await _watch_logs(folder, notes)
            await supervisor.stop()
    except BaseExceptionGroup as failures:
        raise first_problem(failures) from None
    finally:
        notes.waited()
        await supervisor.end_all()
    if stop.exit_code == 0:
        notes.say("stopped")
    return stop.exit_code


async def _wait_until_ready(deployment: Deployment, notes: Notes) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            workers = {Role.PREFILL.value: deployment.num_prefill, Role.DECODE.value: deployment.num_decode}
            for admin_url in deployment.admin_urls:
                await wait_until_ready(admin_url, workers, notes.wait_for)
    except TimeoutError:
        raise CommandProblem(f"not ready after {READY_TIMEOUT_S:.0f} s, still waiting: {notes.waiting_for}") from None
    notes.waited()


async def _watch_logs(folder: RunFolder, notes: Notes) -> None:
    """Logs that cannot be shortened (a full disk, a removed folder) are said once and are no reason to end anything."""
    has_failed = False
    while True:
        await asyncio.sleep(LOG_CHECK_S)
        try:
            await asyncio.to_thread(folder.turn_over_long_logs)
        except OSError as error:
            if not has_failed:
                notes.say(f"the logs in {folder.path} cannot be shortened: {error.strerror}")
            has_failed = True


def curl_line(deployment: Deployment) -> str:
    """To try it: copied into a shell as it is."""
    question = "What is the capital of France?"
    if deployment.model_dir is None:
        question = json.dumps({"pieces": ["Hel", "lo"]})
    message = {"role": "user", "content": question}
    body = json.dumps({"model": "default", "messages": [message], "temperature": 0, "stream": True})
    return (
        f"curl -N {deployment.urls[0]}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def first_problem(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """One sentence is told, as several children that cannot start usually say the same. A bug stays a whole group."""
    problems, others = failures.split(CommandProblem)
    if others is not None or problems is None:
        return failures
    first: BaseException = problems
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
