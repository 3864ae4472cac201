"""One run under fault: a system of real processes, the clients of a schedule, and its faults, in real time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import chaos_extras, leaks
from tests.support.chaos_client import Asked, Client, Seen
from tests.support.chaos_extras import Extra
from tests.support.chaos_faults import Faults, Links, active_scheduler_port
from tests.support.chaos_links import Holders
from tests.support.chaos_load import STALL_TIMEOUT_S, Question
from tests.support.chaos_schedule import (
    BEHIND_A_PROXY,
    GATEWAYS,
    NUM_GATEWAYS,
    SCHEDULERS,
    WORKERS,
    Fault,
    FaultKind,
    Schedule,
)
from tests.support.chat import CHAT_PATH, ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import exchange
from tests.support.polling import eventually
from tests.support.redis_server import RedisServer, own_redis
from tests.support.tcp_proxy import tcp_proxy

REDIS_LOOK_S = 0.1
STARVED_S = 0.5  # our own process waited for the processor so long: others have then, too
REDIS_SLOW_S = 0.2  # services wait 0.5 s; that they wait at all shows here first
# A lost worker 5 s, `up`'s longest pause before a restart 10 s, a decode worker that nobody asks for an answer 45 s; and
# a busy machine.
SETTLES_WITHIN_S = 90.0
CROWD = 16
TOPICS = ("rivers", "the moon", "bread", "a fox", "numbers", "winter", "bridges", "tea")
MODEL_TOKENS = 60
POOL_MIB = 1  # far below what the requests of a busy second come to: blocks run short
DRAIN_S = 6  # shorter than many answers: what is being stopped hands over, or cuts off


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What is left of a run to be judged: all that its clients saw, and where its processes wrote."""

    schedule: Schedule
    asked: tuple[Asked, ...]
    seen: tuple[Seen, ...]
    applied: tuple[Fault, ...]
    log_folder: Path
    transcripts: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The system and what stands around it."""

    cluster: Cluster
    redis: RedisServer
    links: Links
    log_folder: Path
    transcripts: Path

    @property
    def ports(self) -> list[int]:
        """Of the gateways."""
        return [self.cluster.port + number for number in range(NUM_GATEWAYS)]


@asynccontextmanager
async def stage(schedule: Schedule, transcripts: Path, *, is_scripted: bool = True) -> AsyncGenerator[Stage]:
    """Two of each role, small pools, a Redis of our own, and links that can be cut."""
    plan = ClusterPlan(is_scripted=is_scripted, num_gateways=NUM_GATEWAYS)  # and a worker a role: the others are ours
    settings = {
        "transports": schedule.transport,
        "log_level": "DEBUG",
        "keep_alive_s": 2,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "drain_timeout_s": DRAIN_S,
        "core_transcripts": transcripts,
    }
    if is_scripted:
        settings["kv_pool_mib"] = POOL_MIB
    for name, value in settings.items():
        plan = plan.setting(name, value)
    known: list[Cluster] = []
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(own_redis())
        holders = Holders(lambda: [pid for cluster in known for pid in cluster.pids()])
        redis_link = await stack.enter_async_context(tcp_proxy(redis.port, holders.names))
        # In a thread: the system starts through the proxy that runs here.
        starting = plan.redis_url(f"redis://127.0.0.1:{redis_link.port}/0").start()
        cluster = await asyncio.to_thread(starting.__enter__)
        stack.push(starting.__exit__)
        known.append(cluster)
        log_folder = cluster.log_folder
        assert log_folder is not None
        clients = {
            f"gateway-{number}": await stack.enter_async_context(tcp_proxy(cluster.port + number))
            for number in range(NUM_GATEWAYS)
        }
        to_scheduler = _ActiveScheduler(redis)
        scheduler = {name: await stack.enter_async_context(tcp_proxy(to_scheduler.port)) for name in BEHIND_A_PROXY}
        extras = [Extra(child_id="scheduler-1", like="scheduler-0", settings={})] + [
            Extra(
                child_id=name,
                like=name.replace("-1", "-0"),
                settings={"FIRSTTOKEN_SCHEDULER": f"127.0.0.1:{proxy.port}"},
            )
            for name, proxy in scheduler.items()
        ]
        await stack.enter_async_context(chaos_extras.running(cluster, extras))
        cluster.workers = {"prefill": 2, "decode": 2}
        await cluster.wait_ready(within_s=SETTLES_WITHIN_S)
        links = Links(clients=clients, redis=redis_link, scheduler=scheduler)
        yield Stage(cluster=cluster, redis=redis, links=links, log_folder=log_folder, transcripts=transcripts)


class _ActiveScheduler:
    """Where a link to the scheduler leads."""

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis
        self._last_known: int | None = None

    async def port(self) -> int:
        """The last known one while Redis cannot say. Raises ConnectionError where none was ever known."""
        self._last_known = await active_scheduler_port(self._redis) or self._last_known
        if self._last_known is None:
            raise ConnectionError("no scheduler is active")
        return self._last_known


def scripted_answers(schedule: Schedule) -> list[Asked]:
    """Bodies and right answers of a schedule's questions: known before they are asked."""
    return [
        Asked(
            body=each.script.body(),
            text=each.script.text(),
            finish_reason="stop",
            prompt_tokens=each.script.num_prompt_tokens,
            completion_tokens=each.script.num_pieces + 1,  # the end token counts
            script=each.script,
        )
        for each in schedule.questions
    ]


