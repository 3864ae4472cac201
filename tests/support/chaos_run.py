"""One run under fault: a system of real processes, the clients of a schedule, and its faults, in real time."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support import leaks
from tests.support.chaos_client import Client, Seen
from tests.support.chaos_schedule import Fault, FaultKind, Question, Schedule
from tests.support.chat import CHAT_PATH, ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import exchange
from tests.support.polling import eventually
from tests.support.redis_server import RedisServer, own_redis
from tests.support.tcp_proxy import TcpProxy, tcp_proxy

CHILD_NAME = "FIRSTTOKEN_WORKER_ID"  # `up` gives it to every service
SLOW_LINK_S = 0.1
REDIS_LOOK_S = 0.1
REDIS_SLOW_S = 0.2  # services wait 0.5 s; that they wait at all shows here first
SETTLES_WITHIN_S = 60.0  # a lost worker 5 s, `up`'s longest pause before a restart 10 s, a start on a busy machine
CROWD = 16
TOPICS = ("rivers", "the moon", "bread", "a fox", "numbers", "winter", "bridges", "tea")
MODEL_TOKENS = 60
POOL_MIB = 1  # far below what the requests of a busy second come to: blocks run short


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body and the text of its right answer."""

    body: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What is left of a run to be judged: all that its clients saw, and where its processes wrote."""

    schedule: Schedule
    seen: tuple[Seen, ...]
    applied: tuple[Fault, ...]
    log_folder: Path
    transcripts: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The system and what stands around it."""

    cluster: Cluster
    redis: RedisServer
    proxy: TcpProxy
    transcripts: Path


@asynccontextmanager
async def stage(schedule: Schedule, transcripts: Path, *, is_scripted: bool = True) -> AsyncGenerator[Stage]:
    """Two workers a role, small pools, a Redis of our own, a link that can be cut."""
    plan = ClusterPlan(is_scripted=is_scripted, num_prefill=2, num_decode=2)
    settings = {
        "transports": schedule.transport,
        "log_level": "DEBUG",
        "keep_alive_s": 2,
        "core_transcripts": transcripts,
    }
    if is_scripted:
        settings["kv_pool_mib"] = POOL_MIB
    for name, value in settings.items():
        plan = plan.setting(name, value)
    with own_redis() as redis, plan.redis_url(redis.url).start() as cluster:
        async with tcp_proxy(cluster.port) as proxy:
            yield Stage(cluster=cluster, redis=redis, proxy=proxy, transcripts=transcripts)


def scripted_answers(schedule: Schedule) -> list[Asked]:
    """Bodies and right answers of a schedule's questions: known before they are asked."""
    return [Asked(body=each.script.body(), text=each.script.text()) for each in schedule.questions]


async def model_answers(cluster: Cluster, schedule: Schedule) -> list[Asked]:
    """The same for a model: a few questions, greedy and seeded, whose answers are those of the system at rest."""
    told: list[Asked] = []
    for number, topic in enumerate(TOPICS):
        chosen = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.9, "seed": number, "top_p": 0.95}
        messages = [{"role": "user", "content": f"Tell me about {topic}."}]
        body = {"model": "default", "messages": messages, "max_tokens": MODEL_TOKENS, **chosen}
        answer = await ask(cluster.port, body)
        told.append(Asked(body=body, text=answer["choices"][0]["message"]["content"]))
    return [told[each.number % len(told)] for each in schedule.questions]


async def crowd(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """Some answers at once, each exact: what the system does when nothing is wrong.

    On a machine without free processor time Redis may miss its half second even then: what is refused is asked again.
    """

    async def answer(each: Asked) -> str:
        told = await eventually(
            lambda: exchange(cluster.port, "POST", CHAT_PATH, body=each.body),
            lambda told: told.status != 503,
            within_s=SETTLES_WITHIN_S,
            what="an answer of a system at rest",
        )
        assert 200 == told.status, told.body
        return told.json()["choices"][0]["message"]["content"]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(each)) for each in asked[:CROWD]]
    assert [each.text for each in asked[:CROWD]] == [task.result() for task in tasks]


async def play(stage: Stage, schedule: Schedule, answers: Sequence[Asked]) -> Done:
    """Plays the schedule; afterwards everything works again and nothing has leaked. Raises AssertionError if not.

    `answers`: for each of the schedule's questions what is asked and what must be answered.
    """
    cluster = stage.cluster
    await crowd(cluster, answers)
    log_folder, baseline = cluster.log_folder, await leaks.capture(cluster)
    assert log_folder is not None
    client = Client(port=cluster.port, proxy_port=stage.proxy.port, name=f"chaos-{schedule.seed}")
    faults = Faults(stage)
    pauses: list[Fault] = []
    async with asyncio.TaskGroup() as group:
        faulty = [group.create_task(_apply(client, faults, fault)) for fault in schedule.faults]
        asked = [
            group.create_task(_ask(client, question, each))
            for question, each in zip(schedule.questions, answers, strict=True)
        ]
        watching = group.create_task(_watch_redis(client, stage.redis, pauses))
        await asyncio.wait([*faulty, *asked])
        watching.cancel()
    applied = [fault for task in faulty if (fault := task.result()) is not None] + pauses
    await cluster.wait_ready(within_s=SETTLES_WITHIN_S)
    await crowd(cluster, answers)
    await leaks.assert_no_leaks(cluster, baseline, within_s=SETTLES_WITHIN_S)
    return Done(
        schedule=schedule,
        seen=tuple(task.result() for task in asked),
        applied=tuple(applied),
        log_folder=log_folder,
        transcripts=stage.transcripts,
    )


async def _apply(client: Client, faults: "Faults", fault: Fault) -> Fault | None:
    """The fault with the times that it really had: on a busy machine everything comes later."""
    await client.wait_until(fault.at_s)
    begun_s = client.now_s
    if not await faults.apply(fault):
        return None
    return replace(fault, at_s=begun_s, lasts_s=client.now_s - begun_s)


async def _ask(client: Client, question: Question, asked: Asked) -> Seen:
    await client.wait_until(question.at_s)
    return await client.ask(question, asked.body, asked.text)


async def _watch_redis(client: Client, redis: RedisServer, pauses: list[Fault]) -> None:
    """Notes when Redis did not answer in time, whatever the reason: on a busy machine it need not be a fault of ours."""
    while True:
        begun_s = client.now_s
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
            try:
                writer.write(b"PING\r\n")
                await reader.readuntil(b"\n")
            finally:
                writer.transport.abort()
        if client.now_s - begun_s > REDIS_SLOW_S:
            pauses.append(Fault(at_s=begun_s, kind=FaultKind.REDIS_FREEZE, lasts_s=client.now_s - begun_s))
        await asyncio.sleep(REDIS_LOOK_S)


class Faults:
    """Does to the system what a schedule says. Faults of one target may overlap: each ends what it began."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._redis_lock = asyncio.Lock()  # a start that is being waited for must not be doubled

    async def apply(self, fault: Fault) -> bool:
        """Returns when the fault is over; False where there was nothing to do it to, as it had just been killed."""
        proxy, redis = self._stage.proxy, self._stage.redis
        match fault.kind:
            case FaultKind.KILL:
                return self._signal(self._pid_of(fault.target), signal.SIGKILL)
            case FaultKind.FREEZE:
                pid = self._pid_of(fault.target)
                if not self._signal(pid, signal.SIGSTOP):
                    return False
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._signal(pid, signal.SIGCONT)
            case FaultKind.REDIS_KILL:
                async with self._redis_lock:
                    if redis.is_running:
                        await asyncio.to_thread(redis.kill)
                await asyncio.sleep(fault.lasts_s)
                async with self._redis_lock:
                    if not redis.is_running:
                        await asyncio.to_thread(redis.start)
            case FaultKind.REDIS_FREEZE:
                if not redis.is_running:
                    return False
                pid = redis.pid
                self._signal(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._signal(pid, signal.SIGCONT)
            case FaultKind.LINK_CUT | FaultKind.LINK_SILENT:
                (proxy.cut if fault.kind is FaultKind.LINK_CUT else proxy.silence)()
                await asyncio.sleep(fault.lasts_s)
                proxy.restore()
            case FaultKind.LINK_SLOW:
                proxy.delay_s = SLOW_LINK_S
                await asyncio.sleep(fault.lasts_s)
                proxy.delay_s = 0.0
        return True

    def _pid_of(self, child_id: str) -> int | None:
        """By the operating system's word: a process that has just started is not yet in any status."""
        wanted = f"{CHILD_NAME}={child_id}".encode()
        for pid in self._stage.cluster.pids():
            with suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        return None

    @staticmethod
    def _signal(pid: int | None, number: signal.Signals) -> bool:
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