async def model_answers(cluster: Cluster, schedule: Schedule) -> list[Asked]:
    """The same for a model: a few questions, greedy and seeded, whose answers are those of the system at rest."""
    told: list[Asked] = []
    for number, topic in enumerate(TOPICS):
        chosen = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.9, "seed": number, "top_p": 0.95}
        messages = [{"role": "user", "content": f"Tell me about {topic}."}]
        body = {"model": "default", "messages": messages, "max_tokens": MODEL_TOKENS, **chosen}
        answer = await ask(cluster.port, body)
        (choice,) = answer["choices"]
        told.append(
            Asked(
                body=body,
                text=choice["message"]["content"],
                finish_reason=choice["finish_reason"],
                prompt_tokens=answer["usage"]["prompt_tokens"],
                completion_tokens=answer["usage"]["completion_tokens"],
            )
        )
    return [told[each.number % len(told)] for each in schedule.questions]


async def crowd(ports: Sequence[int], asked: Sequence[Asked]) -> None:
    """Some answers at once, each exact: what the system does when nothing is wrong.

    On a machine without free processor time Redis may miss its half second even then: what is refused is asked again.
    """

    async def answer(port: int, each: Asked) -> str:
        told = await eventually(
            lambda: exchange(port, "POST", CHAT_PATH, body=each.body),
            lambda told: told.status != 503,
            within_s=SETTLES_WITHIN_S,
            what="an answer of a system at rest",
        )
        assert 200 == told.status, told.body
        return told.json()["choices"][0]["message"]["content"]

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer(ports[number % len(ports)], each)) for number, each in enumerate(asked[:CROWD])
        ]
    assert [each.text for each in asked[:CROWD]] == [task.result() for task in tasks]


async def play(stage: Stage, schedule: Schedule, answers: Sequence[Asked]) -> Done:
    """Plays the schedule; afterwards everything works again and nothing has leaked. Raises AssertionError if not.

    `answers`: for each of the schedule's questions what is asked and what must be answered.
    """
    cluster = stage.cluster
    await crowd(stage.ports, answers)
    baseline = await leaks.capture(cluster)
    client = Client(
        ports=stage.ports,
        proxy_ports=[proxy.port for proxy in stage.links.clients.values()],
        name=f"chaos-{schedule.seed}",
    )
    faults = Faults(cluster, stage.redis, stage.links)
    pauses: list[Fault] = []
    async with asyncio.TaskGroup() as group:
        faulty = [group.create_task(_apply(client, faults, fault)) for fault in schedule.faults]
        asked = [
            group.create_task(_ask(client, question, each))
            for question, each in zip(schedule.questions, answers, strict=True)
        ]
        watching = [
            group.create_task(_watch_redis(client, stage.redis, pauses)),
            group.create_task(_watch_machine(client, pauses)),
        ]
        await asyncio.wait([*faulty, *asked])
        for watch in watching:
            watch.cancel()
    applied = [fault for task in faulty if (fault := task.result()) is not None] + pauses
    await cluster.wait_ready(within_s=SETTLES_WITHIN_S)
    await crowd(stage.ports, answers)
    await leaks.assert_no_leaks(cluster, baseline, within_s=SETTLES_WITHIN_S)
    return Done(
        schedule=schedule,
        asked=tuple(answers),
        seen=tuple(task.result() for task in asked),
        applied=tuple(applied),
        log_folder=stage.log_folder,
        transcripts=stage.transcripts,
    )


async def _apply(client: Client, faults: Faults, fault: Fault) -> Fault | None:
    """The fault with the times that it really had: on a busy machine everything comes later."""
    await client.wait_until(fault.at_s)
    begun_s = client.now_s
    done = await faults.apply(fault)
    return None if done is None else replace(done, at_s=begun_s, lasts_s=client.now_s - begun_s)


async def _ask(client: Client, question: Question, asked: Asked) -> Seen:
    await client.wait_until(question.at_s)
    return await client.ask(question, asked)


async def _watch_redis(client: Client, redis: RedisServer, pauses: list[Fault]) -> None:
    """Notes when Redis did not answer in time, whatever the reason: on a busy machine it need not be a fault of ours."""
    while True:
        begun_s = client.now_s
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
                try:
                    writer.write(b"PING\r\n")
                    await reader.readuntil(b"\n")
                finally:
                    writer.transport.abort()
        finally:  # also of the look that the end of the run meets: what it waits for may be the end of the last request
            if client.now_s - begun_s > REDIS_SLOW_S:
                pauses.append(Fault(at_s=begun_s, kind=FaultKind.REDIS_LATE, lasts_s=client.now_s - begun_s))
        await asyncio.sleep(REDIS_LOOK_S)


async def _watch_machine(client: Client, pauses: list[Fault]) -> None:
    """Notes when this process stood still: what is measured in seconds then says nothing of the system."""
    while True:
        begun_s = client.now_s
        try:
            await asyncio.sleep(REDIS_LOOK_S)
        finally:
            lasts_s = client.now_s - begun_s - REDIS_LOOK_S
            if lasts_s > STARVED_S:
                pauses += [
                    Fault(at_s=begun_s, kind=FaultKind.STARVED, target=name, lasts_s=lasts_s)
                    for name in (*WORKERS, *GATEWAYS, *SCHEDULERS)
                ]
